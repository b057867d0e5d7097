"""
Case 28b: a fault at every step of every verb leaves live state and store whole.

Each scenario runs once to list the points of the seam (``capsule/faults.py``) that it passes, then
once more for each of them with a fault there. Whatever the verb had begun, references add up, no
half-made name is listed, the live bytes are the old ones (or the state refuses to go on, and a
restore heals it), every capsule restores, and the verb works when it is tried again.
"""

import errno

from engine_cases import build, digest, ids, say
import pytest

from flashrt_ros.capsule import faults
from flashrt_ros.errors import DeviceFault


def prepare(engine):
    """Three capsules, one on each tier, and a live session that has left them."""
    engine.append(token_ids=ids(150))
    engine.save(name='root')
    engine.append(token_ids=ids(70, 1))
    engine.save(name='host')
    engine.restore(capsule='root')
    engine.append(token_ids=ids(90, 2))
    engine.save(name='disk', persist=True)
    engine.flush()
    engine.append('other', token_ids=ids(100, 3))
    engine.append('below', token_ids=ids(80, 5))
    engine.restore(capsule='root')
    say(engine, 12)
    engine.append(token_ids=ids(40, 4))
    engine.demote('host')
    for _ in range(2):
        engine.demote('disk')
        engine.store.demote(engine.session('below').parked)


def full(engine):
    """Fill the pool with what may go down, so that the next save has to make room."""
    for n in range(30):
        engine.arena.will_write(0)
        engine.save(name=f'fill{n}')
        if engine.lineage.pool.free()[1] < 4:
            break
    engine.arena.will_write(0)


SCENARIOS = {
    'save': lambda e: e.save(name='new'),
    'save persisted': lambda e: (e.save(name='new', persist=True), e.flush()),
    'overwrite': lambda e: e.save(name='root', overwrite=True),
    'restore diverged': lambda e: e.restore(capsule='root'),
    'restore from host': lambda e: e.restore(capsule='host'),
    'restore from disk': lambda e: e.restore(capsule='disk'),
    'restore into another session': lambda e: e.restore('new', 'root'),
    'switch': lambda e: e.rollback('other', to='tokens', value=0),
    'switch to a session on disk': lambda e: e.rollback('below', to='tokens', value=0),
    'a parked session goes down': lambda e: e.store.demote(e.session('other').parked),
    'a parked session goes further': lambda e: [e.store.demote(e.session('other').parked)
                                                for _ in range(2)],
    'fork a capsule': lambda e: e.fork('host', sessions=['x', 'default', 'y']),
    'fork the live state': lambda e: e.fork(sessions=['x', 'y']),
    'rollback to a kept boundary': lambda e: e.rollback(to='turns', value=1),
    'rollback with a replay': lambda e: e.rollback(to='tokens', value=45),
    'append': lambda e: e.append(token_ids=ids(30, 7)),
    'generate': lambda e: say(e, 9),
    'demote': lambda e: e.demote('root'),
    'demote further': lambda e: e.demote('host'),
    'persist': lambda e: (e.persist('root'), e.flush()),
    'drop with its file': lambda e: e.drop('disk'),
    'a full pool': lambda e: (full(e), e.save(name='new')),
}

SEVERAL = ('save persisted', 'a full pool')  # several verbs: what came before the fault stays


@pytest.fixture(scope='module')
def engine(tmp_path_factory):
    engine = build(context=700, pool_bytes=2 << 20, host_bytes=1 << 20, ring_tokens=4,
                   directory=str(tmp_path_factory.mktemp('capsules')))
    yield engine
    engine.close()


def clean(engine):
    for info in engine.list():
        engine.drop(info.name)
    for session in engine.sessions():
        engine.close_session(session.name)
    engine.reset()
    engine.lineage.forget()


def contents(engine):
    """Digest every capsule, through a session of its own; leave the engine as it was."""
    found = {}
    for info in engine.list():
        engine.restore('probe', info.name)
        found[info.name] = (info.id, digest(engine))
    return found


def run(engine, verb, point=None, fault=None):
    """Run a scenario from the beginning; return the points passed and what was raised."""
    clean(engine)
    prepare(engine)
    before = {'live': digest(engine), 'names': {i.name: i.id for i in engine.list()},
              'sessions': {(s.name, s.position) for s in engine.sessions()}}
    passed = []

    def observer(name):
        passed.append(name)
        if len(passed) - 1 == point:
            raise fault
    error = None
    with faults.observe(observer):
        try:
            verb(engine)
            engine.flush()
        except BaseException as raised:
            error = raised
    return before, passed, error


@pytest.mark.parametrize('name', SCENARIOS)
def test_case_28b_a_fault_at_every_step(engine, name):
    verb = SCENARIOS[name]
    _, points, error = run(engine, verb)
    assert error is None
    assert points, 'the seam has no point on this way'
    expected = contents(engine)
    last = {point: index for index, point in enumerate(points)}
    chosen = {points.index(point) for point in last} | set(last.values())
    for index in sorted(chosen):  # the first and the last passing of each
        point = points[index]
        fault = OSError(errno.EIO, 'injected') if index % 2 else RuntimeError('injected')
        before, passed, error = run(engine, verb, index, fault)
        where = f'{name}, step {index} ({point})'
        assert passed[:index + 1] == points[:index + 1], f'{where}: another way this time'
        engine.audit()
        names = {i.name: i.id for i in engine.list()}
        if error is not None and name not in SEVERAL:
            assert names == before['names'], where
            assert {(s.name, s.position) for s in engine.sessions()} == before['sessions'], where
            if engine.arena.valid:
                live = next(s.name for s in engine.sessions() if s.resident)
                if engine.session(live).parked is not None:  # parked, and not yet switched away
                    engine.rollback(live, to='tokens', value=0)
                assert digest(engine) == before['live'], where
            else:
                heal(engine, before, where)
        if error is not None and names == before['names']:
            verb(engine)  # tried again, it works
            engine.flush()
        for capsule, (_, wanted) in contents(engine).items():
            if capsule in expected:
                assert wanted == expected[capsule][1], f'{where}: capsule {capsule}'
        engine.audit()


def heal(engine, before, where):
    """Refuse to decode; a session that was parked comes back, another one by a restore."""
    live = next(s.name for s in engine.sessions() if s.resident)
    if engine.session(live).parked is not None:
        engine.rollback(live, to='tokens', value=0)
        assert digest(engine) == before['live'], where
        return
    with pytest.raises(DeviceFault):
        say(engine, 1, live)
    engine.restore(live, 'root')
    assert engine.arena.valid
