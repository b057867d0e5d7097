"""From what a caller sends (a prompt, messages, ids) to the ids that are folded."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import NamedTuple

from flashrt_ros.capsule.boundary import HostState
from flashrt_ros.chat_messages import pairs
from flashrt_ros.errors import InvalidArgument
from flashrt_ros.text import next_turn, Text


class Turn(NamedTuple):
    """Ids to fold, and where the chat stands behind them."""

    ids: list[int]
    state: str
    role: str | None


class Prompting:
    """
    Turns sources into ids for a conversation that stands at a given boundary; changes nothing.

    :param vocabulary: size; ids lie below it.
    """

    def __init__(self, text: Text, vocabulary: int) -> None:
        self._text = text
        self._vocabulary = vocabulary

    def turn(self, host: HostState, *, prompt: str | None, messages: Sequence[tuple[str, str]],
             token_ids: Sequence[int], raw: bool, answer: bool) -> Turn:
        """
        Return what a source adds to the conversation.

        :param answer: also what the chat template puts before an answer.
        :raises InvalidArgument: more than one source, ids out of range, malformed messages.
        """
        if not (prompt or len(messages) or len(token_ids) or answer and host.turn == 'message'):
            return Turn([], host.turn, host.role)  # an open or ended answer goes on as it is
        given = [name for name, there in (
            ('prompt', prompt), ('messages', len(messages)), ('token_ids', len(token_ids)))
            if there]
        if len(given) > 1:
            raise InvalidArgument(f'give one of prompt, messages and token_ids, not '
                                  f'{" and ".join(given)} together.')
        if len(token_ids):
            return Turn(self._checked(token_ids), 'assistant_open', host.role)
        if raw and prompt:
            at_start = host.turn == 'empty'
            ids = self._text.encode(prompt, at_start=at_start, bos=at_start)
            return Turn(self._known(ids), 'assistant_open', host.role)
        chat = [{'role': role, 'content': content} for role, content in pairs(messages)]
        if prompt:
            chat = [{'role': 'user', 'content': prompt}]
        ids = self._known(self._text.render(chat, answer, host.turn, host.role))
        state, role = next_turn(chat, answer, host.turn, host.role)
        return Turn(ids, state.value, role)

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        try:
            ids = list(map(index, token_ids))
        except TypeError as error:
            raise InvalidArgument(f'token ids are integers ({error}).') from error
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            wrong = next(token for token in ids if not 0 <= token < self._vocabulary)
            raise InvalidArgument(f'token id {wrong} is outside [0, {self._vocabulary}).')
        return ids

    def _known(self, ids: list[int]) -> list[int]:
        if ids and max(ids) >= self._vocabulary:
            raise InvalidArgument(f'the text contains the token id {max(ids)}, and the model '
                                  f'knows ids below {self._vocabulary}: its tokenizer has tokens '
                                  'that it was not trained on. Leave that text out.')
        return ids
