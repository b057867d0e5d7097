"""
Chat templates as appends.

A template renders whole conversations; a live state only ever grows. The text that a turn adds is
found by rendering a stand-in conversation with the same roles followed by the new messages, and
taking what comes behind the stand-in's last message. What a template would change in *earlier*
turns (old reasoning removed, for example) is therefore not followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import datetime
import enum
import hashlib
import json
import re
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flashrt_ros.errors import Incompatible, InvalidArgument

MAX_RENDERED_CHARS = 64 << 20

Message = dict[str, str]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


class TurnState(str, enum.Enum):
    """Where a conversation stands at a boundary; the value is what a capsule keeps."""

    EMPTY = 'empty'
    """Nothing is folded."""
    MESSAGE = 'message'
    """A complete message was folded last."""
    ASSISTANT_OPEN = 'assistant_open'
    """The generation prompt and perhaps a part of the answer, but no end token."""
    ASSISTANT_ENDED = 'assistant_ended'
    """An end token was folded last; what the template writes after it was not."""


class _RefusalError(Exception):
    """The template does not render this conversation; the text says why."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` blocks mark training spans; here they are their content."""

    tags = {'generation'}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Read one block up to its end tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message: object) -> None:
    raise _RefusalError(str(message))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


class ChatTemplate:
    """A Hugging Face chat template and the deltas that turns add."""

    def __init__(self, source: str, variables: Mapping[str, Any], control: re.Pattern[str],
                 ) -> None:
        """
        Compile a template.

        :param variables: what every rendering sees: ``bos_token`` and so on, and options.
        :param control: matches the texts of control tokens; says where a turn ends.
        :raises Incompatible: the template has a syntax error.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters['tojson'] = _tojson
        environment.globals['raise_exception'] = _raise_exception
        environment.globals['strftime_now'] = (
            lambda form: datetime.datetime.now().strftime(form))
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise Incompatible(
                f'The chat template does not compile ({error}); correct chat_template.jinja.'
            ) from error
        self.source = source
        self._variables = dict(variables)
        self._control = control

    def digest(self) -> str:
        """Return a digest of the template and its variables."""
        text = json.dumps([self.source, self._variables], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def delta(self, messages: Sequence[Message], add_generation_prompt: bool, state: TurnState,
              last_role: str | None = None) -> str:
        """
        Return the text that ``messages`` (and the generation prompt) add at ``state``.

        :param last_role: role of the message folded last, for ``TurnState.MESSAGE``. Where it is
            not known, the first that the template takes of user, system and assistant.
        :raises InvalidArgument: the template forbids the order of roles, or shows nothing.
        """
        messages = list(messages)
        words = self._words(messages)
        if state is TurnState.EMPTY and not messages:
            raise InvalidArgument(
                'There is nothing to render: the session is empty; give a prompt or messages.')
        if state is TurnState.MESSAGE and not messages and not add_generation_prompt:
            return ''
        refusal = None
        for history in self._histories(state, last_role, words):
            try:
                return self._after(history, messages, add_generation_prompt, state, words)
            except _RefusalError as error:
                refusal = refusal or error
        raise InvalidArgument(
            f'The chat template refuses these messages: {refusal}. Change the roles or their '
            'order, or send raw text.')

    def _words(self, messages: Sequence[Message]) -> tuple[str, str, str]:
        """Return three words that occur nowhere, to stand for contents."""
        everything = [self.source, *(value for item in messages for value in item.values()),
                      *(str(value) for value in self._variables.values())]
        n = 0
        while any(f'standin{n}x' in text for text in everything):
            n += 1
        return f'standin{n}xa', f'standin{n}xb', f'standin{n}xc'

    def _histories(self, state: TurnState, last_role: str | None, words: tuple[str, str, str],
                   ) -> list[list[Message]]:
        """Return stand-ins for what is folded, likeliest first; ``words[0]`` is said last."""
        if state is TurnState.EMPTY:
            return [[]]
        if state is not TurnState.MESSAGE:
            last_role = 'assistant'
        if last_role is None:  # behind a rollback: whichever the template takes
            return [history for role in ('user', 'system', 'assistant')
                    for history in self._histories(state, role, words)]
        ways: dict[str, list[list[str]]] = {
            'system': [[]], 'user': [[], ['system']],
            'assistant': [['user'], ['system', 'user']]}
        before = ways.get(
            last_role, [['user', 'assistant'], ['system', 'user', 'assistant'], ['user']])
        return [[_message(earlier, 'Hello') for earlier in roles] + [_message(last_role, words[0])]
                for roles in before]

    def _after(self, history: list[Message], messages: list[Message], prompt: bool,
               state: TurnState, words: tuple[str, str, str]) -> str:
        text = self._render_open(history + messages, prompt, words)
        if not history:
            return text
        tail = self._behind(text, words[0])
        if state is TurnState.ASSISTANT_OPEN:
            return tail
        closing = self._closing(history, words)
        if state is TurnState.ASSISTANT_ENDED:
            at = len(tail) - len(tail.lstrip())
            end = self._control.match(tail, at)
            if end is not None and closing.lstrip().startswith(end.group()):
                return tail[end.end():]
            return tail
        if not tail.startswith(closing):
            raise _RefusalError(
                'it writes a message differently once others follow; send them in one request')
        return tail[len(closing):]

    def _render_open(self, messages: list[Message], prompt: bool, words: tuple[str, str, str],
                     ) -> str:
        """
        Render, and render also what a template refuses only because the user's turn is missing.

        Qwen3.5 does so. A system message alone is a prefix worth keeping: it is rendered with a
        user's turn behind it, and cut where that turn opens.
        """
        try:
            self._check_shown(messages, prompt)
            return self._render(messages, prompt)
        except _RefusalError:
            if prompt or not messages or messages[-1]['role'] == 'user':
                raise
            try:
                followed = [*messages, _message('user', words[2])]
                self._check_shown(followed, False)
                text = self._render(followed, False)
                head = text[:text.rindex(words[2])]
                opening = self._user_opening(words)
            except (_RefusalError, ValueError):
                opening = ''
            if not opening or not head.endswith(opening):
                raise
            return head[:-len(opening)]

    def _check_shown(self, messages: list[Message], prompt: bool) -> None:
        """Refuse messages that the template leaves out silently."""
        marks = [f'shown{n}shown' for n in range(len(messages))]
        text = self._render(
            [_message(item['role'], mark) for item, mark in zip(messages, marks, strict=True)],
            prompt)
        for item, mark in zip(messages, marks, strict=True):
            if mark not in text:
                raise _RefusalError(
                    f'it shows nothing of a message with role {item["role"]!r} there')

    def _closing(self, history: list[Message], words: tuple[str, str, str]) -> str:
        """Return what the template writes after the content of a complete last message."""
        try:
            return self._behind(self._render(history, False), words[0])
        except _RefusalError:
            text = self._render([*history, _message('user', words[2])], False)
            between = self._behind(text, words[0]).partition(words[2])[0]
            opening = self._user_opening(words)
            if not opening or not between.endswith(opening):
                raise
            return between[:-len(opening)]

    def _user_opening(self, words: tuple[str, str, str]) -> str:
        """Return what the template writes before the content of a user's later turn."""
        first, second, third = words
        earlier = [_message('user', first)]
        try:
            text = self._render([*earlier, _message('user', third)], False)
        except _RefusalError:
            earlier = [_message('user', second), _message('assistant', first)]
            text = self._render([*earlier, _message('user', third)], False)
        between = self._behind(text, first).partition(third)[0]
        closing = self._behind(self._render(earlier, False), first)
        return between[len(closing):] if between.startswith(closing) else ''

    @staticmethod
    def _behind(text: str, word: str) -> str:
        """Return what follows ``word``, which must have been written once."""
        _, found, tail = text.partition(word)
        if not found or word in tail:
            raise _RefusalError('it does not write each earlier message once')
        return tail

    def _render(self, messages: list[Message], prompt: bool) -> str:
        parts, size = [], 0
        try:
            for part in self._template.generate(
                    messages=[dict(item) for item in messages], tools=None, documents=None,
                    add_generation_prompt=prompt, **self._variables):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise _RefusalError(f'it writes more than {MAX_RENDERED_CHARS} characters')
        except _RefusalError:
            raise
        except Exception as error:  # whatever a template does is a refusal, never a fault here
            raise _RefusalError(f'it fails with {type(error).__name__}: {error}') from error
        return ''.join(parts)


def _message(role: str, content: str) -> Message:
    return {'role': role, 'content': content}
