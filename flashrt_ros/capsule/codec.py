"""
The capsule file: one self-contained safetensors file with a digest for every region.

Layout (see ``docs/file-format.md``)::

    8 bytes   length N of the safetensors header, little endian
    N bytes   safetensors header: the tensor table and ``__metadata__`` with our JSON header
    payload   one tensor for each buffer of the manifest; of rows only the live ones

Reading is one pass: sizes are settled against the manifest before anything is allocated, every
region is hashed while it is still in the cache, and nothing is returned unless all digests hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
import os

from blake3 import blake3
import torch

from flashrt_ros.arena import Manifest, POSITION, Rows
from flashrt_ros.capsule import faults
from flashrt_ros.capsule.atomic import atomic_file, regular_file
from flashrt_ros.capsule.fingerprint import Fingerprint
from flashrt_ros.capsule.header import dump_json, Header
from flashrt_ros.capsule.stream import BLOCK, read_payload
from flashrt_ros.capsule.wire import (
    decode,
    encode,
    gaps,
    list_regions,
    PADDING,
    Region,
    ZERO,
)
from flashrt_ros.errors import Capacity, Corrupt, Incompatible, InvalidArgument

__all__ = ['Header', 'Image', 'file_bytes', 'read', 'read_header', 'verify', 'write']

Pieces = dict[str, list[torch.Tensor]]  # of each rows buffer, one after the other
DIRECT = 1 << 20  # bytes from which a piece is written from where it lies


@dataclass
class Image:
    """
    A frozen boundary on the host, as written to or read from a file.

    :param fixed: uint8 ``[fixed_bytes]``.
    :param rows: for each rows buffer ``[position, *shape]`` in its dtype, or a sequence of such
        pieces to be written one after the other (the pages of a pool). Views may be strided.
    :param block: set by :func:`read`: the rows as one ``Rows`` of capacity ``position``, of which
        ``rows`` are the views, for pitched copies.
    """

    header: Header
    fixed: torch.Tensor
    rows: dict[str, torch.Tensor | Sequence[torch.Tensor]]
    block: Rows | None = None


def _padding(manifest: Manifest, fixed: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of the gaps, or None where all are zero as they should be."""
    spans = [fixed[start:end] for start, end in gaps(manifest)]
    if not any(bool(span.any()) for span in spans):
        return None
    return torch.cat(spans)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, as a view where that is possible."""
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _blank(header: Header, manifest: Manifest, regions: Sequence[Region]) -> Header:
    """Fill in what the writer knows, with digests of zeros."""
    header = replace(header, digests={r.name: ZERO for r in regions},
                     payload_bytes=sum(r.nbytes for r in regions))
    try:
        header.check()
        dump_json(header.to_json())
    except (Corrupt, ValueError, TypeError) as error:
        raise InvalidArgument(f'This capsule cannot be written: {error}') from error
    if header.manifest != manifest.describe():
        raise InvalidArgument('This capsule cannot be written: its header describes another '
                              'manifest than the one given.')
    return header


def file_bytes(image: Image, manifest: Manifest) -> int:
    """Return the exact size in bytes of the file that :func:`write` would make."""
    padding = _padding(manifest, image.fixed) is not None
    regions = list_regions(manifest, image.header.position, padding)
    header = _blank(image.header, manifest, regions)
    return len(encode(header, regions)) + header.payload_bytes


# -- writing --------------------------------------------------------------------------------------

def write(image: Image, path: str | os.PathLike, manifest: Manifest, *, overwrite: bool) -> int:
    """
    Write ``image`` all or nothing and return the bytes of the file.

    The payload is streamed and hashed block by block; the header, whose size is known beforehand,
    is filled in last.

    :raises NameExists: ``path`` exists and ``overwrite`` is false.
    :raises Storage: the file system refused; nothing is left behind.
    :raises InvalidArgument: the image contradicts the manifest.
    """
    with atomic_file(path, overwrite=overwrite) as fd:
        return write_to(fd, image, manifest)


def write_to(fd: int, image: Image, manifest: Manifest) -> int:
    """Write ``image`` into an open file; return the bytes. Raises OSError and InvalidArgument."""
    fixed = image.fixed
    if fixed.dtype is not torch.uint8 or fixed.numel() != manifest.fixed_bytes:
        raise InvalidArgument(f'The fixed block of this capsule must be {manifest.fixed_bytes} '
                              'bytes of uint8.')
    fixed = fixed.contiguous().cpu()
    padding = _padding(manifest, fixed)
    regions = list_regions(manifest, image.header.position, padding is not None)
    header = _blank(image.header, manifest, regions)
    pieces = _pieces(image, fixed, padding, manifest)
    device = any(p.is_cuda for parts in pieces.values() for p in parts)
    staging = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=device)
    digests: dict[str, str] = {}
    start = len(encode(header, regions))
    os.lseek(fd, start, os.SEEK_SET)
    for region in regions:
        digest = blake3()  # one thread: a save runs beside the decode and must not slow it
        for block in _blocks(pieces[region.name], staging):
            digest.update(block)
            _write_all(fd, block)
        digests[region.name] = digest.hexdigest()
    faults.point('codec.write_header')
    raw = encode(replace(header, digests=digests), regions)
    assert len(raw) == start, 'the header changed its size'
    os.lseek(fd, 0, os.SEEK_SET)
    _write_all(fd, memoryview(raw))
    return start + header.payload_bytes


def _pieces(image: Image, fixed: torch.Tensor, padding: torch.Tensor | None,
            manifest: Manifest) -> dict[str, Sequence[torch.Tensor]]:
    """Map each region to the tensors it is made of, checked against the manifest."""
    position = image.header.position
    pieces: dict[str, Sequence[torch.Tensor]] = {}
    for buffer in manifest.fixed:
        offset = manifest.offsets[buffer.name]
        pieces[buffer.name] = [fixed[offset:offset + buffer.nbytes]]
    if int(pieces[POSITION][0].view(torch.int64).item()) != position:
        raise InvalidArgument('The position in the fixed block of this capsule is not the '
                              f'{position} of its header.')
    if image.rows.keys() != {b.name for b in manifest.rows}:
        raise InvalidArgument('The rows of this capsule are not those of the manifest.')
    for buffer in manifest.rows:
        value = image.rows[buffer.name]
        parts = [value] if isinstance(value, torch.Tensor) else list(value)
        if sum(len(p) for p in parts) != position or any(
                p.dtype is not buffer.dtype or tuple(p.shape[1:]) != buffer.shape for p in parts):
            raise InvalidArgument(f'The rows {buffer.name!r} of this capsule must be {position} '
                                  f'rows of {buffer.dtype} {list(buffer.shape)}.')
        pieces[buffer.name] = parts
    if padding is not None:
        pieces[PADDING] = [padding]
    return pieces


def _blocks(parts: Sequence[torch.Tensor], staging: torch.Tensor) -> Iterator[memoryview]:
    """Cut ``parts`` into blocks; small, strided or device pieces are gathered in ``staging``."""
    used = 0
    for part in parts:
        count = len(part)
        if part.numel() == 0:
            continue
        row = part.nbytes // count
        if row > BLOCK:  # one row alone is larger than a block
            whole = _flat(part.contiguous().cpu())
            part, count, row = whole, whole.numel(), 1
        direct = part.is_contiguous() and part.device.type == 'cpu' and part.nbytes >= DIRECT
        if direct and used:
            yield staging[:used].numpy().data
            used = 0
        done = 0
        while done < count:
            room = (BLOCK - (0 if direct else used)) // row
            if room == 0:
                yield staging[:used].numpy().data
                used = 0
                continue
            take = min(room, count - done)
            piece = part[done:done + take]
            if direct:
                yield _flat(piece).numpy().data
            else:
                target, source = staging[used:used + take * row], _flat(piece)
                if source.device.type == 'cpu':  # without the thread pool that torch would start
                    target.numpy()[:] = source.numpy()
                else:
                    target.copy_(source)
                used += take * row
            done += take
    if used:
        yield staging[:used].numpy().data


def _write_all(fd: int, block: memoryview) -> None:
    block = block.cast('B')
    while block:
        faults.point('codec.write')
        block = block[os.write(fd, block):]


# -- reading --------------------------------------------------------------------------------------

def read_header(path: str | os.PathLike) -> Header:
    """
    Read and check the header and the sizes, not the payload.

    :raises UnknownCapsule: no such file. :raises Corrupt: truncated, altered or no capsule.
    :raises Incompatible: another format version. :raises Storage: the file system refused.
    """
    with regular_file(path) as (fd, size):
        return decode(fd, size)[0]


def verify(path: str | os.PathLike) -> Header:
    """Check the whole file against its own manifest and digests; raises as :func:`read`."""
    with regular_file(path) as (fd, size):
        header, manifest, regions = decode(fd, size)
        position = memoryview(bytearray(8))
        read_payload(fd, regions, header.digests or {},
                     lambda r: [position] if r.name == POSITION else None)
        _check_position(int.from_bytes(position, 'little', signed=True), header)
        return header


def read(path: str | os.PathLike | int, manifest: Manifest,
         fingerprint: Fingerprint | None = None, *,
         capacity: int | None = None,
         allocate: Callable[[int], torch.Tensor] | None = None,
         into: Callable[[Header], Pieces] | None = None,
         ready: Callable[[str, list[torch.Tensor]], None] | None = None) -> Image:
    """
    Read a capsule for a live ``manifest``; everything is checked before anything is allocated.

    :param path: or the descriptor of an open file.
    :param fingerprint: refuses what was saved by something else (first, since it names causes).
    :param capacity: rows that the reader has room for; None for any.
    :param allocate: called once with a number of bytes, returns at least as much uint8 CPU memory
        (pinned, or used again: fresh memory costs more than the reading). The image lives in it.
    :param into: instead, returns for each rows buffer the pieces of CPU memory, in their order,
        that its rows are read into (pages of a pool). Their content counts only if nothing is
        raised.
    :param ready: called with each rows buffer and its pieces once its digest holds, while others
        are still being read.
    :raises UnknownCapsule: no such file. :raises Corrupt: truncated, altered or no capsule.
    :raises Incompatible: another format version, fingerprint or manifest; the fields are named.
    :raises Capacity: too many rows for ``capacity`` or for memory.
    :raises Storage: the file system refused.
    """
    with regular_file(path) as (fd, size):
        header, _, regions = decode(fd, size)
        if fingerprint is not None:
            fingerprint.refuse_unless_compatible(header.fingerprint)
        _check_manifest(header.manifest, manifest.describe())
        position = header.position
        if capacity is not None and position > capacity:
            raise Capacity(f'Capsule {header.name!r} needs room for {position} rows, but there is '
                           f'room for {capacity}; configure a larger context.')
        fixed, block, rows = _place(header, manifest, allocate, into)
        padding = memoryview(bytearray(sum(e - s for s, e in gaps(manifest))))

        def target(region: Region) -> list[memoryview]:
            if region.name == PADDING:
                return [padding]
            if region.name in rows:
                return [_flat(piece).numpy().data for piece in rows[region.name]]
            offset = manifest.offsets[region.name]
            return [fixed[offset:offset + region.nbytes].numpy().data]

        def told(region: Region) -> None:
            if ready is not None and region.name in rows:
                ready(region.name, rows[region.name])

        with suppress(OSError):  # a hint
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        read_payload(fd, regions, header.digests or {}, target, told)
        if regions[-1].name == PADDING:
            _scatter(fixed, manifest, padding)
        offset = manifest.offsets[POSITION]
        _check_position(int(fixed[offset:offset + 8].view(torch.int64).item()), header)
        whole = {name: pieces[0] for name, pieces in rows.items()} if block is not None else rows
        return Image(header, fixed, whole, block)  # type: ignore[arg-type]


def _place(header: Header, manifest: Manifest, allocate: Callable[[int], torch.Tensor] | None,
           into: Callable[[Header], Pieces] | None) -> tuple[torch.Tensor, Rows | None, Pieces]:
    """Return memory for the fixed block and the rows of a file whose header was checked."""
    try:
        if into is not None:
            return torch.zeros(manifest.fixed_bytes, dtype=torch.uint8), None, into(header)
        need = manifest.storage_bytes(header.position)
        storage = (allocate or _allocate)(need)[:need]
    except (RuntimeError, MemoryError) as error:
        raise Capacity(f'Capsule {header.name!r} needs {header.payload_bytes} bytes of memory, '
                       'which the host does not have.') from error
    fixed = storage[:manifest.fixed_bytes]
    for start, end in gaps(manifest):
        fixed[start:end] = 0
    block = Rows(manifest, header.position, storage[manifest.fixed_bytes:])
    return fixed, block, {b.name: [block.view(b.name)] for b in manifest.rows}


def _allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _scatter(fixed: torch.Tensor, manifest: Manifest, padding: memoryview) -> None:
    done = 0
    for start, end in gaps(manifest):
        fixed[start:end] = torch.frombuffer(padding[done:done + end - start], dtype=torch.uint8)
        done += end - start


def _check_position(found: int, header: Header) -> None:
    if found != header.position:
        raise Corrupt(f'The capsule header claims {header.position} rows, but the fixed block '
                      f'says {found}.')


def _check_manifest(saved: list[dict], present: list[dict]) -> None:
    """Refuse another manifest, naming the first differences."""
    if saved == present:
        return
    old, new = ({item['name']: item for item in side} for side in (saved, present))
    words = [f'{name!r} is missing in the capsule' for name in new if name not in old]
    words += [f'{name!r} is unknown here' for name in old if name not in new]
    for name in old.keys() & new.keys():
        words += [f'{name!r} has {key} {old[name][key]} in the capsule and {new[name][key]} here'
                  for key in ('role', 'dtype', 'shape') if old[name][key] != new[name][key]]
    more = f', and {len(words) - 8} more differences' if len(words) > 8 else ''
    raise Incompatible('The capsule was saved with another manifest: '
                       + ('; '.join(words[:8]) + more or 'the order of its buffers differs')
                       + '. Use the model it was saved with.')
