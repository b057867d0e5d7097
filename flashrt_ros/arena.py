"""
The arena: one allocation that holds the whole live state of a model.

A *manifest* is the closed, ordered list of named buffers that make up the state. It has two parts:

* the *fixed block*: everything whose size does not depend on length (recurrent states, convolution
  windows, next-token logits, sampler settings, the position). It is contiguous, so that freezing
  it is one copy;
* *rows*: one record a token (its id, K and V of every attention layer). Rows are kept field by
  field ("layer-major"), because single-token attention over a strided field is slower than over a
  contiguous one. Fields of equal row size share a *plane* ``[fields, capacity, row_bytes]``, so a
  span of rows of all those fields moves in one pitched two-dimensional copy.

A capsule pool is made of the same two parts (many fixed blocks, and rows cut into pages), hence a
save or a restore is: copy one fixed block, copy some spans of rows. Nothing here knows what a
layer is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
import enum
import re

import torch

ALIGN = 256  # bytes; the coarsest alignment that vector loads and device copies profit from
POSITION = 'position'
_NAME = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_.]*')


class Role(str, enum.Enum):
    """What a buffer is for; ``SCRATCH`` is writable by a replay but is no part of the state."""

    ROWS = 'rows'
    RECURRENT = 'recurrent'
    CONV = 'conv'
    BOUNDARY = 'boundary'
    SCRATCH = 'scratch'


@dataclass(frozen=True)
class Buffer:
    """A named, typed region. For ``Role.ROWS`` the shape is that of *one* row (one token)."""

    name: str
    role: Role
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the region (of one row, for ``Role.ROWS``)."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def describe(self) -> dict:
        """Return a JSON-able description that files and fingerprints compare."""
        return {'name': self.name, 'role': self.role.value,
                'dtype': str(self.dtype).removeprefix('torch.'), 'shape': list(self.shape)}


def wide(memory: torch.Tensor) -> torch.Tensor:
    """View bytes in the widest integer that their last dimension is a multiple of: copies gain."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if memory.shape[-1] % dtype.itemsize == 0:
            return memory.view(dtype)
    return memory


def _align(offset: int) -> int:
    return (offset + ALIGN - 1) // ALIGN * ALIGN


class Manifest:
    """
    The closed, ordered list of state buffers and their layout.

    ``position`` (int64 scalar, the number of live rows) is part of every manifest and is added in
    front. Scratch buffers are listed as well, because the closed-world check must know them, but
    they lie outside fixed block and rows.

    :raises ValueError: for a duplicate or malformed name, or an empty buffer.
    """

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self.buffers: tuple[Buffer, ...] = (
            Buffer(POSITION, Role.BOUNDARY, torch.int64, (1,)), *buffers)
        self.by_name: dict[str, Buffer] = {}
        for buffer in self.buffers:
            if not _NAME.fullmatch(buffer.name) or buffer.name in self.by_name:
                raise ValueError(f'buffer name {buffer.name!r} is malformed or used twice')
            if buffer.nbytes <= 0:
                raise ValueError(f'buffer {buffer.name!r} of shape {buffer.shape} is empty')
            self.by_name[buffer.name] = buffer
        self.rows = tuple(b for b in self.buffers if b.role is Role.ROWS)
        self.scratch = tuple(b for b in self.buffers if b.role is Role.SCRATCH)
        self.fixed = tuple(b for b in self.buffers if b.role not in (Role.ROWS, Role.SCRATCH))
        self.offsets: dict[str, int] = {}
        self.fixed_bytes = self._place(self.fixed)
        self.scratch_bytes = self._place(self.scratch)
        #: row size in bytes -> names of the fields of that size, in manifest order
        self.planes: dict[int, list[str]] = {}
        for buffer in self.rows:
            self.planes.setdefault(buffer.nbytes, []).append(buffer.name)
        self.row_bytes = sum(b.nbytes for b in self.rows)

    def _place(self, buffers: tuple[Buffer, ...]) -> int:
        offset = 0
        for buffer in buffers:
            self.offsets[buffer.name] = offset
            offset = _align(offset + buffer.nbytes)
        return offset

    def state_bytes(self, position: int) -> int:
        """Bytes of a boundary with ``position`` live rows: fixed block + live rows."""
        return self.fixed_bytes + position * self.row_bytes

    def storage_bytes(self, capacity: int) -> int:
        """Bytes of an arena with room for ``capacity`` rows."""
        return self.fixed_bytes + sum(
            _align(size * len(names) * capacity) for size, names in self.planes.items())

    def describe(self) -> list[dict]:
        """Return the JSON-able manifest, scratch left out: it is no part of the state."""
        return [b.describe() for b in self.buffers if b.role is not Role.SCRATCH]


class Rows:
    """
    ``capacity`` rows laid out plane by plane over a uint8 storage.

    Both the live rows of an arena and the pages of a capsule pool are this, so that moving rows
    between them is :meth:`copy_from` and nothing else.
    """

    def __init__(self, manifest: Manifest, capacity: int, storage: torch.Tensor) -> None:
        self.manifest = manifest
        self.capacity = capacity
        self.planes: list[torch.Tensor] = []  # uint8 [fields, capacity, row_bytes]
        self._where: dict[str, tuple[int, int]] = {}
        offset = 0
        for index, (size, names) in enumerate(manifest.planes.items()):
            span = size * len(names) * capacity
            self.planes.append(storage[offset:offset + span].view(len(names), capacity, size))
            self._where.update({name: (index, field) for field, name in enumerate(names)})
            offset = _align(offset + span)
        self._wide = [wide(plane) for plane in self.planes]

    @staticmethod
    def bytes_for(manifest: Manifest, capacity: int) -> int:
        """Bytes of storage that ``capacity`` rows need."""
        return manifest.storage_bytes(capacity) - manifest.fixed_bytes

    def view(self, name: str) -> torch.Tensor:
        """Typed view ``[capacity, *shape]`` of one field."""
        buffer = self.manifest.by_name[name]
        plane, field = self._where[name]
        return self.planes[plane][field].view(buffer.dtype).view(self.capacity, *buffer.shape)

    def copy_from(self, source: Rows, source_row: int, row: int, count: int) -> int:
        """Copy ``count`` rows of all fields, one pitched copy a plane; return bytes copied."""
        for target, origin in zip(self._wide, source._wide, strict=True):
            target[:, row:row + count].copy_(origin[:, source_row:source_row + count])
        return count * self.manifest.row_bytes


class Arena:
    """
    The one allocation of a live state: fixed block first, then rows.

    Addresses never change after construction. ``clean`` is the write watermark of the
    trail-and-clean rule (see ``capsule/lineage.py``): rows ``[0, clean)`` equal the bytes of the
    pages this state was last saved into or restored from. Whoever is about to write row *i* calls
    :meth:`will_write` before the write is queued.

    :param manifest: the closed list of buffers.
    :param capacity: rows (tokens) the arena can hold.
    :param storage: uint8 memory of ``manifest.storage_bytes(capacity)`` bytes to live in, one slot
        of a larger allocation; allocated here when left out.
    """

    def __init__(self, manifest: Manifest, capacity: int, device: str | torch.device = 'cpu',
                 storage: torch.Tensor | None = None) -> None:
        if capacity < 1:
            raise ValueError(f'an arena needs room for at least one row, not {capacity}')
        self.manifest = manifest
        self.capacity = capacity
        size = manifest.storage_bytes(capacity)
        if storage is None:
            storage = torch.zeros(size, dtype=torch.uint8, device=device)
        if storage.dtype is not torch.uint8 or storage.numel() != size:
            raise ValueError(f'the storage of this arena must be {size} bytes of uint8')
        self.storage = storage
        self.device = storage.device
        self._on_host = storage.device.type == 'cpu'
        self.fixed = storage[:manifest.fixed_bytes]
        self.rows = Rows(manifest, capacity, storage[manifest.fixed_bytes:])
        self.scratch = torch.zeros(manifest.scratch_bytes, dtype=torch.uint8, device=self.device)
        self.clean = 0
        self.valid = True
        #: of a device: what the host knows the position to be, None to ask (that waits for it)
        self.mirror: int | None = None
        self._views = {b.name: self._view(b) for b in manifest.buffers}

    @classmethod
    def slots(cls, manifest: Manifest, capacity: int, count: int,
              device: str | torch.device = 'cpu') -> list[Arena]:
        """Cut one allocation into ``count`` arenas of equal layout (several live boundaries)."""
        size = manifest.storage_bytes(capacity)
        storage = torch.zeros(size * count, dtype=torch.uint8, device=device)
        return [cls(manifest, capacity, storage=storage[i * size:(i + 1) * size])
                for i in range(count)]

    def _view(self, buffer: Buffer) -> torch.Tensor:
        if buffer.role is Role.ROWS:
            return self.rows.view(buffer.name)
        block = self.scratch if buffer.role is Role.SCRATCH else self.fixed
        offset = self.manifest.offsets[buffer.name]
        return block[offset:offset + buffer.nbytes].view(buffer.dtype).view(buffer.shape)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Typed view of a buffer; ``[capacity, *shape]`` for rows."""
        return self._views[name]

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """All buffers by name."""
        return dict(self._views)

    @property
    def position(self) -> int:
        """Number of folded tokens, read from the state itself, or from the host's mirror of it."""
        if self._on_host:
            return int(self._views[POSITION].item())
        if self.mirror is None:
            self.mirror = int(self._views[POSITION].item())
        return self.mirror

    def set_position(self, position: int) -> None:
        """Write the number of folded tokens."""
        self._views[POSITION].fill_(position)
        self.mirror = position

    def will_write(self, row: int) -> None:
        """Lower the clean watermark: row ``row`` and later ones are about to change."""
        if row < self.clean:
            self.clean = row

    def live_bytes(self) -> list[torch.Tensor]:
        """uint8 views of exactly the live state: fixed block and live rows of every plane."""
        position = self.position
        return [self.fixed, *(plane[:, :position] for plane in self.rows.planes)]

    def reset(self) -> None:
        """Make this the empty boundary: position 0, recurrent and conv state zero, no logits."""
        self.fixed.zero_()
        self.mirror = 0
        self.clean = 0
        self.valid = True
