"""A restore by who decided in an epoch that is over is refused; nothing has changed then."""

from pathlib import Path
import sys

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine_cases import build, digest, ids  # noqa: E402

from flashrt_ros.errors import InvalidArgument, UnknownSession  # noqa: E402


@pytest.fixture
def engine():
    engine = build()
    engine.append(token_ids=ids(40))
    engine.save(name='here')
    yield engine
    engine.close()


def epoch(engine, session='default'):
    return engine.session(session).epoch


@pytest.mark.parametrize('move', ['restore', 'reset', 'rollback'])
def test_the_second_of_two_that_saw_one_epoch_is_refused(engine, move):
    seen = epoch(engine)
    {'restore': lambda: engine.restore(capsule='here', expected_epoch=seen),
     'reset': engine.reset,
     'rollback': lambda: engine.rollback(to='tokens', value=1)}[move]()
    before, now = digest(engine), epoch(engine)
    with pytest.raises(InvalidArgument, match=f'is in epoch {now}, not {seen}'):
        engine.restore(capsule='here', expected_epoch=seen)
    assert digest(engine) == before and epoch(engine) == now
    assert engine.restore(capsule='here', expected_epoch=now).epoch > now
    assert engine.restore(capsule='here').epoch > now  # 0 stands for any


def test_growing_makes_no_new_epoch(engine):
    seen = epoch(engine)
    engine.append(token_ids=ids(5))
    assert engine.restore(capsule='here', expected_epoch=seen).tokens_reused == 40


def test_a_session_that_is_not_there_is_in_no_epoch(engine):
    with pytest.raises(UnknownSession):
        engine.restore('new', 'here', expected_epoch=7)
    assert [session.name for session in engine.sessions()] == ['default']
    assert engine.restore('new', 'here').tokens_reused == 40


def test_a_parked_session_has_its_own(engine):
    seen = engine.restore('other', 'here').epoch
    engine.restore(capsule='here')
    assert engine.restore('other', 'here', expected_epoch=seen).epoch > seen
