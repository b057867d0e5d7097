"""
Reading a payload once: into place, hashed while it is still in the cache.

The place may lie scattered (the pages of a pool), so that a capsule needs no second copy. Large
payloads are hashed by another thread while the next block is read; both leave the interpreter free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
import os

from blake3 import blake3

from flashrt_ros.capsule import faults
from flashrt_ros.capsule.wire import Region
from flashrt_ros.errors import Corrupt

BLOCK = 1 << 20  # bytes read and hashed at a time: large enough to stream, small enough to cache
PARALLEL = 1 << 20  # bytes of a region from which several threads hash it
_VIEWS = 256  # memory views a system call takes, well below the limit of the kernel


def read_payload(fd: int, regions: Sequence[Region], digests: dict[str, str],
                 target: Callable[[Region], Iterable[memoryview] | None]) -> None:
    """
    Read the regions into ``target(region)`` or, for None, nowhere.

    :raises Corrupt: for the first region whose digest does not match, or an early end.
    """
    scratch = memoryview(bytearray(0))
    large = sum(region.nbytes for region in regions) > BLOCK
    with ThreadPoolExecutor(1) if large else nullcontext() as hasher:
        found: list[tuple[Region, blake3, list[Future]]] = []
        for region in regions:
            digest = blake3(max_threads=blake3.AUTO if region.nbytes >= PARALLEL else 1)
            pending: list[Future] = []
            place = target(region)
            if place is None:
                if len(scratch) < min(BLOCK, region.nbytes):
                    scratch = memoryview(bytearray(min(BLOCK, region.nbytes)))
                for done in range(0, region.nbytes, BLOCK):
                    view = scratch[:min(BLOCK, region.nbytes - done)]
                    _fill(fd, [view])
                    digest.update(view)
            else:
                for views in _batches(place):
                    _fill(fd, views)
                    if hasher is None:
                        _hash(digest, views)
                    else:
                        pending.append(hasher.submit(_hash, digest, views))
            found.append((region, digest, pending))
        for region, digest, pending in found:
            for future in pending:
                future.result()
            if digest.hexdigest() != digests[region.name]:
                raise Corrupt(f'Region {region.name!r} of the capsule file was altered: its '
                              'digest does not match.')


def _hash(digest: blake3, views: list[memoryview]) -> None:
    for view in views:
        digest.update(view)


def _batches(place: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Group views, cut where they are larger, into reads of about a block."""
    batch: list[memoryview] = []
    size = 0
    for whole in place:
        for start in range(0, len(whole), BLOCK):
            view = whole[start:start + BLOCK]
            if batch and (size + len(view) > BLOCK or len(batch) == _VIEWS):
                yield batch
                batch, size = [], 0
            batch.append(view)
            size += len(view)
    if batch:
        yield batch


def _fill(fd: int, views: list[memoryview]) -> None:
    """Fill the views from the file; raises Corrupt at an early end."""
    rest = list(views)
    while rest:
        faults.point('codec.read')
        count = os.readv(fd, rest)
        if count == 0:
            raise Corrupt('The capsule file became shorter while it was read; read it again.')
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]
