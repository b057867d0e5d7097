"""Clients that call without pause keep no goal from its turn, nor from its tokens."""

import threading
import time

from engine_cases import build, ids
import pytest

from flashrt_ros.engine import Control, GenerateRequest

WAIT = 60.0  # seconds; a bound for a slow machine, not an expectation


@pytest.fixture
def engine():
    engine = build(context=4096)
    engine.append(token_ids=ids(50))
    yield engine
    engine.close()


@pytest.fixture
def hammer(worker):
    """Keep calls waiting all the time, until told to stop."""
    stop = threading.Event()

    def call(engine):
        time.sleep(1e-3)
        if not stop.is_set():
            worker.call(call, at_boundary=True, session=None)

    def start():
        for _ in range(4):
            worker.call(call, at_boundary=True, session=None)
    yield start
    stop.set()


def test_a_goal_gets_its_turn_and_its_tokens(worker, hammer):
    hammer()
    answer = worker.generate(GenerateRequest(max_tokens=20)).result(WAIT)
    assert answer.completion_tokens > 0


def test_a_boundary_is_there_for_who_needs_it(worker, hammer):
    started, control = threading.Event(), Control()
    future = worker.generate(GenerateRequest(max_tokens=4000), lambda piece: started.set(), control)
    assert started.wait(WAIT)
    hammer()
    for _ in range(5):
        worker.call(lambda engine: engine.save(name='now', overwrite=True), at_boundary=True,
                    session='default').result(WAIT)
    assert not future.done()
    control.cancel()
    future.result(WAIT)
