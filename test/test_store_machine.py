"""
Random sequences of all verbs against a reference that copies everything (``naive.py``).

Hypothesis prints the shortest failing sequence. ``FLASHRT_LONG=1`` runs fifty times as many.
"""

import contextlib
import ctypes
import gc
import os
import random
import sys
from tempfile import TemporaryDirectory

from engine_cases import build
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    rule,
    RuleBasedStateMachine,
    run_state_machine_as_test,
)
from naive import Naive
import psutil
import pytest
from store_world import VERBS, World

from flashrt_ros.capsule import accounts

LONG = bool(os.environ.get('FLASHRT_LONG'))
EXAMPLES = 1000 if LONG else 20
OPERATIONS = 10_000 if LONG else 1_000
pytestmark = pytest.mark.timeout(7200 if LONG else 300)


class Verbs(RuleBasedStateMachine):
    engine = None  # one for all examples: what an example leaves behind is a failure too
    naive = None
    world = None

    @initialize(first=st.integers(1, 200))
    def begin(self, first):
        self.free = self.engine.lineage.pool.free(), self.engine.store.host.free()
        self.world = World(self.engine, self.naive)
        for verb, number in (('append', first), ('save', 0), ('generate', first)):
            self.world.do(verb, number)

    @rule(verb=st.sampled_from(VERBS), number=st.integers(0, 1 << 20))
    def verb(self, verb, number):
        self.world.do(verb, number)

    @invariant()
    def everything_adds_up(self):
        if self.world is not None:
            self.world.check()

    def teardown(self):
        if self.world is not None:
            self.world.end()
            pools = self.engine.lineage.pool.free(), self.engine.store.host.free()
            assert pools == self.free, 'not everything was given back'


def engines(pool_mib, directory):
    engine = build(context=700, pool_bytes=int(pool_mib * (1 << 20)), host_bytes=3 << 18,
                   directory=directory, ring_tokens=5)
    engine.lineage.forget()
    return engine, Naive(engine)


def resident() -> int:
    """Bytes of resident memory, without what the allocator keeps for later."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize('pool_mib', [8, 1.5])
def test_case_28_random_sequences_of_all_verbs(pool_mib):
    """8 MiB hold what an example makes; in 1.5 MiB capsules have to move between the tiers."""
    with TemporaryDirectory() as directory:
        Verbs.engine, Verbs.naive = engines(pool_mib, directory)
        try:
            run_state_machine_as_test(Verbs, settings=settings(
                max_examples=EXAMPLES, stateful_step_count=40, deadline=None, database=None,
                suppress_health_check=list(HealthCheck)))
        finally:
            Verbs.engine.close()


def test_case_30_budgets_and_memory_under_churn(tmp_path):
    """
    1,000 random operations (10,000 with ``FLASHRT_LONG=1``), checked after each.

    Byte-equal with the reference, the references counted again, no tier over its budget. Resident
    memory does not grow: the lowest of the last quarter against the lowest of the second, since
    the copies of the reference come and go.
    """
    engine, naive = engines(1.5, str(tmp_path))
    world, rng = World(engine, naive), random.Random(4)
    free = engine.lineage.pool.free(), engine.store.host.free()
    lowest, worst = [sys.maxsize] * 4, 0.0
    gc.freeze()  # else each of a hundred collections walks through all that is imported
    for step in range(OPERATIONS):
        world.do(rng.choice(VERBS), rng.randrange(1 << 20))
        world.check()
        worst = max(worst, accounts.fragmentation(engine.store)['runs_a_capsule'])
        if step % (OPERATIONS // 100) == 0:
            quarter = step * 4 // OPERATIONS
            lowest[quarter] = min(lowest[quarter], resident())
    gc.unfreeze()
    grown = lowest[3] - lowest[1]
    print(f'{OPERATIONS} operations, {world.refused} refused, resident memory '
          f'{grown / 1024:+.0f} KiB, at most {worst:.2f} runs a capsule')
    world.end()
    assert (engine.lineage.pool.free(), engine.store.host.free()) == free
    assert grown < 8 << 20
    engine.close()
