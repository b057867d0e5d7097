"""Text that a capsule held back, as it might become a stop string, is told in pieces too."""

from dataclasses import replace

from engine_cases import build, ids
import pytest

from flashrt_ros.engine import GenerateRequest


@pytest.fixture(scope='module')
def engine():
    """Return an engine with capsules b1 to b12, saved within an answer that held text back."""
    engine = build()
    engine.append(token_ids=ids(50))
    said = engine.generate(GenerateRequest(max_tokens=20)).text
    engine.rollback(to='tokens', value=20)
    stop = said[5:8] + '\0never'
    made = iter(range(1, 13))
    engine.generate(GenerateRequest(max_tokens=12, stop=[stop]),
                    between=lambda: engine.save(name=f'b{next(made)}'))
    yield engine, stop
    engine.close()


@pytest.mark.parametrize('going_on', ['the same stop', 'no stop', 'no room'])
def test_pieces_are_the_text(engine, going_on):
    engine, stop = engine
    held = 0
    for number in range(1, 13):
        engine.restore(capsule=f'b{number}')
        held += bool(engine.session().host.held)
        pieces = []
        stops = [stop] if going_on == 'the same stop' else []
        answer = engine.generate(
            GenerateRequest(max_tokens=1 if going_on == 'no room' else 6, stop=stops),
            pieces.append)
        assert ''.join(piece.text for piece in pieces) == answer.text
        assert tuple(i for piece in pieces for i in piece.token_ids) == answer.token_ids
    assert held


def test_a_stop_string_that_was_held_ends_the_answer_at_once(engine):
    engine, _ = engine
    engine.restore(capsule='b12')
    session = engine.session()
    session._host = replace(session.host, held='abc')
    position = session.position
    answer = engine.generate(GenerateRequest(max_tokens=5, stop=['b']))
    assert (answer.finish_reason, answer.text, answer.token_ids) == ('stop', 'a', ())
    assert session.position == position and session.host.held == ''
