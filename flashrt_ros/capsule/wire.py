"""
The bytes around the payload: the tensor table and the sealed header of a capsule file.

The layout of a file follows from manifest and position alone, so a reader computes the table that
a good file must have and compares, rather than believing the one it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import os
from typing import Any

from blake3 import blake3

from flashrt_ros.arena import Manifest, Role
from flashrt_ros.capsule import faults
from flashrt_ros.capsule.header import (
    DTYPES,
    dump_json,
    FORMAT_VERSION,
    Header,
    manifest_from,
    parse_json,
)
from flashrt_ros.errors import Corrupt, Incompatible, InvalidArgument

FORMAT = 'flashrt_ros.capsule'
PADDING = '~padding'  # region of the fixed block's gaps, only where one is not zero
MAX_HEADER = 16 << 20  # bytes
ZERO = '0' * 64  # stands for a digest until it is known
_ALIGN = 64  # bytes; the payload starts at a multiple
_KEY = '"blake3":"'

#: format version -> turns a capsule header of that version, as parsed, into one of today. A version
#: that was ever released stays here; the payload is described by the header of any version.
READERS: dict[str, Callable[[Any], Any]] = {
    '1': lambda header: header,
}
assert str(FORMAT_VERSION) in READERS


@dataclass(frozen=True)
class Region:
    """A tensor of the file: name, safetensors dtype, shape and size in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def list_regions(manifest: Manifest, position: int, padding: bool) -> list[Region]:
    """List the regions in file order: widest dtype first, so that each one is aligned."""
    buffers = sorted((b for b in manifest.buffers if b.role is not Role.SCRATCH),
                     key=lambda b: -b.dtype.itemsize)
    regions = []
    for buffer in buffers:
        dtype = DTYPES[str(buffer.dtype).removeprefix('torch.')]
        rows = buffer.role is Role.ROWS
        shape = (position, *buffer.shape) if rows else buffer.shape
        regions.append(Region(buffer.name, dtype, shape,
                               buffer.nbytes * (position if rows else 1)))
    if padding:
        size = sum(end - start for start, end in gaps(manifest))
        regions.append(Region(PADDING, 'U8', (size,), size))
    return regions


def gaps(manifest: Manifest) -> list[tuple[int, int]]:
    """Byte spans of the fixed block that no buffer covers."""
    gaps, end = [], 0
    for buffer in manifest.fixed:
        start = manifest.offsets[buffer.name]
        if start > end:
            gaps.append((end, start))
        end = start + buffer.nbytes
    if manifest.fixed_bytes > end:
        gaps.append((end, manifest.fixed_bytes))
    return gaps


def encode(header: Header, regions: Sequence[Region]) -> bytes:
    """Return length and header bytes; their size does not depend on the digests' values."""
    table: dict = {'__metadata__': {
        'blake3': ZERO, 'format': FORMAT, 'format_version': str(FORMAT_VERSION),
        'header': dump_json(header.to_json())}}
    offset = 0
    for region in regions:
        table[region.name] = {'dtype': region.dtype, 'shape': list(region.shape),
                              'data_offsets': [offset, offset + region.nbytes]}
        offset += region.nbytes
    # the table is not sorted: readers of safetensors like offsets in order
    text = _dump_table(table)
    text += ' ' * (-(8 + len(text)) % _ALIGN)
    if len(text) > MAX_HEADER:
        raise InvalidArgument(f'The capsule header has {len(text)} bytes, more than the '
                              f'{MAX_HEADER} a file may hold; the host state must not grow.')
    raw = text.encode('ascii')
    seal = blake3(raw).hexdigest()
    raw = raw.replace((_KEY + ZERO).encode(), (_KEY + seal).encode(), 1)
    return len(raw).to_bytes(8, 'little') + raw


def _dump_table(table: dict) -> str:
    return '{' + ','.join(f'{dump_json(k)}:{dump_json(v)}' for k, v in table.items()) + '}'


def read_into(fd: int, view: memoryview) -> None:
    """Fill ``view`` from the file; raises Corrupt at an early end."""
    while view:
        faults.point('codec.read')
        count = os.readv(fd, [view])
        if count == 0:
            raise Corrupt('The capsule file became shorter while it was read; read it again.')
        view = view[count:]


def decode(fd: int, size: int) -> tuple[Header, Manifest, list[Region]]:
    """Read and check everything before the payload, and that the payload has its size."""
    if size < 8:
        raise Corrupt(f'The capsule file is truncated: it has {size} bytes.')
    start = bytearray(8)
    read_into(fd, memoryview(start))
    length = int.from_bytes(start, 'little')
    if length > MAX_HEADER:
        raise Corrupt(f'This is no capsule file: it claims a header of {length} bytes, more than '
                      f'{MAX_HEADER}.')
    if length > size - 8:
        raise Corrupt(f'The capsule file is truncated: its header of {length} bytes does not fit '
                      f'in {size} bytes.')
    raw = bytearray(length)
    read_into(fd, memoryview(raw))
    table = parse_json(bytes(raw), 'safetensors header')
    meta = table.pop('__metadata__', None) if isinstance(table, dict) else None
    if not isinstance(meta, dict) or meta.get('format') != FORMAT:
        raise Corrupt('This is no capsule file: the safetensors metadata does not name the format '
                      f'{FORMAT!r}.')
    version = meta.get('format_version')
    upgrade = READERS.get(version) if isinstance(version, str) else None
    if upgrade is None:
        raise Incompatible(f'The capsule file has format version {ascii(version)[:40]}; this '
                           f'package reads version {", ".join(sorted(READERS))}. Save the capsule '
                           'again with this version, or read it with the one that wrote it.')
    _check_seal(bytes(raw), meta)
    header = Header.from_json(upgrade(parse_json(meta['header'], 'capsule header')))
    manifest = manifest_from(header.manifest)
    digests = header.digests or {}
    regions = list_regions(manifest, header.position, PADDING in digests)
    _check_table(table, regions, digests)
    payload = sum(r.nbytes for r in regions)
    if header.payload_bytes != payload:
        raise Corrupt(f'The capsule header claims {header.payload_bytes} payload bytes, but its '
                      f'{header.position} rows and fixed block make {payload}.')
    if size != 8 + length + payload:
        word = 'truncated' if size < 8 + length + payload else 'followed by trailing bytes'
        raise Corrupt(f'The capsule file is {word}: it has {size} bytes, but its header and '
                      f'{header.position} rows make {8 + length + payload}.')
    return header, manifest, regions


def _check_seal(raw: bytes, meta: dict) -> None:
    seal = meta.get('blake3')
    if meta.keys() != {'blake3', 'format', 'format_version', 'header'} or not all(
            isinstance(v, str) for v in meta.values()):
        raise Corrupt('The metadata of the capsule file has missing or unknown entries.')
    found = f'{_KEY}{seal}"'.encode('ascii', 'replace')
    if len(found) != len(_KEY) + 65 or raw.count(found) != 1 or blake3(
            raw.replace(found, f'{_KEY}{ZERO}"'.encode())).hexdigest() != seal:
        raise Corrupt('The header of the capsule file was altered: its digest does not match.')


def _check_table(table: dict, regions: Sequence[Region], digests: dict) -> None:
    expected = {r.name for r in regions}
    for what, found in (('tensors', table.keys()), ('digests', digests.keys())):
        if found != expected:
            parts = [f'{word} {ascii(sorted(names)[:6])}' for word, names in (
                ('missing', expected - found), ('added', found - expected)) if names]
            raise Corrupt(f'The {what} of the capsule file are not those of its manifest: '
                          f'{" and ".join(parts)}.')
    offset = 0
    for region in regions:
        wanted = {'dtype': region.dtype, 'shape': list(region.shape),
                  'data_offsets': [offset, offset + region.nbytes]}
        if table[region.name] != wanted:
            raise Corrupt(f'Region {region.name!r} of the capsule file is '
                          f'{ascii(table[region.name])[:120]}, but its manifest and position '
                          f'make it {wanted}.')
        offset += region.nbytes


