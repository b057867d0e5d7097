"""
The pool: preallocated memory for frozen boundaries.

It holds *fixed blocks* and *pages* of 64 rows. Both are reference counted: capsules of one family
share pages, parked sessions and kept boundaries share blocks. Pages never enter the live path; they
are only the source or the target of copies. A save allocates nothing.

Each block and page gets a *uid* when it is taken to be filled, and keeps it until nobody holds it.
What it holds never changes, so the same uid in another pool (the host tier) is the same bytes.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
import threading

import numpy as np
import torch

from flashrt_ros.arena import Manifest, Rows
from flashrt_ros.capsule import faults
from flashrt_ros.errors import Capacity

PAGE = 64  # rows


Pages = np.ndarray  # int64 page ids; arrays, so that counting references is flat in length


@dataclass(frozen=True, eq=False)
class Frozen:
    """
    A frozen boundary in the pool: one fixed block and the pages that cover ``[0, position)``.

    Whoever keeps one holds references (:meth:`Pool.hold`) and gives them back.
    """

    position: int
    block: int
    pages: Pages

    def __post_init__(self) -> None:
        self.pages.setflags(write=False)


def pages_for(position: int) -> int:
    """Pages that cover ``position`` rows."""
    return -(-position // PAGE)


class PoolFull(Capacity):
    """
    There are not enough free ``what`` (``'blocks'`` or ``'pages'``): ``wanted`` at once.

    Raised before anything is taken, so that whoever can make room may do so and try again.
    """

    def __init__(self, message: str, what: str, wanted: int) -> None:
        super().__init__(message)
        self.what = what
        self.wanted = wanted


class Uids:
    """One sequence of numbers for all pools of the process."""

    def __init__(self) -> None:
        self._next = 1
        self._lock = threading.Lock()

    def take(self, count: int) -> np.ndarray:
        """Return ``count`` numbers that nobody had."""
        with self._lock:
            first, self._next = self._next, self._next + count
        return np.arange(first, first + count)

    def take_one(self) -> int:
        """Return a number that nobody had."""
        with self._lock:
            self._next += 1
            return self._next - 1


_uids = Uids()


def _least(counts: np.ndarray) -> int:
    """Return the least count, 1 where there is none; ``min`` of a short array takes longer."""
    return counts.item(counts.argmin()) if len(counts) else 1


class Ids:
    """
    Reference counts of numbered places, handed out in runs that are as long as possible.

    :param option: name of the setting that decides how many there are, for messages.
    :param budget: what that setting has to be for so many places, for messages.
    """

    def __init__(self, count: int, what: str, option: str,
                 budget: Callable[[int], int] | None = None) -> None:
        self.count = count
        self.references = np.zeros(count, dtype=np.int64)
        self.changes = 0  # of the counts so far, added to behind each
        self.uids = np.zeros(count, dtype=np.int64)  # of what the place holds, if it is held
        self.what = what
        self._option = option
        self._budget = budget
        self._free: list[tuple[int, int]] = [(0, count)] if count else []  # sorted (start, length)
        self.available = count

    def take(self, wanted: int) -> Pages:
        """Take places with one reference and a new uid each, or raise :class:`PoolFull`."""
        if wanted > self.available:
            raise PoolFull(self._full(wanted), self.what.split()[-1], wanted)
        if not wanted:
            return np.empty(0, np.int64)
        runs: list[np.ndarray] = []
        need = wanted
        while need:
            # First fit; when no run is long enough, the longest one.
            index = next((i for i, (_, n) in enumerate(self._free) if n >= need), None)
            if index is None:
                index = max(range(len(self._free)), key=lambda i: self._free[i][1])
            start, length = self._free[index]
            used = min(need, length)
            runs.append(np.arange(start, start + used))
            need -= used
            if used == length:
                del self._free[index]
            else:
                self._free[index] = (start + used, length - used)
        places = runs[0] if len(runs) == 1 else np.concatenate(runs)
        self.references[places] = 1
        self.uids[places] = _uids.take(wanted)
        self.changes += 1
        self.available -= wanted
        return places

    def take_one(self) -> int:
        """As :meth:`take`, for one place."""
        if not self.available:
            raise PoolFull(self._full(1), self.what.split()[-1], 1)
        place, length = self._free[0]
        if length == 1:
            del self._free[0]
        else:
            self._free[0] = (place + 1, length - 1)
        self.references[place] = 1
        self.uids[place] = _uids.take_one()
        self.changes += 1
        self.available -= 1
        return place

    def _full(self, wanted: int) -> str:
        larger = f'raise {self._option}'
        if self._budget is not None:
            count = self.count + wanted - self.available
            larger = f'set {self._option} to {self._budget(count)} bytes or more'
        if wanted > self.count:
            return (f'the capsule pool has {self.count} {self.what} in all and needs {wanted} at '
                    f'once; {larger}.')
        return (f'the capsule pool has {self.available} of {self.count} {self.what} free and '
                f'needs {wanted}; drop capsules, close sessions, or {larger}.')

    def hold(self, places: Pages | int) -> None:
        """Add one reference to each place, which must have one already."""
        counts = self.references[places]
        if (counts if isinstance(places, int) else _least(counts)) < 1:
            raise AssertionError(f'{self.what} {places} are held after they were freed')
        self.references[places] = counts + 1
        self.changes += 1

    def release(self, places: Pages | int) -> None:
        """Give one reference of each place back; the last one frees it."""
        left = self.references[places] - 1
        lowest = left if isinstance(places, int) else _least(left)
        if lowest < 0:
            raise AssertionError(f'{self.what} {places} are released twice')
        self.references[places] = left
        self.changes += 1
        if lowest == 0:
            if isinstance(places, int):
                self._give_back(places, 1)
                return
            freed = np.sort(places[left == 0])
            if freed[-1] - freed[0] == len(freed) - 1:
                self._give_back(int(freed[0]), len(freed))
                return
            for run in np.split(freed, np.flatnonzero(np.diff(freed) != 1) + 1):
                self._give_back(int(run[0]), len(run))

    def locate(self, uids: Pages) -> Pages:
        """Return the held place of each uid, -1 where there is none."""
        held = np.flatnonzero(self.references)
        order = held[np.argsort(self.uids[held])]
        index = np.searchsorted(self.uids[order], uids)
        inside = index < len(order)
        places = np.full(len(uids), -1, dtype=np.int64)
        places[inside] = order[index[inside]]
        places[inside] = np.where(self.uids[places[inside]] == uids[inside], places[inside], -1)
        return places

    def free_runs(self) -> list[int]:
        """Return the lengths of the runs of free places."""
        return [length for _, length in self._free]

    def _give_back(self, start: int, length: int) -> None:
        self.available += length
        index = bisect.bisect(self._free, (start, 0))
        if index < len(self._free) and self._free[index][0] == start + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            before = self._free.pop(index - 1)
            start, length = before[0], before[1] + length
            index -= 1
        self._free.insert(index, (start, length))


class Pool:
    """
    Preallocated fixed blocks and pages.

    :param budget: bytes; an eighth of it (at least ``min_blocks`` blocks) goes to fixed blocks,
        the rest to pages.
    :param option: name of the setting that holds the budget, for messages.
    :param pinned: page-locked host memory, which a device copies to and from by itself.
    :raises Capacity: if the budget cannot hold ``min_blocks`` blocks and one page.
    """

    def __init__(self, manifest: Manifest, budget: int, device: str | torch.device = 'cpu',
                 min_blocks: int = 8, option: str = 'capsules.device_bytes',
                 pinned: bool = False) -> None:
        page_bytes = manifest.row_bytes * PAGE
        floor = manifest.fixed_bytes * min_blocks + page_bytes
        if budget < floor:
            raise Capacity(f'a capsule pool of {budget} bytes cannot hold {min_blocks} fixed '
                           f'blocks and a page; set {option} to {floor} or more.')
        blocks = min(max(min_blocks, budget // 8 // manifest.fixed_bytes), 4096)
        pages = (budget - blocks * manifest.fixed_bytes) // page_bytes if page_bytes else 0
        pages = max(0, pages - 1)  # alignment between planes costs less than a page
        self.manifest = manifest
        self.lock = threading.Lock()
        self.blocks = torch.zeros((blocks, manifest.fixed_bytes), dtype=torch.uint8,
                                  device=device, pin_memory=pinned)
        storage = torch.empty(Rows.bytes_for(manifest, pages * PAGE), dtype=torch.uint8,
                              device=device, pin_memory=pinned)
        storage.zero_()  # touch every memory page now, so that no save pays for it
        self.rows = Rows(manifest, pages * PAGE, storage)
        self.nbytes = self.blocks.numel() + storage.numel()
        self.block_ids = Ids(blocks, 'fixed blocks', option, self._for_blocks)
        self.page_ids = Ids(pages, 'pages', option, partial(self._for_pages, min_blocks))
        #: of a device: behind the last copy that another stream does from or into this pool
        self.pending: torch.cuda.Event | None = None

    def _for_blocks(self, count: int) -> int:
        return 8 * count * self.manifest.fixed_bytes

    def _for_pages(self, min_blocks: int, count: int) -> int:
        """Return a budget for so many pages: beside them are the least blocks, or an eighth."""
        needed = (count + 1) * PAGE * self.manifest.row_bytes
        return max(needed + min_blocks * self.manifest.fixed_bytes, needed * 8 // 7 + 8)

    def join(self) -> None:
        """Let the current stream wait for what other streams do in this pool; return at once."""
        pending = self.pending
        if pending is not None:
            if not pending.query():
                torch.cuda.current_stream(self.blocks.device).wait_event(pending)
            self.pending = None

    def settle(self) -> None:
        """Wait for what other streams do in this pool: the CPU is about to read it."""
        pending = self.pending
        if pending is not None:
            pending.synchronize()

    def take(self, pages: int, block: bool = True) -> tuple[int, Pages]:
        """
        Take one block (or none: -1) and ``pages`` pages, each with one reference.

        :raises PoolFull: if they are not all there; then nothing is taken.
        """
        faults.point('pool.take')
        with self.lock:
            taken = self.page_ids.take(pages)
            try:
                return (self.block_ids.take_one() if block else -1), taken
            except Capacity:
                self.page_ids.release(taken)
                raise

    @contextmanager
    def taking(self, pages: int, block: bool = True) -> Iterator[tuple[int, Pages]]:
        """
        As :meth:`take`, to be filled from the current stream.

        What the block raises gives everything taken back.
        """
        taken, fresh = self.take(pages, block)
        self.join()  # a copy of what lay there before may still be going down
        try:
            yield taken, fresh
        except BaseException:
            with self.lock:
                self.page_ids.release(fresh)
                if block:
                    self.block_ids.release(taken)
            raise

    def hold(self, frozen: Frozen) -> Frozen:
        """Add one reference to the block and to each page."""
        with self.lock:
            self.block_ids.hold(frozen.block)
            self.page_ids.hold(frozen.pages)
        return frozen

    def release(self, frozen: Frozen) -> None:
        """Give one reference of the block and of each page back."""
        with self.lock:
            self.block_ids.release(frozen.block)
            self.page_ids.release(frozen.pages)

    @contextmanager
    def holding(self, frozen: Frozen) -> Iterator[None]:
        """Keep a frozen boundary in place while others may be demoted to make room."""
        self.hold(frozen)
        try:
            yield
        finally:
            self.release(frozen)

    def hold_pages(self, pages: Pages) -> None:
        """Add one reference to each page."""
        with self.lock:
            self.page_ids.hold(pages)

    def release_pages(self, pages: Pages) -> None:
        """Give one reference of each page back."""
        with self.lock:
            self.page_ids.release(pages)

    def hold_block(self, block: int, times: int = 1) -> None:
        """Add one reference, or some, to a fixed block."""
        with self.lock:
            for _ in range(times):
                self.block_ids.hold(block)

    def release_block(self, block: int) -> None:
        """Give one reference of a fixed block back."""
        with self.lock:
            self.block_ids.release(block)

    def release_blocks(self, blocks: list[int]) -> None:
        """Give one reference of each of some fixed blocks back."""
        with self.lock:
            for block in blocks:
                self.block_ids.release(block)

    def page_references(self, pages: Pages) -> np.ndarray:
        """Reference counts of pages."""
        return self.page_ids.references[pages]

    def free(self) -> tuple[int, int]:
        """Return free blocks and free pages."""
        return self.block_ids.available, self.page_ids.available

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks and pages that somebody holds."""
        blocks, pages = self.free()
        return ((self.block_ids.count - blocks) * self.manifest.fixed_bytes
                + (self.page_ids.count - pages) * PAGE * self.manifest.row_bytes)
