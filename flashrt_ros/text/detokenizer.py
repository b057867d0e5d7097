"""
From token ids to text, one id at a time.

Every supported tokenizer is reduced to one table, *id -> bytes*, and one rule for the start of an
answer; the bytes then run through Python's incremental UTF-8 decoder with ``errors='replace'``.
So the text of a stream equals ``b''.join(bytes of each id).decode('utf-8', 'replace')``, however
it was cut, and a push costs the same at any length.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from typing import Any, TYPE_CHECKING

from flashrt_ros.errors import Corrupt, Incompatible, InvalidArgument

if TYPE_CHECKING:
    from flashrt_ros.text.tokenizer import Text


_DECODER = codecs.getincrementaldecoder('utf-8')


def byte_level_alphabet() -> dict[str, int]:
    """Return the printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    plain = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table


def token_decoder(
    spec: Mapping[str, Any] | None,
) -> tuple[Callable[[str], bytes], Callable[[bytes], bytes]]:
    """
    Compile the ``decoder`` of a tokenizer.json into ``(token -> bytes, first bytes -> bytes)``.

    Supported: ``ByteLevel``; ``Metaspace``; sequences of ``Replace`` (a plain string),
    ``ByteFallback``, ``Fuse``, ``Strip`` (at the start) and the former two. Others work on whole
    sequences and cannot be streamed exactly.

    :raises Incompatible: the decoder is another one.
    """
    if spec is None:
        raise _unsupported('none')
    steps = spec.get('decoders') if spec.get('type') == 'Sequence' else [spec]
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise Corrupt('tokenizer.json: the decoder is malformed; restore the file from its origin.')
    each: list[Callable[[str], str]] = []
    first: Callable[[bytes], bytes] = bytes
    fallback = byte_level = fused = False
    for step in steps:
        kind = step.get('type')
        if kind == 'ByteLevel':
            byte_level = True
        elif kind == 'ByteFallback':
            fallback = True
        elif kind == 'Fuse':
            fused = True
        elif kind == 'Metaspace' and not fused:
            mark = step.get('replacement', '\u2581')
            each.append(_replace(mark, ' '))
            if step.get('prepend_scheme', 'always') != 'never':
                first = _without_spaces
        elif kind == 'Replace' and isinstance(step.get('pattern', {}).get('String'), str):
            old, new = step['pattern']['String'], str(step.get('content', ''))
            if fused and len(old) != 1:
                raise _unsupported('Replace after Fuse')
            each.append(_replace(old, new))
        elif kind == 'Strip' and fused and step.get('stop', 0) == 0:
            first = _strip(str(step.get('content', ' ')).encode(), int(step.get('start', 0)))
        else:
            raise _unsupported(str(kind))
    if byte_level and (fallback or each):
        raise _unsupported('ByteLevel mixed with others')
    alphabet = byte_level_alphabet() if byte_level else {}

    def decode(token: str) -> bytes:
        if byte_level:
            try:
                return bytes(alphabet[char] for char in token)
            except KeyError:
                return token.encode('utf-8', 'replace')
        if fallback and len(token) == 6 and token.startswith('<0x') and token.endswith('>'):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for change in each:
            token = change(token)
        return token.encode('utf-8', 'replace')

    return decode, first


def _replace(old: str, new: str) -> Callable[[str], str]:
    return lambda token: token.replace(old, new)


def _without_spaces(data: bytes) -> bytes:
    return data.replace(b' ', b'')


def _strip(unit: bytes, most: int) -> Callable[[bytes], bytes]:
    def strip(data: bytes) -> bytes:
        for _ in range(most):
            if not unit or not data.startswith(unit):
                break
            data = data[len(unit):]
        return data
    return strip


def _unsupported(what: str) -> Incompatible:
    return Incompatible(
        f'The tokenizer has an unsupported decoder ({what}); supported are ByteLevel, Metaspace, '
        'and sequences of Replace, ByteFallback, Fuse and a leading Strip. Use a model with one '
        'of these.')


class Detokenizer:
    """
    Turn the ids of one answer into text as they come; only whole characters come out.

    A character whose bytes are spread over several ids stays pending until its last byte; bytes
    that can no longer become a character turn into U+FFFD at once, as ``bytes.decode`` with
    ``errors='replace'`` would have it. Special tokens give no text unless asked.
    """

    def __init__(self, text: Text, skip_special: bool = True) -> None:
        self._text = text
        self._skip_special = skip_special
        self._decoder = _DECODER('replace')
        self._start = True

    def push(self, token_id: int) -> str:
        """
        Take one id and return the characters that it completes, often none.

        An id beyond the tokenizer (padding rows of an embedding) gives no text.

        :raises InvalidArgument: the id is negative.
        """
        if token_id < 0:
            raise InvalidArgument(f'Token id {token_id} is negative; ids start at 0.')
        data = self._text.token_bytes(token_id, self._skip_special)
        if self._start and data:
            data = self._text.first_bytes(data)
            self._start = False
        return self._decoder.decode(data)

    @property
    def pending(self) -> bytes:
        """The bytes of a character that is not complete yet."""
        return self._decoder.getstate()[0]

    def flush(self) -> str:
        """
        End the answer: an incomplete rest becomes one U+FFFD, and the next id starts afresh.

        Do not call it to keep the rest pending for a continuation; keep :meth:`state` instead.
        """
        rest = self._decoder.decode(b'', True)
        self._decoder.reset()
        self._start = True
        return rest

    def state(self) -> dict[str, Any]:
        """Return all that :meth:`restore` needs, as JSON-able values."""
        return {'pending': self.pending.hex(), 'start': self._start,
                'skip_special': self._skip_special}

    @classmethod
    def restore(cls, text: Text, state: Mapping[str, Any]) -> Detokenizer:
        """
        Continue from a value of :meth:`state`, any number of times.

        :raises Corrupt: ``state`` is malformed.
        """
        try:
            pending = bytes.fromhex(state['pending'])
            start, skip_special = state['start'], state['skip_special']
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt('The saved text state is malformed; use another capsule.') from error
        detokenizer = cls(text, skip_special)
        if (not isinstance(start, bool) or not isinstance(skip_special, bool)
                or detokenizer._decoder.decode(pending) or detokenizer.pending != pending):
            raise Corrupt('The saved text state is malformed; use another capsule.')
        detokenizer._start = start
        return detokenizer
