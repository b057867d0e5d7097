"""A file whose host part cannot be is refused by name, not by the verb that trips over it."""

from dataclasses import replace

from engine_cases import build, digest, ids, say
import pytest

from flashrt_ros.capsule import codec
from flashrt_ros.capsule.boundary import HostState
from flashrt_ros.errors import Corrupt

SAMPLER = [0.5, 0, 1.0, 3, 0]


@pytest.fixture(scope='module')
def engine(tmp_path_factory):
    engine = build(directory=str(tmp_path_factory.mktemp('capsules')))
    engine.append(token_ids=ids(40))
    say(engine, 5)
    engine.append(token_ids=ids(3, 1))
    engine.save(name='good', persist=True)
    engine.flush()
    yield engine
    engine.audit()
    engine.close()


def forge(engine, name, **changes):
    """Write the good capsule once more, with another host part and right digests."""
    tier, manifest = engine.store.disk, engine.arena.manifest
    image = codec.read(tier.path('good'), manifest)
    host = {**image.header.host, **changes}
    image.header = replace(image.header, name=name, id=name, host=host)
    codec.write(image, tier.path(name), manifest, overwrite=True)


@pytest.mark.parametrize('changes', [
    {'schedule': []}, {'schedule': [[0, 48, None]]}, {'schedule': [[-1, -48, None]]},
    {'schedule': [[40, 1, None]]}, {'schedule': [[40, 1, None], [1, 8, [9]]]},
    {'schedule': [[2, 24, SAMPLER]]}, {'schedule': [[1, 48, [*SAMPLER[:4], 2 ** 63]]]},
    {'schedule': [[1, 48, ['x', *SAMPLER[1:]]]]}, {'schedule': [[1, 48, 7]]},
    {'turns': [[-1, 'empty']]}, {'turns': [[48, 'empty']]}, {'turns': [[9, 'empty'], [9, 'empty']]},
    {'role': ['user']}, {'detokenizer': 'e2'}, {'tail': [-1]}, {'tail': [512]},
    {'seeds': [[49, 1]]}, {'seeds': [[4, -1]]}, {'seeds': [[4, 2 ** 64]]}], ids=str)
def test_refused_by_name(engine, changes):
    before = digest(engine)
    forge(engine, 'forged', **changes)
    for verb in (lambda: engine.restore(capsule='forged'),
                 lambda: engine.fork('forged', sessions=['branch'])):
        with pytest.raises(Corrupt, match='forged'):
            verb()
    assert digest(engine) == before
    assert [session.name for session in engine.sessions()] == ['default']


def test_what_is_written_is_read(engine):
    host = replace(engine.session().host, tail=(3, 4), seeds=((0, 1), (48, 2 ** 64 - 1)))
    host = replace(host, turns=(*host.turns, (49, 'message')))
    assert HostState.from_json(host.to_json()) == host
    forge(engine, 'fine', **host.to_json())
    engine.restore('other', 'fine')
    engine.close_session('other')


def test_ids_in_rows_that_no_token_has(engine):
    """They are rows like others, so only a verb that folds them again meets them."""
    tier, manifest = engine.store.disk, engine.arena.manifest
    image = codec.read(tier.path('good'), manifest)
    image.header = replace(image.header, name='rows', id='rows')
    image.rows['tokens'][41] = 512
    codec.write(image, tier.path('rows'), manifest, overwrite=True)
    engine.restore(capsule='rows')
    before = digest(engine)
    with pytest.raises(Corrupt, match='ids'):
        engine.rollback(to='position', value=44)
    assert digest(engine) == before
    engine._sessions.live._draft_tokens = 4
    with pytest.raises(Corrupt, match='ids'):
        say(engine, 5)
    assert digest(engine) == before
    engine._sessions.live._draft_tokens = 0
    engine.reset()
