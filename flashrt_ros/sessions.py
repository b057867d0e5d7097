"""
The sessions of an engine: which one is live on the arena, and where the others are parked.

Switching is a save of one and a restore of the other, and both copy only what changed. A verb
checks everything first, so a refusal leaves every session as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
import time

from flashrt_ros import sampling
from flashrt_ros.capsule.boundary import HostState
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.capsule.names import check_name
from flashrt_ros.capsule.pool import Frozen, Pool
from flashrt_ros.capsule.tiering import Tiers
from flashrt_ros.errors import Busy, Capacity, DeviceFault, UnknownSession
from flashrt_ros.results import SessionInfo
from flashrt_ros.session import Session

DEFAULT_SESSION = 'default'


class Sessions:
    """
    Named sessions over one arena.

    ``live`` is the session on the arena, ``running`` the one that generates right now, or None.

    :param store: keeps the boundaries of parked sessions, in whatever tier there is room.
    :param save: freezes the live boundary, making room in the pool where needed.
    :param empty: the frozen empty boundary that new sessions start from.
    :param limit: sessions there may be.
    """

    def __init__(self, lineage: Lineage, store: Tiers, save: Callable[[], tuple[Frozen, int]],
                 empty: Frozen, build: Callable[[str, int], Session], limit: int) -> None:
        self._lineage = lineage
        self._store = store
        self._save = save
        self._empty = empty
        self._build = build
        self._limit = limit
        self._epoch = 0
        self._by_name: dict[str, Session] = {}
        self.running: Session | None = None
        self.live = self._by_name[DEFAULT_SESSION] = build(DEFAULT_SESSION, self.next_epoch())

    def __len__(self) -> int:
        return len(self._by_name)

    def next_epoch(self) -> int:
        """Return a number that never repeats, also across a restart: the wall clock in ns."""
        self._epoch = max(self._epoch + 1, time.time_ns())
        return self._epoch

    # -- finding ------------------------------------------------------------------------------

    def find(self, name: str) -> Session | None:
        """Return a session, or None if there is none of that name."""
        return self._by_name.get(name)

    def get(self, name: str) -> Session:
        """
        Return a session by name.

        :raises InvalidName, UnknownSession: by what is wrong with the name.
        """
        session = self._by_name.get(name) if isinstance(name, str) else None
        if session is None:
            check_name(name, 'session')
            raise UnknownSession(
                f'there is no session {name!r}; restore or fork a capsule into it, or generate '
                f'on it. There are: {", ".join(sorted(self._by_name))}.')
        return session

    def check(self, names: Sequence[str]) -> None:
        """
        Check names of sessions that exist or are about to.

        :raises InvalidName, Capacity: by what is wrong with them.
        """
        new = set(names).difference(self._by_name)
        if not new:
            return
        for name in new:
            check_name(name, 'session')
        needed = len(self._by_name) + len(new)
        if needed > self._limit:
            raise Capacity(f'sessions.max allows {self._limit} sessions at a time and this needs '
                           f'{needed}, {len(new)} of them new: close {needed - self._limit}, or '
                           f'configure sessions.max {needed} or more.')

    def check_idle(self, session: Session | None, what: str) -> None:
        """
        Refuse to touch the session that is generating.

        :raises Busy: saying what to do when it has ended.
        """
        if session is not None and session is self.running:
            raise Busy(f'session {session.name!r} is generating; {what} when it has ended, or '
                       'cancel it first.')

    def infos(self) -> list[SessionInfo]:
        """List all sessions by name."""
        capacity = self._lineage.arena.capacity
        return [SessionInfo(s.name, s.position, capacity, s.epoch, s is self.running,
                            s is self.live)
                for _, s in sorted(self._by_name.items())]

    # -- switching ----------------------------------------------------------------------------

    def obtain(self, name: str) -> Session:
        """Return a session, created parked at the empty boundary on first use."""
        session = self._by_name.get(name)
        if session is None:
            self.check([name])
            session = self._by_name[name] = self._build(name, self.next_epoch())
            session.parked = self._store.park(self._lineage.pool.hold(self._empty))
        return session

    @contextmanager
    def obtaining(self, name: str) -> Iterator[Session]:
        """As :meth:`obtain`; one that was created and could not be used is forgotten again."""
        new = name not in self._by_name
        session = self.obtain(name)
        try:
            yield session
        except BaseException:
            if new and session is not self.live:
                self.close(name)
            raise

    def activate(self, session: Session) -> int:
        """
        Make a session live, parking the one that is; return the bytes copied.

        :raises Busy: while another session generates. :raises Capacity: the pool is full.
        """
        if session is self.live and session.parked is None:
            return 0
        if self.running is not None:
            raise Busy(f'session {self.running.name!r} is generating, so {session.name!r} cannot '
                       'become live now; wait for the end or cancel it.')
        with self._brought(session) as frozen:
            copied = self._park()
            copied += self._lineage.restore(frozen)
        self._resume(session)
        return copied

    def assign(self, session: Session, frozen: Frozen, host: HostState, parent_id: str,
               seed: int | None, source: Pool | None = None, kept: Frozen | None = None) -> int:
        """
        Put a session at a frozen boundary and make it live; return the bytes copied.

        While a session generates, this one is only pointed there.

        :param source: the pool of the boundary, if it is not the device's; nobody generates then.
        :param kept: instead of the boundary, what the session keeps of it in the device's pool.
        """
        copied = 0
        if self.running is not None:
            return self.point(session, frozen, host, parent_id, seed)
        host = host if seed is None else host.seeded(seed)
        if session is not self.live:
            copied += self._park()
        copied += self._lineage.restore(frozen, source)
        self._settle(session)
        if seed is not None:
            self._reseed(seed)
        session.reseed = None
        session.become(host, parent_id, frozen if source is None else kept, self.next_epoch())
        if seed is not None:
            session.changed()
        return copied

    def branch(self, name: str, frozen: Frozen, host: HostState, parent_id: str,
               seed: int | None) -> int:
        """
        Put a session, created where there is none, at a frozen boundary; return the bytes copied.

        Only the live one is copied to; the names were checked.
        """
        session = self._by_name.get(name)
        if session is None:
            session = self._build(name, self.next_epoch())
            self.point(session, frozen, host, parent_id, seed)
            self._by_name[name] = session
            return 0
        place = self.assign if session is self.live else self.point
        return place(session, frozen, host, parent_id, seed)

    def point(self, session: Session, frozen: Frozen, host: HostState, parent_id: str,
              seed: int | None) -> int:
        """Put a parked session at a frozen boundary; return the bytes copied, none."""
        parked = self._store.park(self._lineage.pool.hold(frozen))
        if session.parked is not None:
            self._store.unpark(session.parked)
        session.parked, session.reseed = parked, seed
        host = host if seed is None else host.seeded(seed)
        session.become(host, parent_id, frozen, self.next_epoch())
        return 0

    def freeze(self, session: Session) -> tuple[Frozen, int]:
        """
        Return a session's boundary with one reference of its own, and the bytes copied.

        :raises DeviceFault: if the live state is invalid. :raises Capacity: the pool is full.
        :raises Busy: inside an append, a replay or a step of this session.
        """
        if session is not self.live or session.parked is not None:
            with self._brought(session) as frozen:
                if session.reseed is not None:
                    return self._store.make_room(partial(self._reseeded, frozen, session.reseed))
                return self._lineage.pool.hold(frozen), 0
        if session.folding:
            raise Busy(f'session {session.name!r} is in the middle of an append or a step, '
                       'which is no boundary; ask again when it has ended, or cancel it first.')
        if not self._lineage.arena.valid:
            raise DeviceFault('the live state was invalidated by a fault and cannot be saved; '
                              'restore a capsule or reset the session.')
        return self._save()

    def close(self, name: str) -> None:
        """
        Forget a session; the default one becomes empty instead.

        :raises UnknownSession, Busy: by what is wrong.
        """
        session = self.get(name)
        self.check_idle(session, 'close it')
        if name == DEFAULT_SESSION:
            place = self.assign if session is self.live else self.point  # parking takes memory
            place(session, self._empty, HostState(), '', None)
            return
        if session is self.live:
            heir = self._by_name[DEFAULT_SESSION]
            with self._brought(heir) as frozen:
                self._lineage.restore(frozen)
            self._resume(heir)
        if session.parked is not None:
            self._store.unpark(session.parked)
        session.ring.clear()
        del self._by_name[name]

    def _park(self) -> int:
        """
        Freeze the live session; one that a fault made invalid falls back to empty.

        Should the restore that follows fail, the session is live in name only: its boundary is
        whole in the pool, and the next verb restores it from there.
        """
        if self.live.parked is not None:
            return 0
        if not self._lineage.arena.valid:
            self.live.parked = self._store.park(self._lineage.pool.hold(self._empty))
            self.live.become(HostState(), '', self._empty, self.next_epoch())
            return 0
        frozen, copied = self._save()
        self.live.parked = self._store.park(frozen)
        return copied

    @contextmanager
    def _brought(self, session: Session) -> Iterator[Frozen]:
        """
        Bring the boundary of a parked session up from whatever tier it is in, and keep it there.

        :raises Capacity, Storage, Corrupt: it stays where it is.
        """
        assert session.parked is not None
        frozen = self._store.promote(session.parked)
        with self._lineage.pool.holding(frozen):
            yield frozen

    def light(self) -> list[tuple[Callable[[], None], int]]:
        """List the light boundaries of all sessions, the parked ones' first, with their blocks."""
        return [(partial(s.ring.give_up, kept), kept.block)
                for s in sorted(self._by_name.values(), key=lambda s: s is self.live)
                for kept in s.ring.light()]

    def blocks(self) -> list[int]:
        """Return the single blocks that sessions hold in the pool."""
        return [kept.block for s in self._by_name.values() for kept in s.ring.light()]

    def _settle(self, session: Session) -> None:
        """Note that a parked session's boundary is on the arena now."""
        if session.parked is not None:
            self._store.unpark(session.parked)
        session.parked, self.live = None, session

    def _resume(self, session: Session) -> None:
        """As :meth:`_settle`; a seed that waited for it begins its sequence."""
        self._settle(session)
        if session.reseed is not None:
            self._reseed(session.reseed)
            session.reseed = None
            session.changed()

    def _reseed(self, seed: int) -> None:
        arena = self._lineage.arena
        sampling.reseed(arena.manifest, arena.fixed, seed)

    def _reseeded(self, frozen: Frozen, seed: int) -> tuple[Frozen, int]:
        """Return a boundary that differs in its seed, with a reference, and the bytes copied."""
        pool = self._lineage.pool
        with pool.taking(0) as (block, _):
            fixed = pool.blocks[block]
            fixed.copy_(pool.blocks[frozen.block])
            sampling.reseed(pool.manifest, fixed, seed)
        pool.hold_pages(frozen.pages)
        return Frozen(frozen.position, block, frozen.pages), fixed.numel()
