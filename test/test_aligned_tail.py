"""The unfolded tail of an aligned capsule: turns begin behind it, and a rollback may end in it."""

from dataclasses import replace

from engine_cases import build, digest, ids
import pytest

HALF = {'pending': 'e2', 'start': False, 'skip_special': True}  # of a character of three bytes


@pytest.fixture
def engine():
    engine = build()
    yield engine
    engine.audit()
    engine.close()


def stands(engine):
    """Return known tokens, turn marks and turn of the live session."""
    session = engine.session()
    return session.position + len(session.host.tail), session.host.turns, session.host.turn


def test_a_turn_behind_a_tail_is_taken_back_alone(engine):
    engine.append(token_ids=ids(600))
    before = stands(engine)
    engine.save(name='scene', align=True)
    engine.restore(capsule='scene')
    engine.append(token_ids=ids(10, 1))
    assert engine.rollback(to='turns', value=1).position == 600
    assert stands(engine) == before
    state = digest(engine)
    engine.reset()
    engine.append(token_ids=ids(600))
    assert digest(engine) == state


def test_turns_within_a_tail(engine):
    engine.append(token_ids=ids(600))
    first = stands(engine)
    engine.append(messages=[('user', 'hello')])
    engine.save(name='scene', align=True)
    engine.restore(capsule='scene')
    engine.rollback(to='turns', value=1)
    assert stands(engine) == first
    engine.rollback(to='turns', value=1)
    assert stands(engine) == (0, (), 'empty')


def test_a_rollback_into_a_message_within_a_tail_leaves_it_open(engine):
    engine.append(token_ids=ids(600))
    engine.append(messages=[('user', 'hello')])
    assert engine.session().host.turn == 'message'
    engine.save(name='scene', align=True)
    engine.restore(capsule='scene')
    engine.rollback(to='tokens', value=3)
    assert stands(engine)[1:] == (((0, 'empty'), (600, 'assistant_open')), 'assistant_open')


def test_half_a_character_outlives_the_fold_of_a_tail(engine):
    engine.append(token_ids=ids(520))
    session = engine.session()
    session._host = replace(session.host, detokenizer=HALF, held='wai')
    engine.save(name='scene', align=True)
    engine.restore(capsule='scene')
    engine.append()
    assert engine.session().position == 520
    assert engine.session().host.detokenizer == HALF and engine.session().host.held == 'wai'


@pytest.mark.parametrize('back', [1, 2])
def test_a_rollback_within_a_tail_knows_half_a_character(engine, back):
    said = [*ids(512), 0xe2, 0x82, 0xac]
    engine.append(token_ids=said)
    engine.save(name='scene', align=True)
    engine.restore(capsule='scene')
    engine.rollback(to='tokens', value=back)
    pending = bytes(said[512:515 - back]).hex()
    assert engine.session().host.detokenizer['pending'] == pending
