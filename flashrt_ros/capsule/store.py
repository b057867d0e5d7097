"""
The store: capsules by name, in the pool (device tier), in host memory and in files (disk tier).

``tiering`` moves them between the tiers; here is what people and other nodes see: names, listings,
overwriting, dropping, the files that appear and vanish in a shared directory.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from flashrt_ros.capsule import faults
from flashrt_ros.capsule.boundary import HostState
from flashrt_ros.capsule.capsule import Capsule, CapsuleInfo, now
from flashrt_ros.capsule.codec import Header
from flashrt_ros.capsule.fingerprint import Fingerprint
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.capsule.names import check_name
from flashrt_ros.capsule.pool import Frozen, PAGE, Pool
from flashrt_ros.capsule.tiering import Tiers
from flashrt_ros.capsule.tiers import Tier
from flashrt_ros.errors import Capacity, Corrupt, FlashrtError, NameExists, Storage, UnknownCapsule


class Store(Tiers):
    """Capsules by name and id; see :class:`Tiers` for the parameters."""

    def __init__(self, lineage: Lineage, fingerprint: Fingerprint, capacity: int,
                 disk: Tier | None, host: Pool | None = None) -> None:
        super().__init__(lineage, fingerprint, capacity, disk, host)
        self.problems: list[tuple[str, str]] = []
        self._stamp: object = None
        if disk is not None:
            self.scan()

    # -- finding ------------------------------------------------------------------------------

    def scan(self) -> None:
        """Compare with the files in the directory; unreadable ones land in ``problems``."""
        assert self.disk is not None
        self._stamp = self.disk.stamp()
        known = [c for c in self.capsules() if c.on_disk]  # not those written meanwhile
        headers = {header.name: header for header, _ in self.disk.headers()}
        self.problems = [(str(path), str(why)) for path, why in self.disk.problems()]
        with self._lock:
            for capsule in known:
                header = headers.get(capsule.name)
                if header is None or header.id != capsule.id:  # another node's doing
                    capsule.on_disk = capsule.replaces = False
                    self.disk.let_go(capsule.name)
                    if not capsule.in_memory:
                        self.gone(capsule)
            for header in headers.values():
                there = self._capsules.get(header.name)
                if there is not None:
                    if there.id == header.id and not there.on_disk:  # a directory that came back
                        there.on_disk = there.replaces = True
                        if there.pinned:
                            self.disk.hold(there.name)
                else:
                    try:
                        self._capsules[header.name] = self._from_file(header)
                        self._capsules.move_to_end(header.name, last=False)
                    except FlashrtError as error:
                        self.problems.append((header.name, str(error)))

    def _from_file(self, header: Header) -> Capsule:
        differences = self.fingerprint.refuse_unless_compatible(
            Fingerprint.from_json(header.fingerprint))
        return Capsule(
            header.id, header.name, header.parent_id, header.session, header.position,
            header.aligned, header.created, header.note, _host(header), on_disk=True,
            replaces=True, exact_future=not differences, warnings=differences,
            used=min(header.created, now()))  # what is used from here on is used later

    def find(self, reference: str) -> Capsule:
        """
        Return a capsule by name or id, without touching its memory.

        :raises InvalidName, UnknownCapsule: by what is wrong with the reference.
        :raises Incompatible, Corrupt: for a file of that name that cannot be used here.
        """
        capsule = self._capsules.get(reference)
        if capsule is not None:  # nearly always
            return capsule
        capsule = self._look_up(reference)
        if capsule is None:
            check_name(reference)
        if capsule is None and self.disk is not None:
            self.scan()  # a file that appeared, or one that was refused
            capsule = self._look_up(reference)
            if capsule is None and self.disk.holds(reference):
                self.disk.get(reference, self.pool.manifest, self.fingerprint)  # says what is wrong
                raise Corrupt(f'the file of capsule {reference!r} cannot be used: '
                              f'{dict(self.problems).get(reference, "it is changing")}')
        if capsule is None:
            raise UnknownCapsule(f'there is no capsule {reference!r}; list the capsules to see '
                                 'which there are.')
        return capsule

    def _look_up(self, reference: str) -> Capsule | None:
        with self._lock:
            found = self._capsules.get(reference)
            return found or next((c for c in self._capsules.values() if c.id == reference), None)

    def infos(self) -> list[CapsuleInfo]:
        """Return what is known of all capsules, oldest first."""
        with suppress(Storage):  # a disk that went away takes nothing from those in memory
            self._rescan()
        return sorted((self.info(c) for c in self.capsules()), key=lambda i: (i.created, i.name))

    def _rescan(self) -> None:
        """Look again where the listing changed: another node may share the directory."""
        if self.disk is not None and self.disk.stamp() != self._stamp:
            self.scan()

    def info(self, capsule: Capsule) -> CapsuleInfo:
        """Return what is told about a capsule."""
        manifest, exclusive, frozen = self.pool.manifest, 0, capsule.frozen
        if frozen is not None:
            exclusive = self._alone(capsule, frozen) * PAGE * manifest.row_bytes
            if self.pool.block_ids.references[frozen.block] == 1:  # no session's as well
                exclusive += manifest.fixed_bytes
        tiers, told = capsule.tiers, capsule.told
        if told is not None and told.bytes_exclusive == exclusive and told.tiers == tiers and (
                told.pinned == capsule.pinned):
            return told  # nothing else of it ever changes
        capsule.told = told = CapsuleInfo(
            name=capsule.name, id=capsule.id, parent_id=capsule.parent_id,
            session=capsule.session, fingerprint=self.fingerprint.digest, tokens=capsule.tokens,
            bytes=manifest.state_bytes(capsule.position), bytes_exclusive=exclusive,
            tiers=tiers, pinned=capsule.pinned, aligned=capsule.aligned,
            exact_future=capsule.exact_future, created=capsule.created, note=capsule.note)
        return told

    def _alone(self, capsule: Capsule, frozen: Frozen) -> int:
        """Count the pages that nobody else holds; the same ones until some reference changes."""
        changes, trail, known = self.pool.page_ids.changes, self.lineage.trail, capsule.alone
        if known is not None and known[0] == changes and known[1] is trail:
            return known[2]
        # The live trail shares a prefix and frees by itself: its references do not count.
        counts = self.pool.page_references(frozen.pages)
        shared = self.lineage.common(frozen)
        alone = int(np.count_nonzero(counts[:shared] == 2))
        if shared < len(counts):
            alone += int(np.count_nonzero(counts[shared:] == 1))
        capsule.alone = changes, trail, alone
        return alone

    # -- keeping ------------------------------------------------------------------------------

    def check_free(self, name: str, overwrite: bool, persist: bool = False) -> None:
        """
        Refuse a name before anything is copied.

        :param persist: also look at the files, which another node may have written.
        :raises InvalidName, NameExists: by what is wrong with it.
        """
        check_name(name)
        if not overwrite and (name in self._capsules or (
                persist and self.disk is not None and self.disk.holds(name))):
            raise NameExists(f'a capsule {name!r} exists already; choose another name or ask for '
                             'overwrite.')

    def check_disk(self, position: int) -> None:
        """
        Refuse to persist, before anything is copied, what can never fit.

        :raises Capacity: naming the budget.
        """
        budget = self.disk.budget_bytes if self.disk is not None else 0
        size = self.pool.manifest.state_bytes(position)
        if budget and size > budget:
            raise Capacity(f'a boundary of {position} tokens takes {size} bytes, more than the '
                           f'whole disk budget of {budget}; raise capsules.disk_bytes, or save '
                           'without persist.')

    def put(self, capsule: Capsule, overwrite: bool) -> None:
        """Take a capsule, and its reference to the pool, under its name."""
        self.check_free(capsule.name, overwrite)
        faults.point('store.put')
        capsule.replaces = overwrite
        with self._lock:
            old = self._capsules.pop(capsule.name, None)
            self._capsules[capsule.name] = capsule
        if old is not None:
            self._forget(old)

    def pin(self, capsule: Capsule, pinned: bool) -> None:
        """
        Keep a capsule where it is whatever happens, or stop doing so.

        A pin is this node's and ends with it. Meanwhile other nodes on the same directory do not
        evict the file; dropping it by name is an order, and they follow it.
        """
        capsule.pinned = pinned
        if self.disk is not None and capsule.on_disk:
            (self.disk.hold if pinned else self.disk.let_go)(capsule.name)

    def drop(self, capsule: Capsule, disk: bool = True) -> None:
        """Forget a capsule, and its file too unless ``disk`` is False."""
        if self.files is not None:
            self.files.wait(capsule.name)
            with suppress(Storage):
                self._rescan()  # its file may have come back with the directory
            if disk:
                self.look(capsule)  # a listing may be older than what another node wrote
            if disk and capsule.replaces:
                self.files.remove(capsule)  # also that of an earlier capsule of this name
        with self._lock:
            if self._capsules.get(capsule.name) is capsule:
                del self._capsules[capsule.name]
        self._forget(capsule)

    # -- disk ---------------------------------------------------------------------------------

    def persist(self, capsule: Capsule) -> None:
        """Write a capsule to disk in the background; :meth:`flush` waits and reports."""
        if self.files is None:
            raise Capacity('no capsule directory is configured; set capsules.directory to persist '
                           'capsules.')
        if capsule.in_memory:
            self.look(capsule)
        if capsule.on_disk:
            return
        if capsule.frozen is not None:
            self.files.write_later(capsule, self.pool, capsule.frozen)
        elif capsule.on_host is not None and self.host is not None:
            self.files.write_later(capsule, self.host, capsule.on_host)

    def flush(self, timeout: float | None = None) -> None:
        """
        Wait for background writes.

        :raises Storage: the first failure since the last flush.
        """
        if self.files is not None:
            self.files.flush(timeout)

    def close(self) -> None:
        """Finish background writes, stop the writer, forget parked sessions."""
        for capsule in self.parked():
            self.unpark(capsule)
        if self.files is not None:
            self.files.close()


def _host(header: Header) -> HostState:
    try:
        host = HostState.from_json(header.host)
        host.check(header.position)
        return host
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt(f'the host part of capsule {header.name!r} is malformed ({error}); '
                      'save it again.') from error
