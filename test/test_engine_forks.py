"""Acceptance group G and the store: forks, sessions, memory, names."""

import random

from engine_cases import build, digest, ids, poison_dead, say, tidy
import psutil
import pytest

from flashrt_ros.engine import GenerateRequest
from flashrt_ros.errors import (
    Busy,
    Capacity,
    FlashrtError,
    InvalidArgument,
    InvalidName,
    NameExists,
    UnknownCapsule,
    UnknownSession,
)


@pytest.fixture(scope='module')
def shared():
    engine = build()
    yield engine
    engine.close()


@pytest.fixture
def engine(shared):
    yield shared
    tidy(shared)


def test_case_27_eight_forks_interleaved_equal_eight_cold_runs(engine):
    engine.append(token_ids=ids(90))
    engine.save(name='root')
    names = [f'branch{n}' for n in range(8)]
    engine.fork('root', sessions=names, seeds=list(range(8)))
    said = {name: () for name in names}
    order = [name for name in names for _ in range(6)]
    random.Random(1).shuffle(order)
    for name in order:
        said[name] += say(engine, 1, name, temperature=1.0)
    for seed, name in enumerate(names):
        engine.restore(capsule='root', seed=seed)
        assert say(engine, 6, temperature=1.0) == said[name]
    assert len(set(said.values())) > 1


def test_case_27_nothing_done_later_changes_a_capsule(engine):
    engine.append(token_ids=ids(130))
    engine.save(name='c')
    before = digest(engine)
    for turn in range(5):
        engine.append(token_ids=ids(40, turn))
        say(engine, 3)
        engine.save(name=f'later{turn}')
        engine.rollback(to='position', value=60 + turn)
        engine.arena.scratch.random_(0, 256)
        poison_dead(engine)
    engine.restore(capsule='c')
    assert digest(engine) == before


def test_case_28_siblings_outlive_their_parent(engine):
    engine.append(token_ids=ids(200))
    engine.save(name='parent')
    digests = {}
    for name in 'ab':
        engine.restore(capsule='parent')
        engine.append(token_ids=ids(60, ord(name)))
        engine.save(name=name)
        digests[name] = digest(engine)
    engine.drop('parent')
    for name in 'abab':
        engine.restore(capsule=name)
        assert digest(engine) == digests[name]


def test_forking_the_live_state_is_an_implicit_save(engine):
    engine.append(token_ids=ids(80))
    expected = say(engine, 4)
    engine.rollback(to='position', value=80)
    result = engine.fork(sessions=['x', 'y'])
    assert result.bytes_copied <= engine.arena.manifest.state_bytes(80)
    assert engine.list() == []
    assert say(engine, 4, 'x') == say(engine, 4, 'y') == say(engine, 4) == expected


def test_forking_onto_the_live_session(engine):
    engine.append(token_ids=ids(80))
    engine.save(name='c')
    before = digest(engine)
    engine.append(token_ids=ids(5))
    engine.fork('c', sessions=['default', 'other'], seeds=[1, 2])
    engine.rollback(to='tokens', value=0)
    assert engine.session().position == 80
    engine.restore(capsule='c')
    assert digest(engine) == before
    with pytest.raises(InvalidArgument, match='source itself'):
        engine.fork(sessions=['default'])


def test_sessions_are_parked_and_switched(engine):
    for name in ('a', 'b', 'c'):
        engine.append(name, token_ids=ids(50, ord(name)))
    alone = {}
    for name in ('a', 'b', 'c'):
        engine.append('alone', token_ids=ids(50, ord(name)))
        alone[name] = say(engine, 6, 'alone')
        engine.reset('alone')
    said = {name: () for name in alone}
    for _ in range(6):
        for name in said:
            said[name] += say(engine, 1, name)
    assert said == alone
    resident = [s.name for s in engine.sessions() if s.resident]
    assert resident == ['c']


def test_rollback_works_after_parking(engine):
    engine.append('a', token_ids=ids(50))
    tokens = say(engine, 10, 'a')
    say(engine, 3, 'b', token_ids=ids(70, 2))
    engine.rollback('a', to='tokens', value=6)
    assert say(engine, 6, 'a') == tokens[4:]


def test_a_session_that_generates_is_left_alone(engine):
    engine.append(token_ids=ids(50))
    engine.save(name='c')
    refused, done = [], []

    def between():
        if done:
            return
        for verb in (lambda: engine.restore(capsule='c'),
                     lambda: engine.rollback(to='tokens', value=1), engine.reset,
                     lambda: engine.append(token_ids=[1]),
                     lambda: engine.close_session('default'),
                     lambda: engine.fork('c', sessions=['default']),
                     lambda: engine.append('other', token_ids=[1]),
                     lambda: engine.generate(GenerateRequest(max_tokens=1))):
            with pytest.raises(Busy):
                verb()
            refused.append(verb)
        engine.save(name='middle')
        engine.fork('c', sessions=['branch'])
        engine.restore('third', 'c')
        done.append(engine.session().position)
    whole = engine.generate(GenerateRequest(max_tokens=12), between=between).token_ids
    assert len(refused) == 8
    engine.restore(capsule='middle')
    assert engine.session().position == done[0] == 51
    assert say(engine, 11) == whole[1:]
    assert say(engine, 12, 'branch') == say(engine, 12, 'third') == whole


def test_case_25_names(engine):
    engine.append(token_ids=ids(5))
    for bad in ('a/b', '..', '.hidden', 'a\0b', 'x' * 129, 'na\u00efve', ' a', '-a'):
        with pytest.raises(InvalidName, match='a name is'):
            engine.save(name=bad)
        with pytest.raises(InvalidName):
            engine.restore(bad, 'c')
        with pytest.raises(InvalidName):
            engine.restore(capsule=bad)
    assert engine.list() == []
    assert [s.name for s in engine.sessions()] == ['default']


@pytest.mark.parametrize(('verb', 'error'), [
    (lambda e: e.restore(capsule='none'), UnknownCapsule),
    (lambda e: e.restore('new', 'none'), UnknownCapsule),
    (lambda e: e.drop('none'), UnknownCapsule),
    (lambda e: e.pin('none', True), UnknownCapsule),
    (lambda e: e.fork('none', sessions=['a']), UnknownCapsule),
    (lambda e: e.fork('c', sessions=[]), InvalidArgument),
    (lambda e: e.fork('c', sessions=['a', 'a']), InvalidArgument),
    (lambda e: e.fork('c', sessions=['a', 'b'], seeds=[1]), InvalidArgument),
    (lambda e: e.fork('c', source_session='default', sessions=['a']), InvalidArgument),
    (lambda e: e.fork(sessions=['a'], source_session='none'), UnknownSession),
    (lambda e: e.fork('c', sessions=[f's{n}' for n in range(99)]), Capacity),
    (lambda e: e.rollback('none', to='tokens', value=1), UnknownSession),
    (lambda e: e.save('none'), UnknownSession),
    (lambda e: e.save(name='c'), NameExists),
    (lambda e: e.save(name='d', persist=True), InvalidArgument),
    (lambda e: e.save(name='d', note='x' * 5000), InvalidArgument),
    (lambda e: e.close_session('none'), UnknownSession),
    (lambda e: e.append(token_ids=[512]), InvalidArgument),
    (lambda e: e.append(token_ids=[-1]), InvalidArgument),
    (lambda e: e.append(token_ids=[1], prompt='a'), InvalidArgument),
    (lambda e: e.append(messages=[('us er', 'a')]), InvalidArgument),
    (lambda e: say(e, -2), InvalidArgument),
    (lambda e: say(e, 3, temperature=-0.5), InvalidArgument),
    (lambda e: say(e, 3, temperature=float('nan')), InvalidArgument),
    (lambda e: say(e, 3, top_p=2.0), InvalidArgument),
    (lambda e: say(e, 3, stop=['']), InvalidArgument),
    (lambda e: say(e, 3, stop=['a'] * 99), InvalidArgument),
    (lambda e: say(e, 3, capsule='none'), UnknownCapsule),
    (lambda e: say(e, 3, save_as='a/b'), InvalidName),
    (lambda e: say(e, 3, 'empty'), InvalidArgument),
    (lambda e: say(e, 3, seed=-1), InvalidArgument)])
def test_a_refusal_changes_nothing(engine, verb, error):
    engine.append(token_ids=ids(40))
    engine.save(name='c')
    before, sessions = digest(engine), engine.sessions()
    capsules, free = engine.list(), engine.lineage.pool.free()
    with pytest.raises(error) as raised:
        verb(engine)
    assert isinstance(raised.value, FlashrtError)
    assert str(raised.value).endswith('.')
    assert digest(engine) == before
    assert engine.sessions() == sessions
    assert (engine.list(), engine.lineage.pool.free()) == (capsules, free)


def test_overwriting_a_capsule_frees_the_old_one(engine):
    engine.append(token_ids=ids(300))
    first = engine.save(name='c').info
    free = engine.lineage.pool.free()
    for _ in range(20):
        engine.arena.clean = 0
        second = engine.save(name='c', overwrite=True).info
    assert second.id != first.id
    assert engine.lineage.pool.free() == free


def test_a_full_pool_demotes_what_is_on_disk_or_refuses(tmp_path):
    small = {'context': 512, 'pool_bytes': 1 << 20}
    bare = build(**small)
    bare.append(token_ids=ids(400))
    with pytest.raises(Capacity, match='capsules.device_bytes'):
        for n in range(9):
            bare.arena.clean = 0
            bare.save(name=f'c{n}')
    before = digest(bare)
    assert len(bare.list()) == len({i.name for i in bare.list()}) >= 1
    bare.restore(capsule='c0')
    assert digest(bare) == before
    bare.close()
    engine = build(context=512, pool_bytes=2 << 20, directory=str(tmp_path))
    digests = {}
    for n in range(9):
        engine.reset()
        engine.append(token_ids=ids(400, n))
        engine.save(name=f'c{n}', pin=n == 0)
        digests[f'c{n}'] = digest(engine)
    tiers = {i.name: i.tiers for i in engine.list()}
    assert tiers['c0'] == ('device',), 'a pinned capsule left the pool'
    assert tiers['c1'] == ('disk',)
    for name, expected in digests.items():
        engine.restore(capsule=name)
        assert digest(engine) == expected
    engine.close()


def test_memory_is_flat(engine):
    """Case 29, small: the full count runs in ``flashrt-ros verify``."""
    engine.append(token_ids=ids(64))
    engine.save(name='c')

    def cycle():
        engine.restore(capsule='c')
        say(engine, 1)
        engine.save(name='d', overwrite=True)
    pointers = {name: view.data_ptr() for name, view in engine.arena.views.items()}
    for _ in range(50):
        cycle()
    free, resident = engine.lineage.pool.free(), psutil.Process().memory_info().rss
    for _ in range(300):
        cycle()
    assert engine.lineage.pool.free() == free
    assert psutil.Process().memory_info().rss - resident < 4 << 20
    assert {name: view.data_ptr() for name, view in engine.arena.views.items()} == pointers


def branch_and_its_future(engine):
    """Fork a branch with a seed of its own; return what it will say."""
    engine.append('other', token_ids=ids(80))
    engine.save('other', 'c')
    engine.restore('probe', 'c', seed=5)
    expected = say(engine, 8, 'probe', temperature=1.0)
    engine.restore('other', 'c')
    assert say(engine, 8, 'other', temperature=1.0) != expected
    engine.restore('other', 'c')
    engine.fork('c', sessions=['branch'], seeds=[5])
    return expected


def test_the_seed_of_a_branch_is_saved_and_forked_before_it_was_named(engine):
    expected = branch_and_its_future(engine)
    engine.save('branch', 'saved')
    engine.fork(source_session='branch', sessions=['twig'])
    engine.restore('again', 'saved')
    assert say(engine, 8, 'again', temperature=1.0) == expected
    assert say(engine, 8, 'twig', temperature=1.0) == expected
    assert say(engine, 8, 'branch', temperature=1.0) == expected
    engine.audit()


def test_the_seed_of_the_default_session_survives_the_close_of_the_live_one(engine):
    expected = branch_and_its_future(engine)
    engine.fork('c', sessions=['default'], seeds=[5])
    engine.close_session('other')
    assert say(engine, 8, temperature=1.0) == expected
    engine.append('elsewhere', token_ids=ids(9))
    later = digest_of_default(engine)
    assert later == digest_of_default(engine)


def digest_of_default(engine):
    """Switch to the default session and away; return the digest of its live bytes."""
    engine.rollback(to='tokens', value=0)
    found = digest(engine)
    engine.rollback('elsewhere', to='tokens', value=0)
    return found
