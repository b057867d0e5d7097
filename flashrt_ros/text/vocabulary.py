"""What a vocabulary is: text to ids and ids to bytes; and the one of models without a tokenizer."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple, Protocol

from flashrt_ros.errors import InvalidArgument

MAX_TEXT_CHARS = 16 << 20
NEVER = re.compile('(?!)')


class Marks(NamedTuple):
    """How user text that spells control tokens is marked inside rendered text."""

    start: str
    end: str
    spelled: frozenset[str]


class Vocabulary(Protocol):
    """What :class:`flashrt_ros.text.Text` needs of a tokenizer."""

    size: int
    digest: str
    named: dict[str, str]
    control: re.Pattern[str]

    def encode(self, text: str, allow_special: bool, at_start: bool) -> list[int]:
        """Encode text; control tokens come out only with ``allow_special``."""

    def encode_marked(self, text: str, marks: Marks, at_start: bool) -> list[int]:
        """Encode the text of a template with marked parts that are user text."""

    def control_spans(self, text: str, special_only: bool = False) -> list[tuple[int, int]]:
        """Return where text would be taken for control tokens, as character ranges."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling."""

    def is_special(self, token_id: int) -> bool:
        """Tell whether the id is a special token."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return what an id adds to the bytes of a text."""

    def first_bytes(self, data: bytes) -> bytes:
        """Return the bytes of a first token after the rule for its leading space."""


def check_text(text: str) -> str:
    """Return ``text`` if it can be encoded at all; a typed refusal otherwise."""
    if not isinstance(text, str):
        raise InvalidArgument(f'Text must be a string, not {type(text).__name__}.')
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidArgument(
            f'The text has {len(text)} characters; at most {MAX_TEXT_CHARS} are allowed.')
    try:
        text.encode('utf-8')
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            'The text holds a lone surrogate, which is no character; decode the input as UTF-8 '
            "with errors='replace' first.") from error
    return text


class ByteVocabulary:
    """Ids 0 to 255 are bytes, others give no text; there are no control tokens."""

    def __init__(self, size: int) -> None:
        if size < 256:
            raise InvalidArgument(
                f'A byte vocabulary needs at least 256 ids, not {size}; give the model more.')
        self.size = size
        self.digest = hashlib.sha256(b'flashrt_ros bytes 1').hexdigest()
        self.named: dict[str, str] = {}
        self.control = NEVER

    def encode(self, text: str, allow_special: bool, at_start: bool) -> list[int]:
        """Return the UTF-8 bytes of ``text``."""
        return list(check_text(text).encode())

    def encode_marked(self, text: str, marks: Marks, at_start: bool) -> list[int]:
        """Encode as any text: nothing is ever marked here."""
        return self.encode(text, False, at_start)

    def control_spans(self, text: str, special_only: bool = False) -> list[tuple[int, int]]:
        """Return none: there are no control tokens."""
        return []

    def token_id(self, token: str) -> int | None:
        """Return the byte of a one-byte spelling."""
        data = token.encode('utf-8', 'replace')
        return data[0] if len(data) == 1 else None

    def is_special(self, token_id: int) -> bool:
        """Return false: there are no special tokens."""
        return False

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte that an id is, or nothing."""
        return bytes([token_id]) if token_id < 256 else b''

    def first_bytes(self, data: bytes) -> bytes:
        """Return ``data``: there is no rule for a leading space."""
        return data
