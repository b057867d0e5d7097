"""
What a replay changed, of every byte of device memory that torch's caching allocator holds.

Kernels write through bare addresses, so operators tell nothing there. Instead all segments of the
allocator are digested before and after, but for the ranges that a replay may write. A digest of a
stretch of 64 KiB is the sum of its 64-bit words, each times an odd random factor of its place: a
change of a single word always shows, one of several is missed once in 2**64.

What is looked at here allocates in a memory pool of its own, which is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, TYPE_CHECKING

import torch

from flashrt_ros.cli.checks import guard

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine

WORDS = 8192  # of 8 bytes: a stretch
STRETCHES = 1024  # digested at a time

Range = tuple[int, int]


class _Raw:
    """Device memory by its address, for ``torch.as_tensor``."""

    def __init__(self, begin: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            'shape': (size,), 'typestr': '|u1', 'data': (begin, False), 'version': 3}


class Digester:
    """Digests ranges of device memory; see the module."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool):
            generator = torch.Generator(device).manual_seed(9)
            self._factors = torch.randint(-2 ** 62, 2 ** 62, (WORDS,), dtype=torch.int64,
                                          device=device, generator=generator) * 2 + 1

    @property
    def pool(self) -> tuple[int, int]:
        """Identity of the pool that this allocates in."""
        first, second = self._pool.id
        return first, second

    def digest(self, begin: int, end: int) -> list[int]:
        """Return a number for each stretch of ``[begin, end)`` and the bytes of the edges."""
        low, high = min(end, -(-begin // 8) * 8), max(begin, end // 8 * 8)
        with torch.cuda.use_mem_pool(self._pool):
            if low >= high:
                return self._bytes(begin, end)
            words = self._view(low, high).view(torch.int64)
            whole = len(words) // WORDS * WORDS
            rows, parts = words[:whole].view(-1, WORDS), []
            for row in range(0, len(rows), STRETCHES):
                parts.append((rows[row:row + STRETCHES] * self._factors).sum(1))
            if whole < len(words):
                rest = words[whole:]
                parts.append((rest * self._factors[:len(rest)]).sum().view(1))
            found = torch.cat(parts).tolist()
        return [*found, *self._bytes(begin, low), *self._bytes(high, end)]

    def _bytes(self, begin: int, end: int) -> list[int]:
        return self._view(begin, end).tolist() if begin < end else []

    def _view(self, begin: int, end: int) -> torch.Tensor:
        return torch.as_tensor(_Raw(begin, end - begin), device=self.device)


def without(whole: Range, allowed: Iterable[Range]) -> list[Range]:
    """Return what is left of a range, in order."""
    begin, end = whole
    left = []
    for low, high in sorted(allowed):
        if high <= begin or low >= end:
            continue
        if low > begin:
            left.append((begin, low))
        begin = max(begin, high)
    return [*left, (begin, end)] if begin < end else left


def range_of(tensor: torch.Tensor) -> Range:
    """Return where the storage behind a tensor lies."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def work_space(engine: Engine) -> dict[str, torch.Tensor]:
    """
    Return what the plan holds to work in, by where it is held.

    That is every tensor of the plan and its parts that is neither arena nor weight nor made from
    weights. What is in pinned memory is the mailbox and the ring of ids on their way.
    """
    from flashrt_ros.cuda.decode import Weights
    found: dict[str, torch.Tensor] = {}
    kept = {guard.storage_key(t) for t in (engine.arena.storage, engine.arena.scratch)}
    kept.update(guard.storage_key(t) for _, t in engine.model.weights())
    seen: set[int] = set()

    def visit(item: Any, name: str, into: Callable[[str, torch.Tensor], object]) -> None:
        if isinstance(item, torch.Tensor):
            into(name, item)
        elif id(item) in seen or item is engine.model or item is engine.arena:
            return
        elif isinstance(item, dict):
            seen.add(id(item))
            for key, value in item.items():
                visit(value, f'{name}.{key}', into)
        elif isinstance(item, list | tuple):
            seen.add(id(item))
            for index, value in enumerate(item):
                visit(value, f'{name}.{index}', into)
        elif isinstance(item, MethodType):
            visit(item.__self__, name, into)
        elif isinstance(item, FunctionType) and item.__module__.startswith('flashrt_ros.cuda'):
            seen.add(id(item))  # what a graph was captured from may be held by nothing else
            for index, cell in enumerate(item.__closure__ or ()):
                visit(cell.cell_contents, f'{name}.{index}', into)
        elif type(item).__module__.startswith('flashrt_ros.cuda'):
            seen.add(id(item))
            if isinstance(item, Weights):  # read only: not one byte of it may change
                visit(vars(item), name, lambda _, tensor: kept.add(guard.storage_key(tensor)))
            else:
                visit(vars(item), name, into)

    visit(engine.plan, '', found.setdefault)
    unique: dict[int, str] = {}
    for name, tensor in found.items():
        if guard.storage_key(tensor) not in kept and tensor.numel():
            unique.setdefault(guard.storage_key(tensor), name)
    return {name.lstrip('.').replace('._', '.').lstrip('_'): found[name]
            for name in unique.values()}


@dataclass
class Verdict:
    """What a watched replay did to the memory of the device and, by torch, of the host."""

    changed: list[str] = field(default_factory=list)    #: ranges whose bytes changed
    survivors: list[str] = field(default_factory=list)  #: memory that was allocated and kept
    digested: int = 0   #: bytes of the device
    segments: int = 0
    library: int = 0    #: bytes that captures hold and Python cannot reach
    host: int = 0       #: bytes of tensors on the host

    @property
    def total(self) -> int:
        """Number of findings."""
        return len(self.changed) + len(self.survivors)


def watch(replay: Callable[[], None], allowed: Iterable[torch.Tensor],
          device: torch.device) -> Verdict:
    """
    Run ``replay()`` and tell which bytes outside ``allowed`` it changed.

    Not looked at: what the captured products of a library work in, which lies in the graphs' own
    pools where Python reaches nothing of it.
    """
    verdict, digester = Verdict(), Digester(device)
    torch.cuda.synchronize(device)
    tensors = guard.reachable()
    known = {key: tensor for key, tensor in tensors.items() if tensor.device == device}
    open_ranges = [range_of(tensor) for tensor in allowed]
    keys = {guard.storage_key(tensor) for tensor in allowed}
    blocks = _blocks(digester.pool)
    segments: dict[int, tuple[Range, tuple[int, int]]] = {}
    for segment, block in blocks.values():
        segments.setdefault(segment['address'], (
            (segment['address'], segment['address'] + segment['total_size']),
            tuple(segment.get('segment_pool_id', (0, 0)))))
        begin, end = block['address'], block['address'] + block['size']
        private = tuple(segment.get('segment_pool_id', (0, 0))) != (0, 0)
        if private and not any(begin <= key < end for key in known):
            open_ranges.append((begin, end))
            verdict.library += block['size']
    watched = [part for whole, _ in segments.values() for part in without(whole, open_ranges)]
    verdict.segments, verdict.digested = len(segments), sum(b - a for a, b in watched)
    before = {part: digester.digest(*part) for part in watched}
    on_host = {key: (guard.memory_digest(tensor), tensor) for key, tensor in tensors.items()
               if tensor.device.type == 'cpu' and key not in keys}
    verdict.host = sum(tensor.untyped_storage().nbytes() for _, tensor in on_host.values())
    replay()
    torch.cuda.synchronize(device)
    after = _blocks(digester.pool)
    for key in sorted(_active(after) - _active(blocks)):
        verdict.survivors.append(f'{key[1]} bytes of the device outlived the replay')
    for part, digests in before.items():
        again = digester.digest(*part)
        places = [part[0] + index * WORDS * 8 for index, pair in enumerate(
            zip(digests, again, strict=True)) if pair[0] != pair[1]]
        if places:
            verdict.changed.append(f'{len(places)} stretches from {places[0] - part[0]} on in '
                                   f'{_whose(places[0], known, blocks)} changed')
    for digest, tensor in on_host.values():
        if guard.memory_digest(tensor) != digest:
            verdict.changed.append(f'{tuple(tensor.shape)} {tensor.dtype} on the host changed')
    return verdict


def _blocks(own: tuple[int, int]) -> dict[Range, tuple[dict, dict]]:
    """Return all blocks of the allocator but those of our own pool, with their segments."""
    return {(block['address'], block['size']): (segment, block)
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment.get('segment_pool_id', (0, 0))) != own
            for block in segment['blocks']}


def _active(blocks: dict[Range, tuple[dict, dict]]) -> set[Range]:
    return {key for key, (_, block) in blocks.items() if block['state'] == 'active_allocated'}


def _whose(address: int, known: dict[int, torch.Tensor],
           blocks: dict[Range, tuple[dict, dict]]) -> str:
    for tensor in known.values():
        begin, end = range_of(tensor)
        if begin <= address < end:
            return f'a tensor {tuple(tensor.shape)} {tensor.dtype}'
    for (begin, size), (_, block) in blocks.items():
        if begin <= address < begin + size:
            return f'a block of {size} bytes, {block["state"]}, that no tensor names'
    return 'memory that no block names'
