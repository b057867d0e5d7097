"""A rollback brings back the random sequence that a restore or a fork began, kept or not."""

from engine_cases import build, digest, ids, say
import pytest


@pytest.fixture(params=[0, 4], ids=['nothing kept', 'boundaries kept'])
def engine(request):
    engine = build(ring_boundaries=request.param)
    engine.append(token_ids=ids(20))
    engine.save(name='trunk')
    yield engine
    engine.audit()
    engine.close()


def again(engine, session, count):
    """Say something, take it back, say it again."""
    first = say(engine, count, session, temperature=1.0)
    engine.rollback(session, to='tokens', value=count)
    return first, say(engine, count, session, temperature=1.0)


def test_branches_say_the_same_again(engine):
    engine.fork('trunk', sessions=['a', 'b'], seeds=[1, 2])
    said = {}
    for session in ('a', 'b'):
        first, second = again(engine, session, 12)
        assert second == first
        said[session] = first
    assert said['a'] != said['b']


def test_behind_the_seed_and_at_it(engine):
    engine.restore(capsule='trunk', seed=5)
    at = digest(engine)
    engine.append(token_ids=ids(9, 1))
    behind = digest(engine)
    say(engine, 3, temperature=1.0, seed=8)
    for turn in range(6):  # more than are kept
        engine.append(token_ids=ids(2, turn))
    engine.rollback(to='position', value=29)
    assert digest(engine) == behind
    engine.rollback(to='position', value=20)
    assert digest(engine) == at
    engine.rollback(to='position', value=19)
    engine.append(token_ids=ids(20)[19:])
    assert engine.session().host.seeds == ()


def test_a_capsule_keeps_it(engine):
    engine.restore(capsule='trunk', seed=5)
    engine.append(token_ids=ids(9, 1))
    engine.save(name='later')
    at = digest(engine)
    engine.restore(capsule='trunk')
    engine.restore(capsule='later')
    engine.append(token_ids=ids(3, 2))
    engine.rollback(to='position', value=29)
    assert digest(engine) == at
    assert engine.session().host.from_json(engine.session().host.to_json()).seeds == ((20, 5),)
