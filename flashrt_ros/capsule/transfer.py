"""
Copies of frozen boundaries between pools, page by page, copying nothing that is there already.

A page keeps its uid wherever it is copied to, so a boundary that goes up or down a tier finds the
pages it shares with its family in place and holds them instead of copying.

On CUDA all of them are queued in a lane of their own and nobody waits here; see ``lane``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from flashrt_ros.arena import Rows
from flashrt_ros.capsule import faults
from flashrt_ros.capsule.lane import Lane
from flashrt_ros.capsule.pool import Frozen, PAGE, Pages, Pool

Take = Callable[[Callable[[], tuple[int, Pages]]], tuple[int, Pages]]


def bring(source: Pool, frozen: Frozen, target: Pool, make_room: Take,
          lane: Lane) -> tuple[Frozen, int]:
    """
    Copy a frozen boundary into another pool; return it (one reference) and the bytes copied.

    In the lane: the bytes are there for what the current stream does next with the device's pool,
    and for the CPU once the host's is settled.

    :param make_room: runs an action that takes memory of ``target``, freeing some where needed.
    :raises PoolFull: as ``make_room`` does; then nothing has changed.
    """
    uids = (int(source.block_ids.uids[frozen.block]), source.page_ids.uids[frozen.pages])
    faults.point('tier.begin')
    with Place(target, uids, make_room) as place:
        copied = 0
        with lane.copying(source, target):
            if place.new_block:
                faults.point('tier.block')
                target.blocks[place.block].copy_(source.blocks[frozen.block], non_blocking=True)
                copied += target.manifest.fixed_bytes
            origin, goal = frozen.pages[place.missing], place.pages[place.missing]
            for first, second, count in spans(origin, goal):
                faults.point('tier.rows')
                copied += copy_rows(source.rows, first * PAGE, target.rows, second * PAGE,
                                    count * PAGE)
        if target.blocks.device == lane.device:
            target.join()
        place.name(uids[1][place.missing], uids[0])
        return Frozen(frozen.position, place.block, place.pages), copied


class Place:
    """
    Room for a boundary in a pool: the places it shares with others, held, and fresh ones.

    Leaving the ``with`` block by an exception gives everything back.

    :param uids: of the block and of each page; 0 where unknown, hence to be filled anew.
    """

    def __init__(self, pool: Pool, uids: tuple[int, Pages], make_room: Take) -> None:
        self.pool = pool
        with pool.lock:
            self.pages = pool.page_ids.locate(uids[1])
            self.block = int(pool.block_ids.locate(np.array([uids[0]]))[0])
            self.missing = self.pages < 0
            self.new_block = self.block < 0
            pool.page_ids.hold(self.pages[~self.missing])  # nobody may free them meanwhile
            if not self.new_block:
                pool.block_ids.hold(self.block)
        count = int(np.count_nonzero(self.missing))
        try:
            block, fresh = make_room(lambda: pool.take(count, self.new_block))
        except BaseException:
            with pool.lock:
                pool.page_ids.release(self.pages[~self.missing])
                if not self.new_block:
                    pool.block_ids.release(self.block)
            raise
        self.pages[self.missing] = fresh
        if self.new_block:
            self.block = block

    def __enter__(self) -> Place:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.pool.release(Frozen(0, self.block, self.pages))

    def name(self, pages: Pages, block: int) -> None:
        """Give the fresh places uids that exist elsewhere already; 0 keeps the new one."""
        fresh = self.pages[self.missing]
        self.pool.page_ids.uids[fresh[pages > 0]] = pages[pages > 0]
        if self.new_block and block:
            self.pool.block_ids.uids[self.block] = block

    def stretches(self, position: int) -> Iterator[tuple[int, int, bool]]:
        """Yield ``(row in the pool, rows, whether it was there)`` of contiguous stretches."""
        breaks = np.flatnonzero((np.diff(self.pages) != 1) | np.diff(self.missing)).tolist()
        begin = 0
        for last in (*breaks, len(self.pages) - 1) if len(self.pages) else ():
            rows = min((last + 1) * PAGE, position) - begin * PAGE
            yield int(self.pages[begin]) * PAGE, rows, not self.missing[begin]
            begin = last + 1


def spans(origin: Pages, goal: Pages) -> Iterator[tuple[int, int, int]]:
    """Cut two lists of places into ``(origin, goal, count)`` contiguous in both."""
    if not len(origin):
        return
    breaks = np.flatnonzero((np.diff(origin) != 1) | (np.diff(goal) != 1)).tolist()
    begin = 0
    for last in (*breaks, len(origin) - 1):
        yield int(origin[begin]), int(goal[begin]), last + 1 - begin
        begin = last + 1


def copy_rows(source: Rows, row: int, target: Rows, to: int, count: int) -> int:
    """Copy rows between memories of any kind, without waiting; return the bytes."""
    if source.planes and source.planes[0].device == target.planes[0].device:
        return target.copy_from(source, row, to, count)
    for origin, goal in zip(source.planes, target.planes, strict=True):
        for field in range(origin.shape[0]):  # contiguous: no staging buffer behind our back
            goal[field, to:to + count].copy_(origin[field, row:row + count], non_blocking=True)
    return count * source.manifest.row_bytes
