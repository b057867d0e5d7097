"""
Which rows need copying: the trail-and-clean rule.

A lineage binds an arena to a pool. The *trail* is the page list the live state was last saved into
or restored from, and rows ``[0, arena.clean)`` equal the trail's bytes. Then

* a *save* copies the fixed block and rows ``[clean, position)`` into new pages (a partly filled
  last page is copied again, never mutated);
* a *restore* copies the fixed block and the rows behind what trail and capsule have in common.

Two details carry the correctness. Whoever writes row *i* lowers ``clean`` to *i* *before* the
write, since a rollback followed by new tokens puts other bytes below a later position; rolling back
alone lowers nothing. And the trail holds references to its pages, so that a page id can never be
reused while somebody may still compare it.

Where another pool lies in the same memory (the host tier of a CPU), a restore reads it directly:
the trail is then *abroad*. Pages are the same wherever their uids are, so a restore compares those,
and the next save holds what the own pool has of them and fills the rest under the same uids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from flashrt_ros.arena import Arena, wide
from flashrt_ros.capsule import faults
from flashrt_ros.capsule.pool import Frozen, PAGE, Pages, pages_for, Pool
from flashrt_ros.capsule.transfer import Place, spans

_NO_PAGES: Pages = np.empty(0, dtype=np.int64)


class Mover(Protocol):
    """What a device offers instead of one copy a run of pages."""

    def move(self, block: int, pages: Pages, first: int, begin: int, end: int,
             restore: bool) -> int:
        """Queue the copy of a block and of rows ``[begin, end)``; return the bytes."""


class Guard:
    """What :meth:`Lineage.guard` returns, for a ``with``."""

    def __init__(self, lineage: Lineage, block: int | None) -> None:
        self._lineage, self._block = lineage, block
        self._position: int | None = None

    def __enter__(self) -> None:
        lineage = self._lineage
        if self._block is None:
            lineage._copy_block(lineage._guard, lineage._fixed)
        else:
            lineage.pool.hold_block(self._block)  # whoever kept it may give it up meanwhile
        self._position = lineage.arena.mirror

    def __exit__(self, kind: object, *_: object) -> None:
        lineage, block = self._lineage, self._block
        try:
            if kind is not None:
                lineage._bring_back(block)
                lineage.arena.mirror = self._position
        finally:
            if block is not None:
                lineage.pool.release_block(block)


class Lineage:
    """
    Saves and restores of one arena.

    All copies are queued on the current stream of the arena's device; on a CPU they are done when
    a verb returns.
    """

    def __init__(self, arena: Arena, pool: Pool) -> None:
        self.arena = arena
        self.pool = pool
        self.trail: Pages = _NO_PAGES
        #: instead of the trail: another pool and the pages there, with a reference to each
        self.abroad: tuple[Pool, Pages] | None = None
        self._fixed, self._blocks = wide(arena.fixed), wide(pool.blocks)
        self._guard = torch.zeros_like(self._fixed)
        #: on a device: copies a block and rows by a table of pages, in one launch
        self.mover: Mover | None = None

    def save(self) -> tuple[Frozen, int]:
        """
        Freeze the live boundary; return it (one reference, the caller's) and the bytes copied.

        :raises Capacity: if the pool cannot hold it; then nothing has changed.
        """
        arena, position = self.arena, self.arena.position
        clean = min(arena.clean, position)
        shared = pages_for(position) if clean == position else clean // PAGE
        if self.abroad is not None:
            return self._save_from_abroad(*self.abroad, position, shared)
        with self.pool.taking(pages_for(position) - shared) as (block, fresh):
            faults.point('save.block')
            start = shared * PAGE
            if self.mover is not None:
                copied = self.mover.move(block, fresh, shared, start, position, restore=False)
            else:
                copied = self._copy_block(self._blocks[block], self._fixed)
                for row, place, count in runs(fresh, start, position):
                    faults.point('save.rows')
                    copied += self.pool.rows.copy_from(arena.rows, row, place, count)
        pages = (np.concatenate((self.trail[:shared], fresh))
                 if len(fresh) or shared < len(self.trail) else self.trail)
        self.pool.hold_pages(pages[:shared])  # the capsule's references; fresh ones came with one
        self._follow(pages, position)
        return Frozen(position, block, pages), copied

    def _save_from_abroad(self, pool: Pool, pages: Pages, position: int,
                          shared: int) -> tuple[Frozen, int]:
        """Save where ``shared`` pages equal another pool's; some of them may be in this one."""
        uids = np.zeros(pages_for(position), dtype=np.int64)
        uids[:shared] = pool.page_ids.uids[pages[:shared]]
        if shared * PAGE > position:
            uids[-1] = 0  # only as full as this boundary needs it: no page of that uid
        with Place(self.pool, (0, uids), lambda take: take()) as place:
            faults.point('save.block')
            copied = self._copy_block(self._blocks[place.block], self._fixed)
            for first, second, count in spans(np.flatnonzero(place.missing),
                                              place.pages[place.missing]):
                faults.point('save.rows')
                copied += self.pool.rows.copy_from(
                    self.arena.rows, first * PAGE, second * PAGE,
                    min(count * PAGE, position - first * PAGE))
            place.name(uids[place.missing], 0)
        self._follow(place.pages, position)
        return Frozen(position, place.block, place.pages), copied

    def restore(self, frozen: Frozen, source: Pool | None = None) -> int:
        """
        Make a frozen boundary the live one; return the bytes copied.

        :param source: the pool it is in, in the same memory; the own one by default.
        """
        arena, pool = self.arena, source or self.pool
        start = min(self._same(frozen, pool) * PAGE, arena.clean, frozen.position)
        faults.point('restore.check')
        arena.will_write(start)
        copied = 0
        try:
            if self.mover is not None:
                faults.point('restore.block')
                copied = self.mover.move(frozen.block, frozen.pages, 0, start, frozen.position,
                                         restore=True)
            else:
                for row, place, count in runs(frozen.pages, 0, frozen.position, start):
                    faults.point('restore.rows')
                    copied += arena.rows.copy_from(pool.rows, place, row, count)
                faults.point('restore.block')
                blocks = self._blocks if pool is self.pool else wide(pool.blocks)
                copied += self._copy_block(self._fixed, blocks[frozen.block])
        except BaseException:
            arena.valid = False  # rows of the old state may be gone: refuse to go on from here
            raise
        if pool is self.pool:
            self._follow(frozen.pages, frozen.position)
        else:
            self._follow_abroad(pool, frozen)
        arena.mirror, arena.valid = frozen.position, True
        return copied

    def _same(self, frozen: Frozen, pool: Pool) -> int:
        """Return how many leading pages of a boundary hold what the live rows came from."""
        if self.abroad is None and pool is self.pool:
            return self.common(frozen)
        there, pages = self.abroad or (self.pool, self.trail)
        length = min(len(pages), len(frozen.pages))
        differs = np.flatnonzero(there.page_ids.uids[pages[:length]]
                                 != pool.page_ids.uids[frozen.pages[:length]])
        return int(differs[0]) if len(differs) else length

    def common(self, frozen: Frozen) -> int:
        """Return how many leading pages the trail and a frozen boundary share."""
        length = min(len(self.trail), len(frozen.pages))
        if frozen.pages is self.trail:
            return length  # the usual case: back to where it was restored from
        if not length or self.trail[0] != frozen.pages[0]:
            return 0
        differs = np.flatnonzero(self.trail[:length] != frozen.pages[:length])
        return int(differs[0]) if len(differs) else length

    def forget(self) -> None:
        """Let go of the trail, so that its pages may be freed; the next save copies all rows."""
        self._follow(_NO_PAGES, 0)

    def keep(self) -> int:
        """Copy the fixed block into a pool block (a light boundary); return the block."""
        with self.pool.taking(0) as (block, _):
            faults.point('keep.block')
            self._move_block(block, restore=False)
        return block

    def put_back(self, block: int, position: int | None = None) -> int:
        """
        Make a light boundary live again; its rows must be untouched. Return the bytes copied.

        :param position: of that boundary, so that nobody has to ask a device for it.

        Rows stay as they are, so trail and clean stay too: only writes matter.
        """
        faults.point('back.block')
        copied = self._bring_back(block)
        self.arena.mirror = position
        return copied

    def guard(self, block: int | None = None) -> Guard:
        """
        Put the fixed block back if a verb fails; it is kept meanwhile.

        Rows at and beyond the old position are dead, so this undoes an append or a generation
        completely.

        :param block: of the pool, if one holds the same bytes already; that saves a copy.
        """
        return Guard(self, block)

    def _follow(self, pages: Pages, position: int) -> None:
        """Make ``pages`` the trail, with a reference to each, and all live rows clean."""
        if self.abroad is not None:
            self._leave_abroad()
        if pages is not self.trail:
            self.pool.hold_pages(pages)
            old, self.trail = self.trail, pages
            if len(old):
                self.pool.release_pages(old)
        self.arena.clean = position

    def _follow_abroad(self, pool: Pool, frozen: Frozen) -> None:
        """As :meth:`_follow`, where the pages are another pool's."""
        pool.hold_pages(frozen.pages)
        self.forget()
        self.abroad = pool, frozen.pages
        self.arena.clean = frozen.position

    def _leave_abroad(self) -> None:
        assert self.abroad is not None
        (pool, pages), self.abroad = self.abroad, None
        pool.release_pages(pages)

    def _bring_back(self, block: int | None) -> int:
        """Make a block of the pool live, or that of the guard; if that fails, nothing is valid."""
        try:
            if block is None:
                return self._copy_block(self._fixed, self._guard)
            return self._move_block(block, restore=True)
        except BaseException:
            self.arena.valid = False
            raise

    def _move_block(self, block: int, restore: bool) -> int:
        """Copy between the live fixed block and one of the pool; return the bytes."""
        if self.mover is not None:
            return self.mover.move(block, _NO_PAGES, 0, 0, 0, restore)
        if restore:
            return self._copy_block(self._fixed, self._blocks[block])
        return self._copy_block(self._blocks[block], self._fixed)

    @staticmethod
    def _copy_block(target: torch.Tensor, source: torch.Tensor) -> int:
        target.copy_(source)
        return target.nbytes


def runs(pages: Pages, first: int, end: int,
         start: int | None = None) -> Iterator[tuple[int, int, int]]:
    """
    Cut rows ``[start, end)`` into spans that are contiguous in the pool.

    ``pages`` cover rows from ``first`` on; yields (live row, pool row, count).
    """
    row = first if start is None else start
    if row >= end:
        return
    breaks = np.flatnonzero(np.diff(pages) != 1).tolist()  # the last index of each run
    for last in (*breaks, len(pages) - 1):
        stop = min(end, first + (last + 1) * PAGE)
        if row < stop:
            index, inside = divmod(row - first, PAGE)
            yield row, int(pages[index]) * PAGE + inside, stop - row
            row = stop
