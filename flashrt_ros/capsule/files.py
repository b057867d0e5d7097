"""
The way to the disk tier and back: writes in the background, the budget, who leaves the disk.

One thread writes, in the order that was asked for. When the budget of the tier is full, the least
recently used capsules leave the disk, pinned ones never; a capsule that was nowhere else is then
gone, and :attr:`Files.lost` counts it. A capsule larger than the whole budget is refused first.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
import threading
from typing import Protocol

import torch

from flashrt_ros.capsule import codec
from flashrt_ros.capsule.atomic import storage_error
from flashrt_ros.capsule.capsule import Capsule
from flashrt_ros.capsule.codec import Header, Image
from flashrt_ros.capsule.fingerprint import Fingerprint
from flashrt_ros.capsule.lane import Lane
from flashrt_ros.capsule.lineage import runs
from flashrt_ros.capsule.pool import Frozen, Pool
from flashrt_ros.capsule.tiers import Tier
from flashrt_ros.errors import Capacity, DeadlineExceeded, FlashrtError, UnknownCapsule


class Table(Protocol):
    """Who knows all capsules."""

    def leave_disk(self, usage: dict[str, int], missing: int) -> list[Capsule] | None:
        """Choose whose files to delete to free ``missing`` bytes, or None."""


class Files:
    """
    Capsules on their way to files.

    :param table: chooses who leaves when the budget is full.
    :param lane: for what the writer fetches from a device, beside the decode.
    """

    def __init__(self, tier: Tier, fingerprint: Fingerprint, table: Table, lane: Lane) -> None:
        self.tier = tier
        self.lost = 0
        self.hidden_bytes = 0  # of the files of parked sessions
        self._fingerprint = fingerprint
        self._table = table
        self._lane = lane
        self._writer = ThreadPoolExecutor(1, thread_name_prefix='flashrt-disk')
        self._writes: list[tuple[str, Future]] = []  # name, its write; oldest first
        self._used: tuple[object, int] | None = None
        self._failures: list[BaseException] = []
        self._lock = threading.Lock()
        self._writing = threading.RLock()  # room and write are one step

    def used_bytes(self) -> int:
        """Bytes of all files in the tier, whoever wrote them, as of the last listing."""
        stamp, used = self.tier.stamp(), self._used  # the writer forgets it at any time
        if used is None or stamp != used[0]:
            used = self._used = (stamp, sum(self.tier.usage().values()))
        return used[1] + self.hidden_bytes

    def write(self, capsule: Capsule, pool: Pool, frozen: Frozen) -> None:
        """
        Write a capsule now.

        :raises Capacity, NameExists, Storage: by what is in the way; no file has changed then,
            but less recently used ones may have left.
        """
        pool.settle()
        image = image_of(capsule, pool, frozen, self._fingerprint)
        with self._writing:
            self._make_room(capsule, codec.file_bytes(image, pool.manifest))
            if capsule.hidden:
                self._write_hidden(capsule, image, pool)
                return
            try:
                self.tier.put(image, pool.manifest, overwrite=capsule.replaces)
            except BaseException:  # perhaps it is there and was not made durable: still ours
                with suppress(FlashrtError):
                    capsule.replaces |= any(h.id == capsule.id for h, _ in self.tier.headers())
                raise
            finally:
                self._used = None
            capsule.on_disk = capsule.replaces = True
            if capsule.pinned:
                self.tier.hold(capsule.name)

    def _write_hidden(self, capsule: Capsule, image: Image, pool: Pool) -> None:
        file = self.tier.anonymous()
        try:
            file.size = codec.write_to(file.fd, image, pool.manifest)
        except BaseException as error:
            file.close()
            if isinstance(error, OSError):
                raise storage_error(error, 'Writing a parked session into',
                                    file.directory) from error
            raise
        capsule.file, capsule.on_disk = file, True
        self.hidden_bytes += file.size

    def _make_room(self, capsule: Capsule, size: int) -> None:
        budget = self.tier.budget_bytes
        if not budget:
            return
        if size > budget:
            raise Capacity(f'capsule {capsule.name!r} would be a file of {size} bytes, more than '
                           f'the whole disk budget of {budget}; raise capsules.disk_bytes.')
        usage = self.tier.usage()
        if not capsule.hidden:
            usage.pop(capsule.name, None)
        used = sum(usage.values()) + self.hidden_bytes
        leaving = self._table.leave_disk(usage, used + size - budget)
        if leaving is None:
            raise Capacity(f'a capsule file of {size} bytes does not fit: of the disk budget of '
                           f'{budget} bytes {used} are in use by capsules that are pinned or of '
                           'others and by parked sessions; drop, unpin or close some, or raise '
                           'capsules.disk_bytes.')
        for other in leaving:
            self.lost += not other.in_memory
            self.remove(other)

    def write_later(self, capsule: Capsule, pool: Pool, frozen: Frozen) -> None:
        """Queue a write; :meth:`flush` waits and reports."""
        pool.hold(frozen)  # the bytes stay until they are written
        saved = self._lane.mark()

        def work() -> None:
            try:
                with self._lane.copying(after=saved):
                    self.write(capsule, pool, frozen)
            except BaseException as error:
                with self._lock:
                    self._failures.append(error)
                capsule.warnings.append(str(error))
                raise
            finally:
                pool.release(frozen)
        with self._lock:
            self._writes = [(name, w) for name, w in self._writes if not w.done()]
            self._writes.append((capsule.name, self._writer.submit(work)))

    def wait(self, name: str) -> None:
        """Wait for the writes of one name: a later one must not be overtaken."""
        with self._lock:
            pending = [write for other, write in self._writes if other == name]
        for write in pending:
            write.exception()

    def flush(self, timeout: float | None = None) -> None:
        """
        Wait for all queued writes.

        :param timeout: seconds; 0 only looks, None waits for ever.
        :raises Storage: the first failure since the last flush.
        :raises DeadlineExceeded: some are still going; they stay queued.
        """
        with self._lock:
            pending = [write for _, write in self._writes]
        going = wait(pending, timeout).not_done
        with self._lock:
            self._writes = [(name, w) for name, w in self._writes if not w.done()]
            failures, self._failures = self._failures, []
        if failures:
            raise failures[0]
        if going:
            raise DeadlineExceeded(f'{len(going)} capsules are still being written; wait longer.')

    def remove(self, capsule: Capsule) -> None:
        """Delete a capsule's file; one that is gone already is as good."""
        if capsule.hidden:
            if capsule.file is not None:
                self.hidden_bytes -= capsule.file.size
                capsule.file.close()
            capsule.file, capsule.on_disk = None, False
            return
        self.tier.let_go(capsule.name)
        with suppress(UnknownCapsule):
            self.tier.remove(capsule.name)
        capsule.on_disk = False
        self._used = None

    def close(self) -> None:
        """Finish all writes and stop."""
        self._writer.shutdown(wait=True)
        self.tier.let_go()


def image_of(capsule: Capsule, pool: Pool, frozen: Frozen, fingerprint: Fingerprint) -> Image:
    """Describe a frozen boundary as a file; the rows are views of the pool."""
    header = Header(
        id=capsule.id, name=capsule.name, position=frozen.position,
        manifest=pool.manifest.describe(), fingerprint=fingerprint.to_json(),
        host=capsule.host.to_json(), parent_id=capsule.parent_id, session=capsule.session,
        created=capsule.created, note=capsule.note, aligned=capsule.aligned)
    rows: dict[str, torch.Tensor | Sequence[torch.Tensor]] = {}
    for buffer in pool.manifest.rows:
        view = pool.rows.view(buffer.name)
        rows[buffer.name] = [view[place:place + count] for _, place, count in
                             runs(frozen.pages, 0, frozen.position)]
    return Image(header, pool.blocks[frozen.block].cpu(), rows)
