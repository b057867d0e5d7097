"""
Each check of `verify` is shown to fail when the mechanism it watches is broken.

A fault is planted by replacing one function of the package for the length of a test. The engine is
tiny, its grid is 64, and every test has its own, because a planted fault may ruin it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from fault_cases import FAULTS, labels
import pytest

from flashrt_ros.cli import checks
from flashrt_ros.engine import Engine, EngineConfig

MODEL = 'random:tiny'


@pytest.fixture
def bench(tmp_path):
    """Return an engine and sizes that make every check take a second or less."""
    engine = Engine(EngineConfig(model=MODEL, device='cpu', context=512, pool_bytes=8 << 20,
                                 directory=str(tmp_path), threads=1))
    engine.plan.grid = 64
    sizes = checks.Sizes(model=MODEL, dtype='auto', context=512, directory=Path(tmp_path),
                         prompt=90, steps=8, cycles=60, seconds=20.0, operations=100)
    yield SimpleNamespace(engine=engine, sizes=sizes)
    engine.close()


@pytest.mark.parametrize('name', list(checks.CHECKS))
def test_passes_without_a_fault(bench, name):
    check = checks.run_one(name, bench.engine, bench.sizes)
    assert check.passed, check
    assert check.applicable and check.figure is not None and check.unit


@pytest.mark.parametrize(('name', 'plant'), FAULTS, ids=labels(FAULTS))
def test_a_planted_fault_is_caught(bench, monkeypatch, name, plant):
    plant(monkeypatch, bench.engine)
    check = checks.run_one(name, bench.engine, bench.sizes)
    assert not check.passed, check


def test_every_check_has_a_planted_fault():
    assert {name for name, _ in FAULTS} == set(checks.CHECKS)
