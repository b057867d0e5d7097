"""
The rollback ring: light boundaries that a session keeps by itself.

A light boundary is a fixed block in the pool, without rows: it stays good for as long as no row
below it is written. "Undo n tokens" goes to the nearest one at or below the target and replays the
rest. They are kept where a turn begins and every so many tokens of an answer, and they are the
first to go when the pool runs short of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.errors import Capacity


@dataclass(frozen=True, eq=False)
class Kept:
    """
    A light boundary: a block with one reference; rows below ``position`` are still its own.

    ``turn`` tells one at the start of a turn from one within an answer.
    """

    position: int
    block: int
    turn: bool = True


class Ring:
    """
    The light boundaries of one session.

    :param empty: block of the empty boundary, which is always there.
    :param boundaries: kept at most; half of them, at least one, may lie within answers.
    :param tokens: keep one within an answer every so many tokens; 0 for none.
    :param budget: bytes that they may take; 0 for no limit.
    """

    def __init__(self, lineage: Lineage, empty: int, boundaries: int = 4, tokens: int = 64,
                 budget: int = 0) -> None:
        self._lineage = lineage
        self._pool = lineage.pool
        self._empty = Kept(0, empty)
        if budget:
            boundaries = min(boundaries, budget // lineage.arena.manifest.fixed_bytes)
        self._limit = boundaries
        self.tokens = tokens
        self._kept: list[Kept] = []  # oldest first
        self.grid: Kept | None = None  # the last grid position reached purely by prefill

    def nearest(self, target: int) -> Kept:
        """Return the last boundary at or below a position."""
        kept = [self._empty, *self._kept, *([self.grid] if self.grid else [])]
        return max((k for k in kept if k.position <= target), key=lambda k: k.position)

    def light(self) -> list[Kept]:
        """Return all but the empty one, the one that is missed least first."""
        return [*sorted(self._kept, key=lambda kept: kept.turn),
                *([self.grid] if self.grid else [])]

    def take(self, position: int, turn: bool = True) -> Kept | None:
        """
        Copy the present fixed block; the caller owns it.

        None where the pool is full: keeping is a convenience, a rollback then replays more.
        """
        try:
            return Kept(position, self._lineage.keep(), turn)
        except Capacity:
            return None

    def mark(self, position: int, turn: bool = True) -> Kept | None:
        """
        Keep the present boundary, at the cost of an older one; return it, None if it was not kept.

        Those within an answer replace each other while turns need the room, so that a long answer
        does not push out where its turn began.
        """
        for kept in [k for k in self._kept if k.position == position]:
            if kept.turn and not turn:
                return None
            self.give_up(kept)
        within = [k for k in self._kept if not k.turn]
        if not turn and len(within) >= max(1, self._limit // 2):
            self.give_up(within[0])
        while self._kept and len(self._kept) >= self._limit:
            self.give_up(within[0] if turn and within and within[0] in self._kept
                         else self._kept[0])
        fresh = self.take(position, turn) if self._limit else None
        if fresh is not None:
            self._kept.append(fresh)
        return fresh

    def holds(self, kept: Kept) -> bool:
        """Tell whether a boundary that was kept is here still."""
        return kept in self._kept

    def adopt(self, position: int, block: int, grid: bool) -> Kept | None:
        """
        Keep a block of somebody else's alone, as the grid boundary too where it is one.

        :return: what is kept; None for the empty boundary, which is always there.
        """
        there = self._kept[0] if len(self._kept) == 1 else None
        if there is not None and there.position == position and there.block == block and (
                self.grid.block == block if grid and self.grid else not grid and not self.grid):
            return there  # back to where it was: a block that is held is no other one meanwhile
        self.clear()
        if not position:
            return None
        self._pool.hold_block(block, 2 if grid else 1)
        kept = Kept(position, block)
        self._kept.append(kept)
        if grid:
            self.grid = Kept(position, block)
        return kept

    def set_grid(self, kept: Kept) -> None:
        """Replace the grid boundary; its reference comes with it."""
        if self.grid is not None:
            self.give_up(self.grid)
        self.grid = kept

    def drop_above(self, position: int) -> None:
        """Drop the boundaries whose rows are about to be, or were, written."""
        above = [kept for kept in self._kept if kept.position > position]
        if self.grid is not None and self.grid.position > position:
            above.append(self.grid)
        for kept in above:
            self.give_up(kept)

    def give_up(self, kept: Kept) -> None:
        """Give one boundary back to the pool."""
        if kept is self.grid:
            self.grid = None
        else:
            self._kept.remove(kept)
        self._pool.release_block(kept.block)

    def clear(self) -> None:
        """Give all boundaries back to the pool."""
        blocks = [kept.block for kept in self._kept]
        if self.grid is not None:
            blocks.append(self.grid.block)
        self._kept.clear()
        self.grid = None
        self._pool.release_blocks(blocks)
