"""The facade of this package: one object for everything between text and token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
import re
from typing import Any

from flashrt_ros.errors import InvalidArgument
from flashrt_ros.text import files
from flashrt_ros.text.chat import CHATML, ChatTemplate, Message, TurnState
from flashrt_ros.text.huggingface import HfVocabulary
from flashrt_ros.text.vocabulary import (
    ByteVocabulary,
    check_text,
    Marks,
    MAX_TEXT_CHARS,
    Vocabulary,
)

MAX_MESSAGES = 1024
_ROLE = re.compile(r'[A-Za-z0-9_-]{1,64}')


class Text:
    """A tokenizer with its chat template. Immutable; safe to share between sessions."""

    def __init__(self, vocabulary: Vocabulary, chat: ChatTemplate | None) -> None:
        self._vocabulary = vocabulary
        self._chat = chat

    @classmethod
    def load(cls, directory: Path | str, options: Mapping[str, Any] | None = None) -> Text:
        """
        Load the tokenizer of a Hugging Face directory.

        :param options: further variables of the chat template, ``{'enable_thinking': False}``.
        :raises Storage: files are missing or unreadable.
        :raises Corrupt: a file is malformed.
        :raises Incompatible: a kind of tokenizer or template that is not supported.
        """
        found = files.read(Path(directory))
        vocabulary = HfVocabulary(found)
        chat = None
        if found.template is not None:
            chat = ChatTemplate(
                found.template, {**found.named, **(options or {})}, vocabulary.control)
        return cls(vocabulary, chat)

    @classmethod
    def bytes_only(cls, vocab_size: int) -> Text:
        """
        Return the tokenizer of a model without one: ids 0 to 255 are bytes, others no text.

        Turns are rendered as ChatML spelled in bytes, so a message *can* spell a turn mark here.

        :raises InvalidArgument: fewer than 256 ids.
        """
        vocabulary = ByteVocabulary(vocab_size)
        return cls(vocabulary, ChatTemplate(CHATML, {}, vocabulary.control))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's embedding may have further, unused rows."""
        return self._vocabulary.size

    @property
    def bos_id(self) -> int | None:
        """The id of the begin token, if there is one."""
        return self._named('bos_token')

    @property
    def eos_id(self) -> int | None:
        """The id of the tokenizer's end token; generation_config.json may name more."""
        return self._named('eos_token')

    @property
    def has_chat(self) -> bool:
        """Tell whether messages can be rendered."""
        return self._chat is not None

    def _named(self, key: str) -> int | None:
        token = self._vocabulary.named.get(key)
        return None if token is None else self._vocabulary.token_id(token)

    def digest(self) -> str:
        """Return the SHA-256 of what decides ids and text; a hard field of a fingerprint."""
        return self._vocabulary.digest

    def chat_digest(self) -> str:
        """Return the SHA-256 of the chat template and its variables, '' without one."""
        return '' if self._chat is None else self._chat.digest()

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling, ``'<|im_end|>'``, or None."""
        return self._vocabulary.token_id(token)

    def is_special(self, token_id: int) -> bool:
        """Tell whether an id is a special token, which text leaves out."""
        return self._vocabulary.is_special(token_id)

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """Return the bytes that an id adds to a text."""
        if skip_special and self._vocabulary.is_special(token_id):
            return b''
        return self._vocabulary.token_bytes(token_id)

    def first_bytes(self, data: bytes) -> bytes:
        """Return the bytes of an answer's first token after the rule for its leading space."""
        return self._vocabulary.first_bytes(data)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of whole ids, as a stream of them would give it."""
        tokens = [self.token_bytes(token_id, skip_special) for token_id in ids]
        tokens = [token for token in tokens if token]
        if tokens:
            tokens[0] = self.first_bytes(tokens[0])
        return b''.join(tokens).decode('utf-8', 'replace')

    def encode(self, text: str, allow_special: bool = False, *, at_start: bool = True,
               bos: bool = False) -> list[int]:
        """
        Encode raw text; nothing is added unless ``bos``.

        :param allow_special: spellings of control tokens become them; only for trusted text.
        :param at_start: false where the ids continue a history, for tokenizers that put a mark
            before a first word.
        :raises InvalidArgument: no text, too long, or not encodable.
        """
        prefix = [self.bos_id] if bos and self.bos_id is not None else []
        return prefix + self._vocabulary.encode(text, allow_special, at_start and not prefix)

    def render(self, messages: Sequence[Any], add_generation_prompt: bool = True,
               state: TurnState | str = TurnState.EMPTY, last_role: str | None = None,
               ) -> list[int]:
        """
        Return the ids that messages add to a conversation that stands at ``state``.

        The former assistant turn is closed first where it is open. From ``EMPTY`` this is what
        transformers' ``apply_chat_template`` gives, unless a content spells a control token:
        that spelling is encoded as the plain text it is.

        :param messages: mappings or objects with ``role`` and ``content``, both strings.
        :param last_role: role of the message folded last; see :meth:`ChatTemplate.delta`.
        :raises InvalidArgument: malformed messages, or the template refuses them.
        """
        if self._chat is None:
            raise InvalidArgument(
                'This tokenizer has no chat template; send raw text, or put a '
                'chat_template.jinja into the model directory.')
        try:
            state = TurnState(state)
        except ValueError as error:
            raise InvalidArgument(
                f'{state!r} is no turn state; use one of {[item.value for item in TurnState]}.'
            ) from error
        checked = check_messages(messages)
        marks = self._mark(checked)
        text = self._chat.delta(checked, bool(add_generation_prompt), state, last_role)
        at_start = state is TurnState.EMPTY
        if marks is None:
            return self._vocabulary.encode(text, True, at_start)
        return self._vocabulary.encode_marked(text, marks, at_start)

    def _mark(self, messages: list[Message]) -> Marks | None:
        """
        Put private characters around control tokens that contents spell; None if none does.

        An assistant's message may use added tokens that are not special, such as ``<think>``:
        they are its own words, which templates look for.
        """
        spans = [self._vocabulary.control_spans(item['content'], item['role'] == 'assistant')
                 for item in messages]
        if not any(spans):
            return None
        contents = [item['content'] for item in messages]
        free = (chr(code) for code in range(0xf0000, 0xffffe)
                if not any(chr(code) in content for content in contents))
        start, end = next(free), next(free)
        spelled = set()
        for item, found in zip(messages, spans, strict=True):
            content, at, parts = item['content'], 0, []
            for begin, stop in found:
                parts += [content[at:begin], start, content[begin:stop], end]
                spelled.add(content[begin:stop])
                at = stop
            item['content'] = ''.join([*parts, content[at:]])
        return Marks(start, end, frozenset(spelled))


def check_messages(messages: Sequence[Any]) -> list[Message]:
    """
    Return messages as plain dictionaries of ``role`` and ``content``.

    :raises InvalidArgument: too many, too long, or not of this form.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidArgument('messages must be a list of messages with role and content.')
    if len(messages) > MAX_MESSAGES:
        raise InvalidArgument(
            f'{len(messages)} messages were given; at most {MAX_MESSAGES} are allowed at once.')
    checked = []
    for item in messages:
        if isinstance(item, Mapping):
            extra = set(item) - {'role', 'content'}
            if extra:
                raise InvalidArgument(
                    f'A message has the unknown fields {sorted(map(str, extra))}; only role and '
                    'content are supported.')
            role, content = item.get('role'), item.get('content')
        else:
            role, content = getattr(item, 'role', None), getattr(item, 'content', None)
        if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
            raise InvalidArgument(
                'The role of a message must be 1 to 64 letters, digits, "_" or "-", such as '
                'system, user or assistant.')
        if not isinstance(content, str):
            raise InvalidArgument('The content of a message must be a string.')
        checked.append({'role': role, 'content': check_text(content)})
    if sum(len(item['content']) for item in checked) > MAX_TEXT_CHARS:
        raise InvalidArgument(
            f'The messages are longer than {MAX_TEXT_CHARS} characters together; send less.')
    return checked


def next_turn(messages: Sequence[Any], add_generation_prompt: bool, state: TurnState | str,
              last_role: str | None = None) -> tuple[TurnState, str | None]:
    """Return the ``(state, last_role)`` after the ids of such a :meth:`Text.render` are folded."""
    if add_generation_prompt:
        return TurnState.ASSISTANT_OPEN, 'assistant'
    if messages:
        last = messages[-1]
        role = last['role'] if isinstance(last, Mapping) else last.role
        return TurnState.MESSAGE, role
    if TurnState(state) in (TurnState.ASSISTANT_OPEN, TurnState.ASSISTANT_ENDED):
        return TurnState.MESSAGE, 'assistant'
    return TurnState(state), last_role
