"""
The store: named capsules in the pool (device tier) and in files (disk tier).

When the pool is full, least recently used capsules that are not pinned go down a tier: they are
written to disk if they are not there yet, and their pool memory is given back. Without a disk
directory nothing is ever thrown away to make room; the save is refused instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import threading
from typing import TypeVar

import numpy as np
import torch

from flashrt_ros.capsule.boundary import HostState
from flashrt_ros.capsule.capsule import Capsule, CapsuleInfo
from flashrt_ros.capsule.codec import Header, Image
from flashrt_ros.capsule.fingerprint import Fingerprint
from flashrt_ros.capsule.lineage import Lineage, runs
from flashrt_ros.capsule.names import check_name
from flashrt_ros.capsule.pool import Frozen, PAGE, pages_for
from flashrt_ros.capsule.tiers import DiskTier
from flashrt_ros.errors import Capacity, Corrupt, FlashrtError, NameExists, UnknownCapsule

T = TypeVar('T')


class Store:
    """
    Capsules by name and id.

    :param capacity: rows of the arena; a capsule with more is refused when it is read.
    :param disk: the disk tier, or None.
    """

    def __init__(self, lineage: Lineage, fingerprint: Fingerprint, capacity: int,
                 disk: DiskTier | None) -> None:
        self.lineage = lineage
        self.pool = lineage.pool
        self.fingerprint = fingerprint
        self.capacity = capacity
        self.disk = disk
        self._capsules: OrderedDict[str, Capsule] = OrderedDict()  # by name, oldest use first
        self._writer = ThreadPoolExecutor(1, thread_name_prefix='flashrt-disk')
        self._writes: dict[str, Future] = {}
        self._failures: list[BaseException] = []
        self._lock = threading.Lock()
        self.problems: list[tuple[str, str]] = []
        if disk is not None:
            self.scan()

    # -- finding ------------------------------------------------------------------------------

    def scan(self) -> None:
        """Take note of the capsule files in the directory; unreadable ones land in problems."""
        assert self.disk is not None
        for header, _ in self.disk.headers():
            if header.name in self._capsules:
                continue
            try:
                differences = self._differences(header)
                self._capsules[header.name] = Capsule(
                    header.id, header.name, header.parent_id, header.session, header.position,
                    header.aligned, header.created, header.note, _host(header), on_disk=True,
                    exact_future=not differences, warnings=differences)
            except FlashrtError as error:
                self.problems.append((header.name, str(error)))
        self.problems.extend((str(path), str(reason)) for path, reason in self.disk.problems())

    def find(self, reference: str) -> Capsule:
        """
        Return a capsule by name or id, without touching its memory.

        :raises InvalidName, UnknownCapsule: by what is wrong with the reference.
        :raises Incompatible, Corrupt: for a file of that name that cannot be used here.
        """
        check_name(reference)
        capsule = self._capsules.get(reference)
        if capsule is None:
            capsule = next((c for c in self._capsules.values() if c.id == reference), None)
        if capsule is None and self.disk is not None:
            self._read_foreign(reference)  # a file that appeared, or one that was refused
            capsule = self._capsules.get(reference)
        if capsule is None:
            raise UnknownCapsule(f'there is no capsule {reference!r}; list the capsules to see '
                                 'which there are.')
        return capsule

    def _read_foreign(self, name: str) -> None:
        assert self.disk is not None
        header = next((h for h, _ in self.disk.headers() if name in (h.name, h.id)), None)
        if header is None:
            if self.disk.path(name).exists():
                self.disk.get(name, self.pool.manifest, self.fingerprint)  # raises what is wrong
            return
        self._differences(header)  # raises what is wrong with it
        self.scan()

    def _differences(self, header: Header) -> list[str]:
        return self.fingerprint.refuse_unless_compatible(
            Fingerprint.from_json(header.fingerprint))

    def infos(self) -> list[CapsuleInfo]:
        """Return what is known of all capsules, oldest first."""
        return sorted((self.info(c) for c in list(self._capsules.values())),
                      key=lambda i: (i.created, i.name))

    def info(self, capsule: Capsule) -> CapsuleInfo:
        """Return what is told about a capsule."""
        manifest, exclusive = self.pool.manifest, 0
        if capsule.frozen is not None:
            # The live trail shares a prefix and frees by itself: its references do not count.
            counts = self.pool.page_references(capsule.frozen.pages)
            shared = self.lineage.common(capsule.frozen)
            alone = np.count_nonzero(counts[:shared] == 2) + np.count_nonzero(counts[shared:] == 1)
            exclusive = manifest.fixed_bytes + int(alone) * PAGE * manifest.row_bytes
        tiers = (('device',) if capsule.frozen is not None else ()) + (
            ('disk',) if capsule.on_disk else ())
        return CapsuleInfo(
            name=capsule.name, id=capsule.id, parent_id=capsule.parent_id,
            session=capsule.session, fingerprint=self.fingerprint.digest, tokens=capsule.tokens,
            bytes=manifest.state_bytes(capsule.position), bytes_exclusive=exclusive, tiers=tiers,
            pinned=capsule.pinned, aligned=capsule.aligned, exact_future=capsule.exact_future,
            created=capsule.created, note=capsule.note)

    # -- keeping ------------------------------------------------------------------------------

    def check_free(self, name: str, overwrite: bool) -> None:
        """
        Refuse a name before anything is copied.

        :raises InvalidName, NameExists: by what is wrong with it.
        """
        check_name(name)
        if name in self._capsules and not overwrite:
            raise NameExists(f'a capsule {name!r} exists already; choose another name or ask for '
                             'overwrite.')

    def put(self, capsule: Capsule, overwrite: bool) -> None:
        """Take a capsule, and its reference to the pool, under its name."""
        self.check_free(capsule.name, overwrite)
        old = self._capsules.pop(capsule.name, None)
        self._capsules[capsule.name] = capsule
        if old is not None:
            self._forget(old)

    def make_room(self, action: Callable[[], T]) -> T:
        """
        Run an action that takes pool memory, demoting capsules until it fits.

        :raises Capacity: if nothing more can be demoted.
        """
        while True:
            try:
                return action()
            except Capacity:
                if not self._demote_one():
                    raise

    def _demote_one(self) -> bool:
        for capsule in self._capsules.values():
            if capsule.frozen is None or capsule.pinned:
                continue
            if not capsule.on_disk:
                if self.disk is None:
                    continue
                self._write(capsule, capsule.frozen)
                capsule.on_disk = True
            self.pool.release(capsule.frozen)
            capsule.frozen = None
            return True
        return False

    def promote(self, capsule: Capsule) -> Frozen:
        """
        Make sure that a capsule is in the pool and mark it used.

        :raises Corrupt, Incompatible, Storage, Capacity: by what is wrong with its file.
        """
        if capsule.name in self._capsules:
            self._capsules.move_to_end(capsule.name)
        if capsule.frozen is None:
            if self.disk is None:
                raise UnknownCapsule(f'capsule {capsule.name!r} was dropped; save it again.')
            image = self.disk.get(capsule.name, self.pool.manifest, self.fingerprint)
            if image.header.id != capsule.id:
                raise Corrupt(f'the file of capsule {capsule.name!r} was replaced by another one; '
                              'list the capsules again.')
            if image.header.position > self.capacity:
                raise Capacity(f'capsule {capsule.name!r} has {image.header.position} tokens and '
                               f'the context holds {self.capacity}; configure a larger '
                               'context.max_tokens.')
            capsule.frozen = self.make_room(lambda: self._upload(image))
        return capsule.frozen

    def _upload(self, image: Image) -> Frozen:
        position = image.header.position
        block, pages = self.pool.take(pages_for(position))
        self.pool.blocks[block].copy_(image.fixed)
        assert image.block is not None, 'an image that was read has its rows as one block'
        for start, place, count in runs(pages, 0, position):
            self.pool.rows.copy_from(image.block, start, place, count)
        return Frozen(position, block, pages)

    # -- disk ---------------------------------------------------------------------------------

    def persist(self, capsule: Capsule) -> None:
        """Write a capsule to disk in the background; :meth:`flush` waits and reports."""
        if self.disk is None:
            raise Capacity('no capsule directory is configured; set capsules.directory to persist '
                           'capsules.')
        if capsule.frozen is None:
            return
        frozen = self.pool.hold(capsule.frozen)  # the bytes stay until they are written

        def work() -> None:
            try:
                self._write(capsule, frozen)
                capsule.on_disk = True
            except BaseException as error:
                with self._lock:
                    self._failures.append(error)
                capsule.warnings.append(str(error))
                raise
            finally:
                self.pool.release(frozen)

        self._writes[capsule.id] = self._writer.submit(work)

    def _write(self, capsule: Capsule, frozen: Frozen) -> None:
        assert self.disk is not None
        header = Header(
            id=capsule.id, name=capsule.name, position=frozen.position,
            manifest=self.pool.manifest.describe(), fingerprint=self.fingerprint.to_json(),
            host=capsule.host.to_json(), parent_id=capsule.parent_id, session=capsule.session,
            created=capsule.created, note=capsule.note, aligned=capsule.aligned)
        rows: dict[str, torch.Tensor | Sequence[torch.Tensor]] = {}
        for buffer in self.pool.manifest.rows:
            view = self.pool.rows.view(buffer.name)
            rows[buffer.name] = [view[place:place + count] for _, place, count in
                                 runs(frozen.pages, 0, frozen.position)]
        image = Image(header, self.pool.blocks[frozen.block], rows)
        self.disk.put(image, self.pool.manifest, overwrite=True)

    def flush(self, timeout: float | None = None) -> None:
        """
        Wait for background writes.

        :raises Storage: the first failure since the last flush.
        """
        for key, future in list(self._writes.items()):
            future.exception(timeout)
            self._writes.pop(key, None)
        with self._lock:
            failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    def drop(self, capsule: Capsule, disk: bool = True) -> None:
        """Forget a capsule, and its file too unless ``disk`` is False."""
        write = self._writes.pop(capsule.id, None)
        if write is not None:
            write.exception()
        self._capsules.pop(capsule.name, None)
        if disk and capsule.on_disk and self.disk is not None:
            self.disk.remove(capsule.name)
            capsule.on_disk = False
        self._forget(capsule)

    def _forget(self, capsule: Capsule) -> None:
        if capsule.frozen is not None:
            self.pool.release(capsule.frozen)
            capsule.frozen = None

    def close(self) -> None:
        """Finish background writes and stop the writer."""
        self._writer.shutdown(wait=True)


def _host(header: Header) -> HostState:
    try:
        return HostState.from_json(header.host)
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f'the host part of capsule {header.name!r} is malformed ({error}); '
                      'save it again.') from error
