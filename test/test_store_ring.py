"""The ring of light boundaries: undo replays little, and they go first."""

from engine_cases import digest, ids, say
import pytest
from store_cases import MIB

from flashrt_ros.errors import Capacity


def test_undo_replays_little(make):
    engine = make(ring_tokens=16, pool_bytes=8 * MIB)
    engine.append(token_ids=ids(40))
    tokens = say(engine, 100, temperature=0.8, seed=2)
    digests = {}
    engine.rollback(to='position', value=40)
    for position in range(41, 141):
        say(engine, 1, **({'temperature': 0.8, 'seed': 2} if position == 41 else {}))
        digests[position] = digest(engine)
    engine.reset()
    engine.append(token_ids=ids(40))
    assert say(engine, 100, temperature=0.8, seed=2) == tokens
    for back in (1, 3, 9, 20):
        result = engine.rollback(to='tokens', value=back)
        assert result.tokens_replayed < 16
        assert digest(engine) == digests[result.position]
        say(engine, back)
    assert engine.rollback(to='turns', value=1).tokens_replayed == 0, 'the turn was pushed out'


def test_marks_above_a_write_are_void(make):
    engine = make(ring_tokens=4, pool_bytes=8 * MIB)
    engine.append(token_ids=ids(40))
    say(engine, 12)
    engine.rollback(to='position', value=41)
    engine.append(token_ids=ids(5, 1))
    wanted = {engine.session().position: digest(engine)}
    engine.append(token_ids=ids(20, 2))
    engine.rollback(to='position', value=46)
    assert {46: digest(engine)} == wanted
    assert all(kept.position <= 46 for kept in engine.session().ring.light())


@pytest.mark.parametrize(('options', 'most'), [
    ({'ring_boundaries': 0}, 1), ({'ring_boundaries': 2}, 2), ({'ring_bytes': 40_000}, 2),
    ({'ring_tokens': 0}, 4), ({}, 4)])
def test_the_ring_keeps_within_its_limits(make, options, most):
    engine = make(**{'ring_tokens': 4, 'pool_bytes': 8 * MIB, **options})
    for turn in range(4):
        engine.append(token_ids=ids(10, turn))
        say(engine, 21)
        light = engine.session().ring.light()
        assert len(light) <= most
        if not options.get('ring_tokens', 1):
            assert all(kept.turn for kept in light)
    engine.audit()


def test_light_boundaries_go_before_capsules_when_blocks_are_short(make):
    engine = make(host_bytes=0, directory='', ring_tokens=2, pool_bytes=2 * MIB)
    blocks = engine.lineage.pool.free()[0]
    engine.append(token_ids=ids(5))
    for session in 'abc':
        engine.fork(sessions=[session])
        say(engine, 8, session)
    saved = []
    with pytest.raises(Capacity):
        for n in range(blocks + 1):
            engine.save('a', f'c{n}')
            say(engine, 1, 'a')
            saved.append(n)
    assert len(saved) > blocks - 8
    engine.audit()
