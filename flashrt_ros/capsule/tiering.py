"""
Moving capsules between tiers: down to make room, up to be used.

Least recently used capsules that are not pinned go down, from the device to the host and from the
host to the disk, and only those whose going frees what is needed. Pages that a tier holds already
are not copied again, neither on the way down nor up. Where there is no tier below, nothing is
thrown away to make room in memory: the save is refused instead, before anything moved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
import threading
import time
from typing import TypeVar

import numpy as np

from flashrt_ros.capsule.boundary import EMPTY
from flashrt_ros.capsule.capsule import Capsule, now
from flashrt_ros.capsule.files import Files
from flashrt_ros.capsule.fingerprint import Fingerprint
from flashrt_ros.capsule.lane import Lane
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.capsule.pool import Frozen, Pages, pages_for, Pool, PoolFull
from flashrt_ros.capsule.room import choose
from flashrt_ros.capsule.tiers import Tier
from flashrt_ros.capsule.transfer import bring
from flashrt_ros.capsule.upload import Replaced, Upload
from flashrt_ros.errors import Capacity, Corrupt, Incompatible, NameExists, UnknownCapsule

T = TypeVar('T')
Shed = Callable[[], None]


class Tiers:
    """
    The table of capsules and the memory they are in; :class:`Store` names and files them.

    :param capacity: rows of the arena; a capsule with more is refused when it is read.
    :param disk: the disk tier, or None.
    :param host: pool of the host tier, or None.
    """

    def __init__(self, lineage: Lineage, fingerprint: Fingerprint, capacity: int,
                 disk: Tier | None, host: Pool | None) -> None:
        self.lineage = lineage
        self.pool = lineage.pool
        self.host = host
        self.fingerprint = fingerprint
        self.disk = disk
        #: light boundaries that may be given up when blocks are short: how, and the block
        self.light: Callable[[], list[tuple[Shed, int]]] = list
        self._capsules: OrderedDict[str, Capsule] = OrderedDict()  # by name, oldest use first
        self._parked: list[Capsule] = []  # boundaries of parked sessions
        self._lock = threading.RLock()  # the table: the writer takes entries out too
        self.lane = Lane(self.pool.blocks.device)
        self._upload = Upload(self.pool, capacity, disk, self.lane)
        self.files = (Files(disk, fingerprint, self, Lane(self.lane.device))
                      if disk is not None else None)

    def capsules(self) -> list[Capsule]:
        """Return all capsules, least recently used first."""
        with self._lock:
            return list(self._capsules.values())

    def parked(self) -> list[Capsule]:
        """Return the boundaries of parked sessions, as hidden capsules."""
        return list(self._parked)

    def _all(self) -> list[Capsule]:
        return sorted((*self.capsules(), *self._parked), key=lambda capsule: capsule.used)

    def park(self, frozen: Frozen) -> Capsule:
        """
        Take the boundary of a parked session, and its reference to the pool.

        It goes down and comes up as any capsule, the least recently used first.
        """
        capsule = Capsule('parked', 'parked', '', '', frozen.position, False, time.time(), '',
                          EMPTY, frozen, hidden=True)
        self._parked.append(capsule)
        return capsule

    def unpark(self, capsule: Capsule) -> None:
        """Forget the boundary of a session that is parked no more."""
        self._parked = [other for other in self._parked if other is not capsule]
        self._forget(capsule)

    def _forget(self, capsule: Capsule) -> None:
        """Give up what a capsule holds in memory, its pin, and the file of a hidden one."""
        if capsule.frozen is not None:
            self.pool.release(capsule.frozen)
        if capsule.on_host is not None and self.host is not None:
            self.host.release(capsule.on_host)
        capsule.frozen = capsule.on_host = None
        capsule.pinned = False
        if capsule.hidden and self.files is not None:
            self.files.remove(capsule)
        elif not capsule.hidden and self.disk is not None:
            self.disk.let_go(capsule.name)

    def gone(self, capsule: Capsule) -> None:
        """Take a capsule out whose last copy left the disk."""
        with self._lock:
            if self._capsules.get(capsule.name) is capsule:
                del self._capsules[capsule.name]
                if self.disk is not None:
                    self.disk.let_go(capsule.name)

    def leave_disk(self, usage: dict[str, int], missing: int) -> list[Capsule] | None:
        """
        Choose capsules to leave the disk, and mark them as no longer there.

        :param usage: bytes of each file by name. :param missing: bytes to free.
        :return: whom to delete; None, with nobody marked, if all of them are not enough.
        """
        assert self.disk is not None
        with self._lock:
            leaving = []
            for other in sorted(self._capsules.values(), key=lambda c: c.used):
                if missing > 0 and other.on_disk and not other.pinned and not other.moving:
                    if other.name in usage and not self.disk.held(other.name):
                        leaving.append(other)
                        missing -= usage[other.name]
            if missing > 0:
                return None
            for other in leaving:
                other.on_disk = False
                if not other.in_memory:
                    self.gone(other)
            return leaving

    # -- down: making room ----------------------------------------------------------------------

    def make_room(self, action: Callable[[], T]) -> T:
        """
        Run an action that takes pool memory, moving capsules down until it fits.

        :raises Capacity: if that cannot be; nothing moved where that was clear beforehand.
        """
        while True:
            try:
                return action()
            except PoolFull as full:
                self._free_device(full)

    def _free_device(self, full: PoolFull) -> None:
        ids = self.pool.block_ids if full.what == 'blocks' else self.pool.page_ids
        if full.wanted > ids.count:
            raise full
        candidates: list[tuple[Shed, Pages]] = []
        if full.what == 'blocks':
            candidates += [(shed, np.array([block])) for shed, block in self.light()]
        for capsule in self._all():
            if capsule.frozen is not None and not capsule.pinned and self._goes_down(capsule):
                candidates.append((_bound(self._demote, capsule), _places(capsule.frozen, full)))
        if full.what == 'pages':  # the last resort: the next save of the live state copies all
            candidates.append((self.lineage.forget, self.lineage.trail))
        leaving = choose(ids, candidates, full.wanted)
        if not leaving:
            raise full
        for leave in leaving:
            leave()

    def _goes_down(self, capsule: Capsule) -> bool:
        if capsule.on_host is not None or self._has_file(capsule):
            return True
        return self.host is not None and pages_for(capsule.position) <= self.host.page_ids.count

    def _has_file(self, capsule: Capsule) -> bool:
        """Whether a capsule is on disk or may go there."""
        return capsule.on_disk or self.disk is not None and (
            not capsule.hidden or self.disk.parks)

    def demote(self, capsule: Capsule) -> None:
        """
        Move a capsule down one tier.

        :raises Capacity: if it is pinned, or no tier below takes it; nothing has changed then.
        """
        if capsule.pinned:
            raise Capacity(f'capsule {capsule.name!r} is pinned; unpin it first.')
        if capsule.frozen is not None:
            self._demote(capsule)
        elif capsule.on_host is not None:
            self._leave_host(capsule)

    def _demote(self, capsule: Capsule) -> None:
        frozen = capsule.frozen
        assert frozen is not None
        if self.host is not None and capsule.on_host is None:
            try:
                capsule.on_host, _ = bring(self.pool, frozen, self.host, self._make_host_room,
                                            self.lane)
            except PoolFull:
                if not self._has_file(capsule):
                    raise
        if capsule.on_host is None:
            self._write(capsule, self.pool, frozen)
        capsule.uids = (int(self.pool.block_ids.uids[frozen.block]),
                        self.pool.page_ids.uids[frozen.pages])
        capsule.frozen = None
        self.pool.release(frozen)

    def _make_host_room(self, action: Callable[[], T]) -> T:
        assert self.host is not None
        while True:
            try:
                return action()
            except PoolFull as full:
                ids = self.host.block_ids if full.what == 'blocks' else self.host.page_ids
                # Those that are on the device as well leave first: nothing is lost by it.
                able = sorted((c for c in self._all() if self._leaves_host(c)),
                              key=lambda c: c.frozen is None)
                candidates: list[tuple[Shed, Pages]] = [
                    (_bound(self._leave_host, c), _places(c.on_host, full)) for c in able]
                if full.what == 'pages' and self.lineage.abroad is not None:
                    candidates.append((self.lineage.forget, self.lineage.abroad[1]))
                leaving = choose(ids, candidates, full.wanted)
                if not leaving:
                    raise
                for leave in leaving:
                    leave()

    def _leaves_host(self, capsule: Capsule) -> bool:
        if capsule.on_host is None or capsule.moving:
            return False
        return capsule.frozen is not None or self._has_file(capsule) and not capsule.pinned

    def _leave_host(self, capsule: Capsule) -> None:
        frozen = capsule.on_host
        assert frozen is not None and self.host is not None
        if capsule.frozen is None:
            self._write(capsule, self.host, frozen)
        capsule.on_host = None
        self.host.release(frozen)

    def _write(self, capsule: Capsule, pool: Pool, frozen: Frozen) -> None:
        if self.files is None and not capsule.on_disk:
            raise Capacity(f'capsule {capsule.name!r} cannot leave memory: there is no tier below; '
                           'set capsules.directory.')
        if self.files is not None:
            self.files.wait(capsule.name)
            self.look(capsule)
            if not capsule.on_disk:
                try:
                    self.files.write(capsule, pool, frozen)
                except NameExists as error:
                    raise Capacity(f'capsule {capsule.name!r} cannot leave memory: a file of this '
                                   'name is that of another node. Drop one of them, or save it '
                                   'under another name.') from error

    def look(self, capsule: Capsule) -> None:
        """See whether the file of a capsule is still its own: another node may have dropped it."""
        if capsule.on_disk and not capsule.hidden and self.disk is not None:
            try:
                there = self.disk.header(capsule.name).id == capsule.id
            except (UnknownCapsule, Corrupt, Incompatible):
                there = False
            if not there:
                capsule.on_disk = capsule.replaces = False
                self.disk.let_go(capsule.name)

    # -- up -------------------------------------------------------------------------------------

    def promote(self, capsule: Capsule) -> Frozen:
        """
        Make sure that a capsule is in the pool and mark it used.

        :raises Corrupt, Incompatible, Storage, Capacity: by what is wrong with its file.
        """
        self._touch(capsule)
        if capsule.frozen is not None and capsule.file is None:
            return capsule.frozen
        capsule.moving = True  # hands off while it is under way
        try:
            if capsule.frozen is None:
                if capsule.on_host is not None and self.host is not None:
                    capsule.frozen, _ = bring(self.host, capsule.on_host, self.pool,
                                              self.make_room, self.lane)
                else:
                    capsule.frozen = self._upload.bring_up(capsule, self.fingerprint,
                                                           self.make_room)
        except (UnknownCapsule, Replaced):
            self.gone(capsule)  # whoever names it again finds what is there
            raise
        finally:
            capsule.moving = False
        if capsule.file is not None and self.files is not None:
            self.files.remove(capsule)  # a session that is named is about to go on: it is stale
        return capsule.frozen

    def _touch(self, capsule: Capsule) -> None:
        with self._lock:
            if self._capsules.get(capsule.name) is capsule:
                self._capsules.move_to_end(capsule.name)
        capsule.used = now()

    @contextmanager
    def beside(self, capsule: Capsule) -> Iterator[tuple[Frozen, Pool, Frozen | None] | None]:
        """
        Yield where a capsule can be restored from without coming up, or None where it must.

        That is the host tier of a CPU: it is the same memory, so coming up would only be one more
        copy. The capsule counts as used and stays put for the ``with`` block.

        :return: the boundary, the pool it is in, and its fixed block in the device's pool for a
            session to keep (None where there is no room for it).
        """
        host, frozen = self.host, capsule.on_host
        if capsule.frozen is not None or frozen is None or host is None or (
                host.blocks.device != self.pool.blocks.device):
            yield None
            return
        self._touch(capsule)
        with host.holding(frozen):
            block: Frozen | None = None
            with suppress(PoolFull):
                block, _ = bring(host, Frozen(frozen.position, frozen.block, frozen.pages[:0]),
                                 self.pool, self.make_room, self.lane)
            try:
                yield frozen, host, block
            finally:
                if block is not None:
                    self.pool.release(block)


def _places(frozen: Frozen | None, full: PoolFull) -> Pages:
    assert frozen is not None
    return np.array([frozen.block]) if full.what == 'blocks' else frozen.pages


def _bound(verb: Callable[[Capsule], None], capsule: Capsule) -> Shed:
    return lambda: verb(capsule)
