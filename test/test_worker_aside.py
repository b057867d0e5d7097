"""What the worker serves inside a prefill, a step and a replay, and what it keeps waiting."""

import threading

from engine_cases import build, digest, ids, say
import pytest

from flashrt_ros.engine import Control, FinishReason, GenerateRequest
from flashrt_ros.errors import Busy, Canceled
from flashrt_ros.worker import Worker

WAIT = 60.0  # seconds; a bound for a slow machine, not an expectation
LONG = 3000


@pytest.fixture
def engine():
    engine = build(context=4096)
    engine.append(token_ids=ids(50))
    engine.save(name='c')
    engine.restore('other', 'c')
    engine.append(token_ids=ids(7, seed=1), session='other')
    engine.restore(capsule='c')
    yield engine
    engine.audit()
    engine.close()


class Halt:
    """
    Stops the worker in the middle of the chunk of a prefill until told to go on.

    :param last: another such chunk: what is served before it is served before the end.
    """

    def __init__(self, engine, chunk=2, last=4):
        self.reached, self.go_on, self.end = (threading.Event() for _ in range(3))
        self._last = last
        self._append, self._chunk, self._count = engine.plan.append, chunk, 0
        engine.plan.append = self

    def __call__(self, tokens):
        self._count += 1
        if self._count == self._chunk:
            self.reached.set()
            assert self.go_on.wait(WAIT)
        if self._count == self._last:
            assert self.end.wait(WAIT)
        self._append(tokens)

    def release(self):
        self.go_on.set()
        self.end.set()


def prefill(worker, engine, control=None, **fields):
    """Begin a long prefill and return its future, with the worker halted in the second chunk."""
    halt = Halt(engine)
    future = worker.generate(GenerateRequest(token_ids=ids(LONG, seed=2), max_tokens=0, **fields),
                             control=control)
    assert halt.reached.wait(WAIT)
    return future, halt


def aside(worker, function, session=None):
    return worker.call(function, at_boundary=True, session=session)


def test_case_33_what_needs_no_boundary_of_the_session_is_served_within_its_prefill(
        worker, engine):
    future, halt = prefill(worker, engine)
    jobs = {
        'list': aside(worker, lambda e: [i.name for i in e.list()]),
        'pin': aside(worker, lambda e: e.pin('c', True)),
        'facts': aside(worker, lambda e: e.facts()),
        'save': aside(worker, lambda e: e.save('other', 'o'), 'other'),
        'restore': aside(worker, lambda e: e.restore('other', 'c')),
        'fork': aside(worker, lambda e: e.fork('c', sessions=['branch'])),
        'drop': aside(worker, lambda e: e.drop('o')),
        'state': aside(worker, lambda e: {i.name: i for i in e.sessions()})}
    halt.go_on.set()
    done = {name: job.result(WAIT) for name, job in jobs.items()}
    assert not future.done()
    halt.end.set()
    assert done['save'].info.tokens == 57 and done['restore'].tokens_reused == 50
    state = done['state']
    assert state['default'].position == 50 and state['default'].busy, 'the boundary, no chunk'
    assert state['other'].position == 50 and state['branch'].position == 50
    assert future.result(WAIT).position == 50 + LONG
    assert worker.call(lambda e: e.pin('c', False)).result(WAIT).name == 'c'


def test_what_is_served_aside_leaves_no_trace_in_the_prefill(worker, engine):
    future, halt = prefill(worker, engine)
    for round in range(20):
        aside(worker, lambda e: e.restore('other', 'c'))
        aside(worker, lambda e, n=round: e.save('other', f'o{n}'), 'other')
    halt.release()
    future.result(WAIT)
    bare = build(context=4096)
    bare.append(token_ids=ids(50))
    bare.append(token_ids=ids(LONG, seed=2))
    assert worker.call(digest).result(WAIT) == digest(bare)
    assert worker.call(lambda e: say(e, 5)).result(WAIT) == say(bare, 5)
    bare.close()


def test_a_save_of_the_session_waits_for_the_end_of_its_append(worker, engine):
    future, halt = prefill(worker, engine)
    save = aside(worker, lambda e: e.save(name='after'), 'default')
    unnamed = worker.call(lambda e: e.save(name='safe'), at_boundary=True)
    early = aside(worker, lambda e: e.save(name='half'))
    branch = aside(worker, lambda e: e.fork(sessions=['half']))
    halt.go_on.set()
    for refused in (early, branch):
        with pytest.raises(Busy):
            refused.result(WAIT)
    assert not save.done()
    halt.end.set()
    future.result(WAIT)
    assert save.result(WAIT).info.tokens == unnamed.result(WAIT).info.tokens == 50 + LONG
    assert 'half' not in [i.name for i in worker.call(lambda e: e.list()).result(WAIT)]


def test_a_cancel_acts_between_chunks_and_the_save_has_the_boundary_before(worker, engine):
    before, control = digest(engine), Control()
    future, halt = prefill(worker, engine, control)
    save = aside(worker, lambda e: e.save(name='after'), 'default')
    control.cancel(FinishReason.PREEMPTED)
    halt.release()
    answer = future.result(WAIT)
    assert (answer.finish_reason, answer.position) == (FinishReason.PREEMPTED, 50)
    assert save.result(WAIT).info.tokens == 50
    assert worker.call(digest).result(WAIT) == before


def test_on_a_cpu_a_listing_does_not_wait_for_the_end_of_a_step(worker, engine):
    if engine.arena.device.type != 'cpu':
        pytest.skip('on a device a step is one launch')
    where, control = [], Control()

    def listen(piece):
        if len(where) < 3:  # the token is out, its fold is next
            aside(worker, lambda e: where.append(('aside', e.session().folding)))
            worker.call(lambda e: where.append(('boundary', e.session().folding)),
                        at_boundary=True)
        if piece.index == 4:
            control.cancel()
    worker.generate(GenerateRequest(max_tokens=4000), listen, control).result(WAIT)
    assert where[:2] == [('aside', True), ('boundary', False)]


def test_a_replay_serves_too_and_keeps_its_session_waiting(worker, engine):
    engine.append(token_ids=ids(LONG, seed=2))
    halt = Halt(engine)
    back = worker.call(lambda e: e.rollback(to='position', value=2500, aside=worker.aside),
                       session='default')
    assert halt.reached.wait(WAIT)
    assert worker.current_session == 'default'
    listed = aside(worker, lambda e: {i.name: i.position for i in e.sessions()})
    moved = aside(worker, lambda e: e.restore('other', 'c'))
    save = aside(worker, lambda e: e.save(name='after'), 'default')
    halt.go_on.set()
    assert listed.result(WAIT) == {'default': 50 + LONG, 'other': 57}
    assert moved.result(WAIT).tokens_reused == 50
    assert not back.done() and not save.done()
    halt.end.set()
    assert back.result(WAIT).position == save.result(WAIT).info.tokens == 2500


def test_places_are_known_without_asking(worker, engine):
    assert worker.place('default') == (engine.session().epoch, 50)
    assert worker.place('nobody') == (0, 0)
    future, halt = prefill(worker, engine, capsule='c')
    aside(worker, lambda e: None)
    epoch = worker.place('default')[0]
    halt.release()
    answer = future.result(WAIT)
    assert worker.place('default') == (answer.epoch, 50 + LONG)
    rolled = worker.call(lambda e: e.rollback(to='tokens', value=1)).result(WAIT)
    assert worker.place('default') == (rolled.epoch, 49 + LONG) and epoch


def test_a_device_that_does_not_tell_the_place_hides_no_answer(worker, engine, monkeypatch):
    place = worker.place('default')

    def gone():
        raise RuntimeError('the device fell off the bus')
    monkeypatch.setattr(engine, 'sessions', gone)
    assert worker.call(lambda e: 5).result(WAIT) == 5
    with pytest.raises(Busy):
        worker.call(lambda e: (_ for _ in ()).throw(Busy('its own'))).result(WAIT)
    monkeypatch.undo()
    assert worker.place('default') == place


def test_a_replay_ends_when_the_worker_is_told_to_stop(engine):
    """Else a node that shuts down would leave a worker behind that replays on."""
    worker = Worker(engine)
    worker.start()
    engine.append(token_ids=ids(LONG, seed=2))
    before, halt, control = digest(engine), Halt(engine, chunk=2), Control()
    back = worker.call(lambda e: e.rollback(to='position', value=2500, control=control,
                                            aside=worker.aside),
                       session='default', control=control)
    assert halt.reached.wait(WAIT)
    assert not worker.stop(0.0)
    halt.release()
    with pytest.raises(Canceled):
        back.result(WAIT)
    assert worker.stop(WAIT) and digest(engine) == before
