"""
Aligned saves: a capsule whose restore + append equals one cold prefill of the whole text.

It freezes the last position on the grid that was reached purely by prefill, with the ids behind it
as an unfolded tail. A session keeps that boundary by itself. Where it lies too far back, since the
text behind it was generated or came turn by turn, it can be *rebuilt*: the ids are prefilled once
more, on the grid alone, in a spare arena, while the live state stays untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flashrt_ros.arena import Arena
from flashrt_ros.capsule.boundary import HostState, Schedule
from flashrt_ros.capsule.lineage import Lineage, runs
from flashrt_ros.capsule.pool import Frozen, pages_for, Pool
from flashrt_ros.config import allocating, check_memory
from flashrt_ros.errors import InvalidArgument
from flashrt_ros.plan import Plan, TOKENS
from flashrt_ros.session import check_ids, Session


@dataclass(frozen=True)
class Aligned:
    """An aligned boundary with one reference, and what it cost."""

    frozen: Frozen
    host: HostState
    bytes_copied: int
    tokens_prefilled: int = 0


def refuse(session: Session, grid: int) -> None:
    """
    Refuse what cannot be saved aligned from what the session has kept.

    :raises InvalidArgument: saying why, and what to do.
    """
    kept = session.ring.grid
    if kept is None:
        raise InvalidArgument(
            f'an aligned save needs a grid position (a multiple of {grid} tokens) that was '
            'reached purely by prefill, and this session has none: its prompt is shorter, or '
            'it was restored from a capsule behind it. Ask for a rebuild, or save without align.')
    tail = session.position - kept.position
    if tail > grid:
        raise InvalidArgument(
            f'the last pure grid position is {kept.position}, {tail} tokens back, which '
            f'is more than the grid of {grid}: the position lies in generated or later '
            'text. Save aligned right after the prompt, ask for a rebuild, or save without align.')


def from_kept(session: Session, full: Frozen, copied: int, pool: Pool) -> Aligned:
    """Freeze the kept grid boundary of a session whose present boundary is ``full``."""
    kept = session.ring.grid
    assert kept is not None
    pages = full.pages[:pages_for(kept.position)]
    frozen = pool.hold(Frozen(kept.position, kept.block, pages))
    host = session.host
    # A seed at this very position is not in the block, which was kept before it.
    host = replace(host, schedule=host.schedule.cut(kept.position),
                   tail=(*ids_of(pool, full, kept.position), *host.tail),
                   seeds=tuple(seed for seed in host.seeds if seed[0] < kept.position))
    return Aligned(frozen, host, copied)


def rebuild(session: Session, full: Frozen, copied: int, live: Lineage, empty: Frozen,
            plan_of: Callable[[Arena], Plan],
            make_room: Callable[[Callable[[], tuple[Frozen, int]]], tuple[Frozen, int]]) -> Aligned:
    """
    Prefill the ids of a boundary again, on the grid alone, in a spare arena.

    :param empty: the boundary that a cold prefill starts from.
    :param plan_of: builds a plan over another arena of the same model.
    :raises InvalidArgument: for less than one grid chunk. :raises Capacity: no memory.
    """
    manifest, pool, host = live.arena.manifest, live.pool, session.host
    capacity = live.arena.capacity
    check_memory(manifest.storage_bytes(capacity))
    with allocating('a spare arena'):
        spare = Lineage(Arena(manifest, capacity, live.arena.device), pool)
        plan = plan_of(spare.arena)
    goal = full.position // plan.grid * plan.grid
    if not goal:
        raise InvalidArgument(f'a rebuild needs at least {plan.grid} tokens, one chunk of the '
                              f'grid; there are {full.position}. Save without align.')
    ids = ids_of(pool, full, 0)
    check_ids(ids, spare.arena)
    try:
        copied += spare.restore(empty)
        for start in range(0, goal, plan.grid):
            plan.append(ids[start:start + plan.grid])
        frozen, moved = make_room(spare.save)
    finally:
        spare.forget()
    schedule = Schedule()
    for _ in range(goal // plan.grid):
        schedule = schedule.appended(plan.grid)
    host = replace(host, schedule=schedule, tail=(*ids[goal:], *host.tail), seeds=())
    return Aligned(frozen, host, copied + moved, goal)


def ids_of(pool: Pool, frozen: Frozen, start: int) -> list[int]:
    """Read the token ids of rows ``[start, position)`` of a frozen boundary."""
    rows = pool.rows.view(TOKENS)
    ids: list[int] = []
    for _, place, count in runs(frozen.pages, 0, frozen.position, start):
        ids += rows[place:place + count].view(-1).tolist()
    return ids
