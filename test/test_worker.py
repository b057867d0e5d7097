"""The worker: one thread, order, work at boundaries, cancel, stop."""

import threading
import time

from engine_cases import build, digest, ids
import pytest

from flashrt_ros.engine import Control, FinishReason, GenerateRequest
from flashrt_ros.errors import Busy, InvalidArgument, NotActive
from flashrt_ros.worker import Worker

WAIT = 60.0  # seconds; a bound for a slow machine, not an expectation


@pytest.fixture
def engine():
    engine = build(context=4096)
    engine.append(token_ids=ids(50))
    engine.save(name='c')
    yield engine
    engine.close()


def long(**options) -> GenerateRequest:
    return GenerateRequest(max_tokens=4000, **options)


def test_calls_run_in_order_on_one_thread(worker):
    seen = []
    futures = [worker.call(lambda engine, n=n: seen.append((n, threading.current_thread().name)))
               for n in range(20)]
    for future in futures:
        future.result(WAIT)
    assert [n for n, _ in seen] == list(range(20))
    assert len({name for _, name in seen}) == 1


def test_case_33_work_at_boundaries_while_tokens_stream(worker, engine):
    started, control = threading.Event(), Control()
    future = worker.generate(long(), lambda piece: started.set(), control)
    assert started.wait(WAIT)
    assert (worker.busy, worker.current_session) == (True, 'default')
    saved = worker.call(lambda e: e.save(name='now'), at_boundary=True).result(WAIT)
    names = [i.name for i in worker.call(lambda e: e.list(), at_boundary=True).result(WAIT)]
    assert names == ['c', 'now']
    with pytest.raises(Busy):
        worker.call(lambda e: e.restore(capsule='c'), at_boundary=True).result(WAIT)
    waiting = worker.call(lambda e: e.session().position)
    assert not future.done()
    control.cancel()
    answer = future.result(WAIT)
    assert answer.finish_reason is FinishReason.CANCELED
    assert waiting.result(WAIT) == answer.position
    tokens = answer.token_ids
    worker.call(lambda e: e.restore(capsule='now')).result(WAIT)
    more = worker.generate(GenerateRequest(max_tokens=3)).result(WAIT).token_ids
    done = saved.info.tokens - 50
    assert more == tokens[done:done + 3] or len(tokens) < done + 3


def test_case_29_cancel_is_served_within_one_token(worker):
    control, pieces = Control(), []

    def listen(piece):
        pieces.append(piece)
        if len(pieces) == 5:
            control.cancel()
    answer = worker.generate(long(), listen, control).result(WAIT)
    assert len(answer.token_ids) == 5


def test_a_queued_goal_can_be_cancelled_or_forgotten(worker, engine):
    started, control, late = threading.Event(), Control(), Control()
    running = worker.generate(long(), lambda piece: started.set(), control)
    assert started.wait(WAIT)
    queued = worker.generate(GenerateRequest(max_tokens=5), control=late)
    dropped = worker.generate(GenerateRequest(max_tokens=5))
    assert worker.queue_length == 2
    late.cancel(FinishReason.PREEMPTED)
    assert dropped.cancel()
    control.cancel()
    position = running.result(WAIT).position
    answer = queued.result(WAIT)
    assert (answer.finish_reason, answer.token_ids) == (FinishReason.PREEMPTED, ())
    assert worker.call(lambda e: e.session().position).result(WAIT) == position


def test_refusals_come_through_the_future_and_the_worker_lives(worker, engine):
    before = digest(engine)
    with pytest.raises(InvalidArgument):
        worker.generate(GenerateRequest(max_tokens=-7)).result(WAIT)
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda e: 1 / 0).result(WAIT)
    assert digest(engine) == before
    assert worker.call(lambda e: 5).result(WAIT) == 5


def test_a_listener_that_raises_ends_the_answer_at_a_boundary(worker, engine):
    def listen(piece):
        raise KeyError('listener')
    with pytest.raises(KeyError):
        worker.generate(GenerateRequest(max_tokens=5), listen).result(WAIT)
    assert engine.session().position == 51
    assert engine.session().host.schedule.tokens == 51


def test_stop_ends_what_runs_and_refuses_what_waits(engine):
    worker, started = Worker(engine), threading.Event()
    worker.start()
    running = worker.generate(long(), lambda piece: started.set())
    assert started.wait(WAIT)
    waiting = worker.call(lambda e: e.list())
    assert worker.stop(WAIT)
    assert running.result(0).finish_reason is FinishReason.CANCELED
    with pytest.raises(NotActive):
        waiting.result(0)
    with pytest.raises(NotActive):
        worker.call(lambda e: e.list())
    assert engine.session().host.schedule.tokens == engine.arena.position


def test_a_deadline_counts_the_queue(worker):
    started, control = threading.Event(), Control()
    running = worker.generate(long(), lambda piece: started.set(), control)
    assert started.wait(WAIT)
    late = worker.generate(GenerateRequest(max_tokens=5),
                           control=Control(deadline=time.monotonic() + 0.05))
    time.sleep(0.1)
    control.cancel()
    running.result(WAIT)
    assert late.result(WAIT).finish_reason is FinishReason.TIMEOUT


def test_progress_is_noted(worker):
    before = worker.last_progress
    worker.generate(GenerateRequest(max_tokens=2)).result(WAIT)
    assert worker.last_progress > before
