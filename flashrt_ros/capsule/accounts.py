"""
Who holds what: the sums that are told, and the audit that they are held against.

Shared pages count once. All sums come from the reference counts of the pools; :func:`audit` counts
the references again, holder by holder, and compares.
"""

from __future__ import annotations

from collections.abc import Iterable
import os
from typing import Any

import numpy as np

from flashrt_ros.capsule.pool import Frozen, Ids, PAGE, Pool
from flashrt_ros.capsule.store import Store
from flashrt_ros.errors import Internal


def union_bytes(pool: Pool, frozen: Iterable[Frozen]) -> int:
    """Bytes of some boundaries in a pool, what they share counted once."""
    blocks: set[int] = set()
    pages: set[int] = set()
    for one in frozen:
        blocks.add(one.block)
        pages.update(one.pages.tolist())
    return (len(blocks) * pool.manifest.fixed_bytes
            + len(pages) * PAGE * pool.manifest.row_bytes)


def facts(store: Store) -> dict[str, Any]:
    """
    Return the state of all tiers, JSON-able; sizes in bytes, budgets as configured.

    ``*_used_bytes`` is all that is held, ``*_capsule_bytes`` what capsules hold of it.
    """
    pool, host = store.pool, store.host
    capsules = store.capsules()
    blocks, pages = pool.free()
    result: dict[str, Any] = {
        'capsules': len(capsules), 'pool_bytes': pool.nbytes, 'pool_used_bytes': pool.used_bytes,
        'pool_capsule_bytes': union_bytes(pool, (c.frozen for c in capsules if c.frozen)),
        'pool_free_blocks': blocks, 'pool_free_pages': pages,
        'host_bytes': host.nbytes if host else 0, 'host_used_bytes': host.used_bytes if host else 0,
        'disk_budget_bytes': store.disk.budget_bytes if store.disk else 0,
        'disk_used_bytes': store.files.used_bytes() if store.files else 0,
        'disk_evictions': store.files.lost if store.files else 0}
    return result


def fragmentation(store: Store) -> dict[str, float]:
    """
    Return how scattered the pool is.

    ``runs_a_capsule`` is the mean number of contiguous runs a capsule's pages lie in (1 is best:
    that many copies a restore takes where there is no gather kernel); ``free_runs`` counts the
    gaps, ``largest_free`` is the longest one as a share of all free pages.
    """
    free = store.pool.page_ids.free_runs()
    counts = [1 + int(np.count_nonzero(np.diff(c.frozen.pages) != 1))
              for c in store.capsules() if c.frozen is not None and len(c.frozen.pages)]
    return {'runs_a_capsule': sum(counts) / len(counts) if counts else 0.0,
            'free_runs': len(free), 'largest_free': max(free) / sum(free) if free else 1.0}


def audit(store: Store, others: Iterable[Frozen], blocks: Iterable[int]) -> None:
    """
    Count all references again; no write may be under way.

    :param others: boundaries that are held by others than capsules and parked sessions.
    :param blocks: blocks that are held alone (light boundaries).
    :raises Internal: for the first difference.
    """
    pool = store.pool
    held = [*store.capsules(), *store.parked()]
    device = [c.frozen for c in held if c.frozen is not None]
    _check('device', pool, [*device, *others], blocks, store.lineage.trail)
    if store.host is not None:
        abroad = store.lineage.abroad
        _check('host', store.host, [c.on_host for c in held if c.on_host], (),
               abroad[1] if abroad else ())
    if store.files is not None:
        usage = store.files.tier.usage()
        missing = [c.name for c in store.capsules() if c.on_disk and c.name not in usage]
        if missing:
            raise Internal(f'capsules {missing} are said to be on disk and are not.')
        hidden = [os.fstat(c.file.fd).st_size for c in store.parked() if c.file is not None]
        total = sum(usage.values()) + sum(hidden)
        if store.files.used_bytes() != total:
            raise Internal('the bytes on disk are not those that are told.')
        budget = store.files.tier.budget_bytes
        if budget and total > budget:
            raise Internal(f'{total} bytes on disk exceed the budget of {budget}.')


def _check(what: str, pool: Pool, frozen: Iterable[Frozen], blocks: Iterable[int],
           pages: Any) -> None:
    wanted = {'blocks': np.zeros_like(pool.block_ids.references),
              'pages': np.zeros_like(pool.page_ids.references)}
    for one in frozen:
        wanted['blocks'][one.block] += 1
        wanted['pages'][one.pages] += 1
    for block in blocks:
        wanted['blocks'][block] += 1
    for page in pages:
        wanted['pages'][page] += 1
    ids: Ids
    for kind, ids in (('blocks', pool.block_ids), ('pages', pool.page_ids)):
        odd = np.flatnonzero(ids.references != wanted[kind])
        if len(odd):
            raise Internal(f'{what} {kind} {odd[:8].tolist()} have '
                           f'{ids.references[odd[:8]].tolist()} references and '
                           f'{wanted[kind][odd[:8]].tolist()} holders.')
        free = int(np.count_nonzero(ids.references == 0))
        if free != ids.available or free != sum(ids.free_runs()):
            raise Internal(f'{what} {kind}: {free} are free, the allocator says {ids.available}.')
        held = ids.uids[ids.references > 0]
        if len(np.unique(held)) != len(held):
            raise Internal(f'{what} {kind}: one uid stands for two places.')
