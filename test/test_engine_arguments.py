"""Arguments that Python would take for something else are refused, and nothing has changed."""

from engine_cases import build, digest
import numpy as np
import pytest

from flashrt_ros.engine import GenerateRequest
from flashrt_ros.errors import InvalidArgument


@pytest.fixture(scope='module')
def engine():
    engine = build()
    engine.append(token_ids=[1, 2, 3])
    engine.save(name='here')
    yield engine
    engine.audit()
    engine.close()


@pytest.mark.parametrize('call', [
    lambda e: e.append(messages=[{'role': 'user', 'content': 'hello'}]),
    lambda e: e.append(messages=['ab']),
    lambda e: e.append(messages=[('user', 'hello', 'there')]),
    lambda e: e.append(token_ids=[1.7]),
    lambda e: e.append(token_ids='12'),
    lambda e: e.append(token_ids=[None]),
    lambda e: e.generate(GenerateRequest(seed=1.5)),
    lambda e: e.generate(GenerateRequest(top_k=2.5)),
    lambda e: e.restore(capsule='here', seed=1.5),
    lambda e: e.fork('here', sessions=['branch'], seeds=[1.5]),
    lambda e: e.fork('here', sessions=['branch'], seeds=['1'])])
def test_refused(engine, call):
    before = digest(engine)
    with pytest.raises(InvalidArgument):
        call(engine)
    assert digest(engine) == before
    assert [session.name for session in engine.sessions()] == ['default']


def test_integers_of_any_kind(engine):
    engine.append(token_ids=np.array([4, 5], dtype=np.int32))
    assert engine.fork('here', sessions=['branch'], seeds=[np.uint64(2 ** 64 - 1)]).sessions
    engine.append('branch', token_ids=[True])
    engine.close_session('branch')
