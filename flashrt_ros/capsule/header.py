"""
The header of a capsule file: what it holds, and the strict JSON it is read from.

Everything here treats its input as hostile: sizes are bounded before anything is parsed, every
field is checked for type and range, and only :class:`Corrupt` comes out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
import json
import math
import re
from typing import Any

import torch

from flashrt_ros.arena import Buffer, Manifest, Role
from flashrt_ros.capsule.names import is_name
from flashrt_ros.errors import Corrupt

FORMAT_VERSION = 1
MAX_POSITION = 1 << 31  # rows; far beyond any context, far below what overflows
MAX_TEXT = 1 << 16  # characters of a note
_ID = re.compile(r'[A-Za-z0-9_.:-]{1,128}')
_HEX = re.compile(r'[0-9a-f]{64}')

#: torch dtype name -> safetensors dtype name
DTYPES = {
    'float64': 'F64', 'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16',
    'float8_e4m3fn': 'F8_E4M3', 'float8_e5m2': 'F8_E5M2', 'complex64': 'C64',
    'int64': 'I64', 'int32': 'I32', 'int16': 'I16', 'int8': 'I8',
    'uint64': 'U64', 'uint32': 'U32', 'uint16': 'U16', 'uint8': 'U8', 'bool': 'BOOL',
}


def parse_json(raw: bytes | str, what: str) -> Any:
    """
    Parse JSON strictly: no duplicated keys, no NaN or infinity, bounded depth and digits.

    :raises Corrupt: naming ``what`` was malformed and why.
    """
    def pairs(items: list[tuple[str, Any]]) -> dict:
        result = dict(items)
        if len(result) != len(items):
            raise ValueError('a key stands twice in one object')
        return result

    def constant(text: str) -> float:
        raise ValueError(f'{text} is no JSON number')

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError('a number is out of range')
        return value

    try:
        text = raw if isinstance(raw, str) else raw.decode('utf-8')
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant,
                          parse_float=number)
    except (ValueError, RecursionError) as error:
        reason = str(error) or 'it is nested too deeply'
        raise Corrupt(f'The {what} is not valid JSON: {reason[:200]}.') from error


def dump_json(value: Any) -> str:
    """
    Canonical JSON: ASCII, sorted keys, no spaces.

    :raises ValueError: for NaN or infinity. :raises TypeError: for what JSON cannot hold.
    """
    return json.dumps(value, sort_keys=True, separators=(',', ':'), allow_nan=False)


@dataclass(frozen=True)
class Header:
    """
    Everything about a capsule but its bytes.

    ``digests`` (blake3, hex) and ``payload_bytes`` are filled in by the writer; leave them empty
    in an image that is about to be written.

    :param id: content-independent identity, unique for each capsule.
    :param parent_id: id of the capsule this one grew from, ``''`` for none.
    :param position: live rows (tokens).
    :param created: seconds since the epoch.
    :param aligned: taken with ``align=true`` (cold-exact, see the capsule contract).
    :param host: the host part of the boundary, opaque JSON.
    :param fingerprint: ``{'hard': {...}, 'soft': {...}}`` and optionally ``'recorded'``.
    :param manifest: ``Manifest.describe()``.
    """

    id: str
    name: str
    position: int
    manifest: list[dict]
    fingerprint: dict
    host: dict
    parent_id: str = ''
    session: str = ''
    created: float = 0.0
    note: str = ''
    aligned: bool = False
    digests: dict[str, str] | None = None
    payload_bytes: int = 0
    format_version: int = FORMAT_VERSION

    def to_json(self) -> dict:
        """Return the fields as a JSON-able dictionary."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, data: Any) -> Header:
        """
        Check every field and build a header.

        :raises Corrupt: for a missing, added or malformed field, naming it.
        """
        if not isinstance(data, dict):
            raise Corrupt('The capsule header is not a JSON object.')
        known = {f.name for f in fields(cls)}
        if data.keys() != known:
            odd = ', '.join(sorted(ascii(k)[:40] for k in data.keys() ^ known)[:8])
            raise Corrupt(f'The capsule header has missing or unknown fields: {odd}.')
        header = cls(**data)
        header.check()
        return header

    def check(self) -> None:
        """
        Check types and ranges of all fields.

        :raises Corrupt: naming the field.
        """
        def need(good: bool, field: str, rule: str) -> None:
            if not good:
                shown = ascii(getattr(self, field))[:60]
                raise Corrupt(f'The capsule header field {field!r} must be {rule}, not {shown}.')

        need(_is_int(self.format_version, FORMAT_VERSION, FORMAT_VERSION), 'format_version',
             str(FORMAT_VERSION))
        need(is_name(self.name), 'name', 'a capsule name')
        need(_is_id(self.id), 'id', 'an id of 1 to 128 characters')
        need(self.parent_id == '' or _is_id(self.parent_id), 'parent_id', 'an id or empty')
        need(self.session == '' or is_name(self.session), 'session', 'a session name or empty')
        need(_is_text(self.note), 'note', f'text of at most {MAX_TEXT} characters')
        need(_is_int(self.position, 0, MAX_POSITION), 'position', f'0 to {MAX_POSITION} rows')
        need(type(self.created) in (int, float) and math.isfinite(self.created), 'created',
             'a finite number of seconds')
        need(isinstance(self.aligned, bool), 'aligned', 'true or false')
        need(isinstance(self.host, dict), 'host', 'an object')
        parts = self.fingerprint.keys() if isinstance(self.fingerprint, dict) else set()
        need({'hard', 'soft'} <= parts <= {'hard', 'soft', 'recorded'}
             and all(isinstance(v, dict) for v in self.fingerprint.values()),
             'fingerprint', 'an object of the objects hard and soft')
        need(isinstance(self.manifest, list), 'manifest', 'a list')
        need(self.digests is None or isinstance(self.digests, dict) and all(
            isinstance(d, str) and _HEX.fullmatch(d) for d in self.digests.values()),
            'digests', 'an object of blake3 digests in hexadecimal')
        need(_is_int(self.payload_bytes, 0, 1 << 62), 'payload_bytes', 'a number of bytes')


def _is_int(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_id(value: object) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _is_text(value: object) -> bool:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        return False
    return not any('\ud800' <= c <= '\udfff' for c in value)  # half a surrogate pair


def manifest_from(described: list[dict]) -> Manifest:
    """
    Rebuild a manifest from ``Manifest.describe()`` as read from a file.

    :raises Corrupt: for anything that no manifest describes.
    """
    buffers = []
    for index, item in enumerate(described):
        try:
            name, role, dtype = item['name'], Role(item['role']), item['dtype']
            shape = item['shape']
            if item.keys() != {'name', 'role', 'dtype', 'shape'} or role is Role.SCRATCH:
                raise ValueError('unknown keys or role')
            if not isinstance(name, str) or dtype not in DTYPES or len(shape) > 16:
                raise ValueError('bad name, dtype or shape')
            if not all(_is_int(size, 1, 1 << 40) for size in shape):
                raise ValueError('bad shape')
            buffers.append(Buffer(name, role, getattr(torch, dtype), tuple(shape)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt(f'Entry {index} of the manifest in the file describes no buffer '
                          f'({str(error)[:80]}).') from error
    try:
        manifest = Manifest(buffers[1:])
    except ValueError as error:
        raise Corrupt(f'The manifest in the file is malformed: {str(error)[:200]}.') from error
    if manifest.describe() != described:
        raise Corrupt('The manifest in the file does not begin with the position buffer.')
    return manifest
