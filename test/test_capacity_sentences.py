"""What does not fit says which limit it is, how much is needed, and what to do: and that helps."""

from pathlib import Path
import re
import sys

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine_cases import build, ids, say  # noqa: E402

from flashrt_ros.errors import Capacity  # noqa: E402


def refused(function):
    with pytest.raises(Capacity) as refusal:
        function()
    return str(refusal.value)


def test_a_fork_beyond_sessions_max():
    engine = build(max_sessions=3)
    engine.append(token_ids=ids(20))
    told = refused(lambda: engine.fork(sessions=['a', 'b', 'c', 'd']))
    assert 'allows 3 sessions at a time and this needs 5, 4 of them new' in told
    assert 'close 2, or configure sessions.max 5 or more' in told
    engine.close()
    engine = build(max_sessions=5)
    assert engine.fork(sessions=['a', 'b', 'c', 'd']).sessions == ('a', 'b', 'c', 'd')
    engine.close()


def fill(engine):
    """Pin different boundaries until the pool has no fixed block left; return how many."""
    count = 0
    while True:
        engine.append(token_ids=ids(2, seed=count))
        try:
            engine.save(name=f'pinned-{count}', pin=True)
        except Capacity:
            return count
        count += 1


def test_a_fork_that_needs_a_block_of_a_full_pool():
    engine = build(pool_bytes=2 << 20)
    kept = fill(engine)
    told = refused(lambda: engine.fork(sessions=['a']))
    budget = int(re.search(r'set capsules.device_bytes to (\d+) bytes or more', told)[1])
    assert re.search(r'has 0 of \d+ fixed blocks free and needs 1; drop capsules, close', told)
    engine.drop('pinned-0')  # one of the ways that it names
    assert engine.fork(sessions=['a']).sessions == ('a',)
    engine.close()
    engine = build(pool_bytes=budget)
    assert fill(engine) > kept  # the other one
    engine.close()


def test_pages_that_a_pool_can_never_hold():
    engine = build(pool_bytes=1 << 20, context=4096)
    pages = engine.lineage.pool.page_ids.count
    engine.append(token_ids=ids(64 * (pages + 2)))
    told = refused(lambda: engine.fork(sessions=['a']))
    budget = int(re.search(r'set capsules.device_bytes to (\d+) bytes or more', told)[1])
    assert f'{pages} pages in all and needs {pages + 2} at once' in told and 'drop' not in told
    engine.close()
    engine = build(pool_bytes=budget, context=4096)
    engine.append(token_ids=ids(64 * (pages + 2)))
    assert engine.fork(sessions=['a']).info.tokens == 64 * (pages + 2)
    assert say(engine, 1, 'a')
    engine.close()
