"""
Reading a payload once: into place, hashed while it is still in the cache.

The place may lie scattered (the pages of a pool), so that a capsule needs no second copy. Regions
are independent, so each core reads and hashes regions of its own: hashing costs several times what
reading from the page cache does, and a disk is quicker when it is asked for several things at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
import os

from blake3 import blake3

from flashrt_ros.capsule import faults
from flashrt_ros.capsule.wire import Region
from flashrt_ros.errors import Corrupt

BLOCK = 1 << 20  # bytes read and hashed at a time: large enough to stream, small enough to cache
WIDE = 8 << 20  # bytes at a time where several threads hash one region
WORKERS = 16  # threads at most; memory is the limit well before
_VIEWS = 256  # memory views a system call takes, well below the limit of the kernel

@lru_cache(maxsize=1)
def _readers() -> ThreadPoolExecutor:
    """Return the threads that read, started once: starting them takes longer than small files."""
    return ThreadPoolExecutor(_cores(), thread_name_prefix='flashrt-read')


os.register_at_fork(after_in_child=_readers.cache_clear)  # a fork has none of its parent's threads


def _cores() -> int:
    return min(len(os.sched_getaffinity(0)), WORKERS)


Target = Callable[[Region], Iterable[memoryview] | None]


def read_payload(fd: int, regions: Sequence[Region], digests: dict[str, str], target: Target,
                 ready: Callable[[Region], None] | None = None) -> None:
    """
    Read the regions, from where the file stands, into ``target(region)`` or, for None, nowhere.

    :param ready: called by this thread, in the order of the file, with each region whose digest
        holds; others may be under way.
    :raises Corrupt: for the first region whose digest does not match, or an early end.
    """
    offset, jobs = os.lseek(fd, 0, os.SEEK_CUR), []
    for region in regions:
        jobs.append((region, offset, target(region)))
        offset += region.nbytes
    total = sum(region.nbytes for region in regions)
    workers = _cores()
    large = sum(region.nbytes * workers > total for region in regions)

    def work(region: Region, start: int, place: Iterable[memoryview] | None) -> str:
        # One region alone cannot keep all cores busy; then several threads hash it.
        alone = region.nbytes * workers > total and large < workers
        block = WIDE if alone else BLOCK
        digest = blake3(max_threads=blake3.AUTO if alone else 1)
        for views in _batches(_nowhere(region, block) if place is None else place, block):
            start = _fill(fd, views, start)
            for view in views:
                digest.update(view)
        return digest.hexdigest()

    def check(region: Region, found: str) -> None:
        if found != digests[region.name]:
            raise Corrupt(f'Region {region.name!r} of the capsule file was altered: its digest '
                          'does not match.')
        if ready is not None:
            ready(region)

    if total <= BLOCK or workers == 1:
        for region, start, place in jobs:
            check(region, work(region, start, place))
        return
    results = [_readers().submit(work, *job) for job in jobs]
    try:
        for (region, _, _), result in zip(jobs, results, strict=True):
            check(region, result.result())
    finally:
        for result in results:
            result.cancel()
        wait(results)  # whoever gave the memory gets it back when nobody writes into it any more


def _nowhere(region: Region, block: int) -> Iterator[memoryview]:
    """Yield the same memory again and again, as much as the region has bytes."""
    scratch = memoryview(bytearray(min(block, region.nbytes)))
    for done in range(0, region.nbytes, block):
        yield scratch[:region.nbytes - done]


def _batches(place: Iterable[memoryview], block: int) -> Iterator[list[memoryview]]:
    """Group views, cut where they are larger, into reads of about a block."""
    batch: list[memoryview] = []
    size = 0
    for whole in place:
        for start in range(0, len(whole), block):
            view = whole[start:start + block]
            if batch and (size + len(view) > block or len(batch) == _VIEWS):
                yield batch
                batch, size = [], 0
            batch.append(view)
            size += len(view)
    if batch:
        yield batch


def _fill(fd: int, views: list[memoryview], offset: int) -> int:
    """Fill the views from an offset of the file, return the next; Corrupt at an early end."""
    rest = list(views)
    while rest:
        faults.point('codec.read')
        count = os.preadv(fd, rest, offset)
        if count == 0:
            raise Corrupt('The capsule file became shorter while it was read; read it again.')
        offset += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]
    return offset
