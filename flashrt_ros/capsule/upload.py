"""
From a file into the pool of the device: one read, checked while it is under way.

What the pool holds of the boundary already is read and hashed, and put nowhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from flashrt_ros.capsule import codec, faults
from flashrt_ros.capsule.capsule import Capsule
from flashrt_ros.capsule.codec import Header, Image, Pieces
from flashrt_ros.capsule.fingerprint import Fingerprint
from flashrt_ros.capsule.lane import Lane, Staging
from flashrt_ros.capsule.pool import Frozen, PAGE, pages_for, Pool
from flashrt_ros.capsule.tiers import Tier
from flashrt_ros.capsule.transfer import Place, spans, Take
from flashrt_ros.errors import Corrupt, UnknownCapsule


class Replaced(Corrupt):
    """The file that has the name of a capsule is another one by now."""


class Upload:
    """
    The way from files to a pool.

    :param capacity: rows of the arena; a capsule with more is refused.
    :param lane: that the copies to a device are queued in.
    """

    def __init__(self, pool: Pool, capacity: int, disk: Tier | None, lane: Lane) -> None:
        self._pool = pool
        self._capacity = capacity
        self._disk = disk
        self._lane = lane
        self._staging = Staging(pool.manifest.storage_bytes(capacity))
        if disk is not None and pool.blocks.is_cuda:
            self._staging.take(0)  # pinning takes long: now, and not with the first restore

    def bring_up(self, capsule: Capsule, fingerprint: Fingerprint, make_room: Take) -> Frozen:
        """
        Read a file; on a CPU straight into the pages, on a device by way of pinned memory.

        :param fingerprint: refuses what was saved by something else.
        :raises UnknownCapsule, Corrupt, Incompatible, Storage, Capacity: by what is wrong with it.
        """
        position = capsule.position
        block, pages = capsule.uids or (0, np.zeros(pages_for(position), dtype=np.int64))
        with Place(self._pool, (block, pages), make_room) as place:
            if self._pool.blocks.is_cuda:
                self._by_staging(capsule, fingerprint, place)
            else:
                image = self._read(capsule, fingerprint, into=partial(self._pieces, capsule, place))
                if place.new_block:
                    faults.point('tier.block')
                    self._pool.blocks[place.block].copy_(image.fixed)
            known = pages.copy()
            if position % PAGE:
                known[-1] = 0  # only as full as this capsule needs it: no page of that uid
            place.name(known[place.missing], block)
            return Frozen(position, place.block, place.pages)

    def _read(self, capsule: Capsule, fingerprint: Fingerprint, **where: Any) -> Image:
        if self._disk is None:
            raise UnknownCapsule(f'capsule {capsule.name!r} was dropped; save it again.')
        if capsule.file is not None:
            return codec.read(capsule.file.fd, self._pool.manifest, **where)
        image = self._disk.get(capsule.name, self._pool.manifest, fingerprint,
                              capacity=self._capacity, **where)
        _same(capsule, image.header)
        return image

    def _by_staging(self, capsule: Capsule, fingerprint: Fingerprint, place: Place) -> None:
        """Read a file into pinned memory; what is checked goes up while the rest is read."""
        wanted = np.flatnonzero(place.missing)
        places = list(spans(wanted, place.pages[place.missing]))

        def send(name: str, pieces: list[torch.Tensor]) -> None:
            faults.point('tier.rows')
            target = self._pool.rows.view(name)
            for first, second, count in places:
                rows = min(count * PAGE, capsule.position - first * PAGE)
                target[second * PAGE:second * PAGE + rows].copy_(
                    pieces[0][first * PAGE:first * PAGE + rows], non_blocking=True)
        try:
            with self._lane.copying(self._pool):
                image = self._read(capsule, fingerprint, allocate=self._staging.take,
                                   ready=send)
                if place.new_block:
                    faults.point('tier.block')
                    self._pool.blocks[place.block].copy_(image.fixed, non_blocking=True)
        finally:
            self._staging.until(self._pool.pending)
        self._pool.join()

    def _pieces(self, capsule: Capsule, place: Place, header: Header) -> Pieces:
        """Where the rows of a file go: into new pages; those of pages that are there, nowhere."""
        _same(capsule, header)
        result: Pieces = {buffer.name: [] for buffer in self._pool.manifest.rows}
        for start, count, there in place.stretches(header.position):
            for buffer in self._pool.manifest.rows:
                view = self._pool.rows.view(buffer.name)[start:start + count]
                result[buffer.name].append(torch.empty_like(view) if there else view)
        return result


def _same(capsule: Capsule, header: Header) -> None:
    if header.id != capsule.id or header.position != capsule.position:
        raise Replaced(f'the file of capsule {capsule.name!r} was replaced by another one; look '
                       'what it is now, and name it again to use that one.')
