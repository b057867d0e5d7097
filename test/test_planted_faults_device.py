"""
What `verify` checks on a CUDA device fails when the mechanism is broken there.

Graphs, a stream, kernels that write through bare addresses; test_planted_faults.py has the rest.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from fault_cases import (
    counter_not_restored,
    folds_unannounced,
    HOLDER,
    host_part_not_restored,
    named,
    OUTSIDE,
    page_written_in_place,
    restore_without,
    writes_unannounced,
)
from fault_cases_verbs import (
    address_moves,
    cancel_unheard,
    child_cannot_start,
    file_lacks_recurrent,
    nothing_kept_for_an_abort,
    pages_leak,
)
from planting import assert_caught, Fault, Plant
import pytest
import torch

from flashrt_ros.arena import Role
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.cli import checks
from flashrt_ros.cuda import available
from flashrt_ros.cuda.plan import CudaGraphPlan
from flashrt_ros.engine import Engine, EngineConfig

MODEL = 'random:tiny'
needs_device = pytest.mark.skipif(bool(available.why_not()),
                                  reason=f'no CUDA plan here: {available.why_not()}')


@pytest.fixture
def device_bench(tmp_path):
    """As ``bench``, on the device, with the grid as it is: the graphs are made for it."""
    engine = Engine(EngineConfig(model=MODEL, context=1280, pool_bytes=32 << 20, device='cuda',
                                 dtype='bfloat16', directory=str(tmp_path), threads=1))
    sizes = checks.Sizes(model=MODEL, dtype='bfloat16', context=1280, directory=Path(tmp_path),
                         prompt=600, steps=8, cycles=60, seconds=20.0, operations=60)
    yield SimpleNamespace(engine=engine, sizes=sizes)
    engine.close()


@needs_device
@pytest.mark.parametrize('name', list(checks.ALL))
def test_passes_on_a_device_without_a_fault(device_bench, name):
    check = checks.run_one(name, device_bench.engine, device_bench.sizes)
    assert check.passed, check
    assert check.applicable and check.figure is not None and check.unit


def around_replay(work):
    """Return a fault: something more happens with every replay of a graph."""
    def fault(plant):
        @plant.around(CudaGraphPlan, '_go')
        def go(whole, self, name):
            whole(self, name)
            work(plant.engine)
    return named(work.__name__, fault)


def changes_a_weight_there(engine):
    next(iter(engine.model.weights()))[1].view(-1)[0].mul_(1.5)


def writes_a_free_page(engine):
    engine.lineage.pool.rows.planes[0][0, -1] += 1


def keeps_device_memory(engine):
    HOLDER.cache = [HOLDER.cache, torch.zeros(4, device='cuda')]


def writes_host_memory(engine):
    OUTSIDE.numpy()[0] += 1


def launches_lack_a_kernel(plant):
    """What is launched is not what was captured: the fold of one token does nothing."""
    @plant.around(CudaGraphPlan, '_go')
    def go(whole, self, name):
        if not (self.eager and name == 'fold'):
            whole(self, name)


def capture_writes(plant):
    """Building a plan leaves a trace in the state."""
    @plant.around(CudaGraphPlan, '_capture')
    def capture(whole, self):
        whole(self)
        self.arena['logits'].view(torch.uint8)[5] ^= 1


def graphs_are_added(plant):
    """A restore makes a graph."""
    @plant.around(Lineage, 'restore')
    def restore(whole, self, *rest, **named):
        graphs = plant.engine.plan.graphs
        graphs[len(graphs)] = object()
        return whole(self, *rest, **named)


def device_memory_leaks(plant):
    """A restore keeps device memory for ever."""
    kept = []

    @plant.around(Lineage, 'restore')
    def restore(whole, self, *rest, **named):
        kept.append(torch.zeros(1, device='cuda'))
        return whole(self, *rest, **named)


def save_on_another_stream(plant):
    """A save does not wait for what was queued before it."""
    others = []

    @plant.around(Lineage, 'save')
    def save(whole, self):
        if not others:
            others.append(torch.cuda.Stream())
        with torch.cuda.stream(others[0]):
            return whole(self)


def save_waits(plant):
    """A save waits for the device."""
    @plant.around(Lineage, 'save')
    def save(whole, self):
        torch.cuda.synchronize()
        return whole(self)


def lost_device_goes_on(plant):
    """A device that failed is used as if nothing had been."""
    @plant.around(CudaGraphPlan, '_lost')
    def lost(whole, self, error):
        fault = whole(self, error)
        self.arena.valid = True
        return fault


#: what the checks of a device say that failed by what they are about
AHEAD = '; the host had queued all of it before the first ended [0-2] of 3 times'
DEVICE_FAULTS = [
    Fault('closed_manifest', around_replay(changes_a_weight_there)),
    Fault('closed_manifest', around_replay(writes_a_free_page)),
    Fault('closed_manifest', around_replay(keeps_device_memory)),
    Fault('closed_manifest', around_replay(writes_host_memory)),
    Fault('abort_untouched', nothing_kept_for_an_abort),
    Fault('abort_untouched', cancel_unheard, ' and 1 cancels '),  # that of an answer
    Fault('abort_untouched', lost_device_goes_on),
    Fault('graph_equals_eager', launches_lack_a_kernel, r'^[1-9]\d* bytes that differ'),
    Fault('capture_side_effect_free', capture_writes, r'^[1-9]\d* bytes that changed'),
    Fault('stable_addresses', address_moves, r': [1-9]\d* of \d+ addresses moved'),
    Fault('stable_addresses', graphs_are_added, r'; (\d+) graphs before and (?!\1 )\d+ after'),
    Fault('stable_addresses', device_memory_leaks, r'; \+[1-9]\d* bytes allocated'),
    Fault('stream_ordered_save', save_on_another_stream, r'^[1-9]\d* bytes that differ'),
    Fault('stream_ordered_save', save_waits, AHEAD),
    Fault('steady_memory', device_memory_leaks,
          r'; [1-9]\d* bytes more are allocated on the device'),
    Fault('steady_memory', pages_leak, r'; 0 blocks and [1-9]\d* pages were not given back'),
    Fault('byte_exact', restore_without(Role.RECURRENT)),
    Fault('byte_exact', restore_without(Role.CONV)),
    Fault('byte_exact', host_part_not_restored, '; 0 of 2 host parts'),
    Fault('token_exact', writes_unannounced), Fault('token_exact', folds_unannounced),
    Fault('sampled_exact', counter_not_restored),
    Fault('rollback', writes_unannounced), Fault('immutable', page_written_in_place),
    Fault('new_process_restore', file_lacks_recurrent),
    Fault('new_process_restore', child_cannot_start,
          ended='^the new process ended with exit code 1 '),
    Fault('ablation_no_conv', restore_without(Role.CONV)),
    Fault('non_lm_program', restore_without(Role.RECURRENT)),
]


@needs_device
@pytest.mark.parametrize('fault', DEVICE_FAULTS, ids=lambda fault: fault.label)
def test_a_fault_planted_on_a_device_is_caught(device_bench, monkeypatch, fault):
    plant = Plant(monkeypatch, device_bench.engine)
    fault.plant(plant)
    check = checks.run_one(fault.check, device_bench.engine, device_bench.sizes)
    monkeypatch.undo()
    assert_caught(fault, plant, check)


@pytest.mark.parametrize('fault', DEVICE_FAULTS, ids=lambda fault: fault.label)
def test_what_is_planted_on_a_device_fits_the_present_code(monkeypatch, fault):
    # Without a device too, where most changes of a signature are made.
    plan = CudaGraphPlan.__new__(CudaGraphPlan)
    plant = Plant(monkeypatch, SimpleNamespace(plan=plan))
    fault.plant(plant)
    assert plant.calls and not any(plant.calls.values())


def test_every_check_of_a_device_has_a_planted_fault():
    assert {fault.check for fault in DEVICE_FAULTS} >= set(checks.CUDA_CHECKS)
