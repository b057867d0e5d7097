"""
Each check of `verify` is shown to fail when the mechanism it watches is broken.

A fault is planted by replacing one function of the package for the length of a test. The engine is
tiny, its grid is 64, and every test has its own, because a planted fault may ruin it.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

from fault_cases import FAULTS
from planting import assert_caught, Fault, Plant, unfit
import pytest

from flashrt_ros.assembly import build_plan
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.cli import checks
from flashrt_ros.engine import Engine, EngineConfig
from flashrt_ros.session import Session

MODEL, GRID = 'random:tiny', 64


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Return an engine and sizes that make every check take a second or less."""
    engine = Engine(EngineConfig(model=MODEL, device='cpu', context=512, pool_bytes=8 << 20,
                                 directory=str(tmp_path), threads=1))
    engine.plan.grid = GRID

    def small_plan(*rest):  # a rebuild of an aligned save makes its own
        plan = build_plan(*rest)
        plan.grid = GRID
        return plan
    monkeypatch.setattr('flashrt_ros.engine.build_plan', small_plan)
    sizes = checks.Sizes(model=MODEL, dtype='auto', context=512, directory=Path(tmp_path),
                         prompt=90, steps=8, cycles=60, seconds=20.0, operations=100)
    yield SimpleNamespace(engine=engine, sizes=sizes)
    engine.close()


@pytest.mark.parametrize('name', list(checks.CHECKS))
def test_passes_without_a_fault(bench, name):
    check = checks.run_one(name, bench.engine, bench.sizes)
    assert check.passed, check
    assert check.applicable and check.figure is not None and check.unit


@pytest.mark.parametrize('fault', FAULTS, ids=lambda fault: fault.label)
def test_a_planted_fault_is_caught(bench, monkeypatch, fault):
    plant = Plant(monkeypatch, bench.engine)
    fault.plant(plant)
    check = checks.run_one(fault.check, bench.engine, bench.sizes)
    monkeypatch.undo()
    assert_caught(fault, plant, check)


def test_every_check_has_a_planted_fault_and_none_is_planted_twice():
    assert {fault.check for fault in FAULTS} == set(checks.CHECKS)
    labels = [fault.label for fault in FAULTS]
    assert len(set(labels)) == len(labels)


# -- the harness itself: none of these may count as caught ----------------------------------------


def outdated(plant):
    @plant.around(Lineage, 'restore')
    def restore(whole, self, frozen):
        return whole(self, frozen)


def of_another_default(plant):
    @plant.around(Session, 'append')
    def append(whole, self, ids, turn, role='user', control=None, aside=None):
        return whole(self, ids, turn, role, control, aside)


@pytest.mark.parametrize('plant_it', [outdated, of_another_default])
def test_a_plant_must_take_what_the_original_takes(monkeypatch, plant_it):
    before = Lineage.restore, Session.append
    with pytest.raises(TypeError, match='planted in place of'):
        plant_it(Plant(monkeypatch, None))
    assert before == (Lineage.restore, Session.append)


def breaks_itself(plant):
    @plant.around(Lineage, 'restore')
    def restore(whole, self, *rest, **named):
        return self.no_such_thing


def calls_the_original_wrongly(plant):
    @plant.around(Lineage, 'restore')
    def restore(whole, self, *rest, **named):
        return whole(self, *rest, nonsense=1, **named)


def is_never_called(plant):
    @plant.around(Session, 'changed')
    def changed(whole, self):
        raise AssertionError


def makes_others_fail(plant):
    @plant.around(Lineage, 'save')
    def save(whole, self):
        whole(self)
        return None, 0


def is_harmless(plant):
    @plant.around(Lineage, 'restore')
    def restore(whole, self, *rest, **named):
        return whole(self, *rest, **named)


@pytest.mark.parametrize(('plant_it', 'why'), [
    (breaks_itself, 'plant itself failed.*no_such_thing'),
    (calls_the_original_wrongly, 'plant itself failed.*nonsense'),
    (is_never_called, 'not all was planted'),
    (makes_others_fail, 'byte_exact found nothing: AttributeError'),
    (is_harmless, 'passed=True')])
def test_a_check_that_fails_for_another_reason_has_not_caught_a_fault(
        bench, monkeypatch, plant_it, why):
    fault, plant = Fault('byte_exact', plant_it), Plant(monkeypatch, bench.engine)
    plant_it(plant)
    check = checks.run_one('byte_exact', bench.engine, bench.sizes)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match=why):
        assert_caught(fault, plant, check)


def test_forms_that_fit_and_forms_that_do_not():
    def original(a, b=1, *, c=2):
        """Stand for a function of the package."""

    form = inspect.signature(original)
    for fits in (lambda whole, a, b=1, *, c=2: 0, lambda whole, a, *rest, **named: 0,
                 lambda whole, *rest, **named: 0, lambda whole, a, b=1, *rest, **named: 0):
        assert not unfit(form, inspect.signature(fits))
    for wrong in (lambda whole, a, b=1: 0, lambda whole, a, *rest: 0, lambda whole, x, *r, **n: 0,
                  lambda whole, a, b=2, *, c=2: 0, lambda whole, a, b=1, c=2: 0,
                  lambda whole, a, b=1, *, c=2, d=3: 0):
        assert unfit(form, inspect.signature(wrong))
