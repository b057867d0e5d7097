"""
What `verify` checks on a CUDA device fails when the mechanism is broken there.

Graphs, a stream, kernels that write through bare addresses; test_planted_faults.py has the rest.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from fault_cases import (
    address_moves,
    cancel_unheard,
    child_cannot_start,
    counter_not_restored,
    file_lacks_recurrent,
    HOLDER,
    labels,
    nothing_kept_for_an_abort,
    OUTSIDE,
    page_written_in_place,
    pages_leak,
    restore_without,
    writes_unannounced,
)
import pytest
import torch

from flashrt_ros.arena import Role
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.cli import checks
from flashrt_ros.cuda import available
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
    def plant(monkeypatch, engine):
        whole = engine.plan._go

        def go(name):
            whole(name)
            work(engine)
        monkeypatch.setattr(engine.plan, '_go', go)
    plant.__qualname__ = f'around_replay_{work.__name__}'
    return plant


def changes_a_weight_there(engine):
    next(iter(engine.model.weights()))[1].view(-1)[0].mul_(1.5)


def writes_a_free_page(engine):
    engine.lineage.pool.rows.planes[0][0, -1] += 1


def keeps_device_memory(engine):
    HOLDER.cache = [HOLDER.cache, torch.zeros(4, device='cuda')]


def writes_host_memory(engine):
    OUTSIDE.numpy()[0] += 1


def launches_lack_a_kernel(monkeypatch, engine):
    """The launches that were captured are not those that are launched."""
    monkeypatch.setitem(engine.plan._runs, 'fold', lambda: None)


def capture_writes(monkeypatch, engine):
    """Building a plan leaves a trace in the state."""
    plan = type(engine.plan)
    whole = plan._capture

    def capture(self):
        whole(self)
        self.arena['logits'].view(torch.uint8)[5] ^= 1
    monkeypatch.setattr(plan, '_capture', capture)


def graphs_are_added(monkeypatch, engine):
    """A restore makes a graph."""
    whole = Lineage.restore

    def restore(self, frozen):
        engine.plan.graphs[len(engine.plan.graphs)] = object()
        return whole(self, frozen)
    monkeypatch.setattr(Lineage, 'restore', restore)


def device_memory_leaks(monkeypatch, engine):
    """A restore keeps device memory for ever."""
    whole, kept = Lineage.restore, []

    def restore(self, frozen):
        kept.append(torch.zeros(1, device='cuda'))
        return whole(self, frozen)
    monkeypatch.setattr(Lineage, 'restore', restore)


def save_on_another_stream(monkeypatch, engine):
    """A save does not wait for what was queued before it."""
    whole, other = Lineage.save, torch.cuda.Stream()

    def save(self):
        with torch.cuda.stream(other):
            return whole(self)
    monkeypatch.setattr(Lineage, 'save', save)


def save_waits(monkeypatch, engine):
    """A save waits for the device."""
    whole = Lineage.save

    def save(self):
        torch.cuda.synchronize()
        return whole(self)
    monkeypatch.setattr(Lineage, 'save', save)


def lost_device_goes_on(monkeypatch, engine):
    """A device that failed is used as if nothing had been."""
    whole = type(engine.plan)._lost

    def lost(self, error):
        fault = whole(self, error)
        self.arena.valid = True
        return fault
    monkeypatch.setattr(type(engine.plan), '_lost', lost)


DEVICE_FAULTS = [
    ('closed_manifest', around_replay(changes_a_weight_there)),
    ('closed_manifest', around_replay(writes_a_free_page)),
    ('closed_manifest', around_replay(keeps_device_memory)),
    ('closed_manifest', around_replay(writes_host_memory)),
    ('abort_untouched', nothing_kept_for_an_abort), ('abort_untouched', cancel_unheard),
    ('abort_untouched', lost_device_goes_on),
    ('graph_equals_eager', launches_lack_a_kernel),
    ('capture_side_effect_free', capture_writes),
    ('stable_addresses', address_moves), ('stable_addresses', graphs_are_added),
    ('stable_addresses', device_memory_leaks),
    ('stream_ordered_save', save_on_another_stream), ('stream_ordered_save', save_waits),
    ('steady_memory', device_memory_leaks), ('steady_memory', pages_leak),
    ('byte_exact', restore_without(Role.RECURRENT)), ('byte_exact', restore_without(Role.CONV)),
    ('token_exact', writes_unannounced), ('sampled_exact', counter_not_restored),
    ('rollback', writes_unannounced), ('immutable', page_written_in_place),
    ('new_process_restore', file_lacks_recurrent), ('new_process_restore', child_cannot_start),
    ('ablation_no_conv', restore_without(Role.CONV)),
    ('non_lm_program', restore_without(Role.RECURRENT)),
]


@needs_device
@pytest.mark.parametrize(('name', 'plant'), DEVICE_FAULTS, ids=labels(DEVICE_FAULTS))
def test_a_fault_planted_on_a_device_is_caught(device_bench, monkeypatch, name, plant):
    plant(monkeypatch, device_bench.engine)
    check = checks.run_one(name, device_bench.engine, device_bench.sizes)
    assert not check.passed, check


def test_every_check_of_a_device_has_a_planted_fault():
    assert {name for name, _ in DEVICE_FAULTS} >= set(checks.CUDA_CHECKS)
