"""Sessions that are not live go down and come up as capsules do, and are never thrown away."""

from engine_cases import digest, ids, say
import pytest
from store_cases import fresh, MIB, size_of

from flashrt_ros.errors import Capacity


def converse(engine, names, length=250):
    """Fill sessions with unrelated texts; return the digest of each."""
    found = {}
    for seed, name in enumerate(names):
        engine.append(name, token_ids=ids(length, seed))
        found[name] = digest(engine)
    return found


def kinds(engine):
    """Return the fastest tier of each parked session's boundary."""
    return [engine.session(s.name).parked.tiers[0] for s in engine.sessions() if not s.resident]


def test_parked_sessions_go_down_and_come_up_as_capsules_do(make, tmp_path):
    engine, names = make(host_bytes=MIB // 2), [f's{n}' for n in range(14)]
    found = converse(engine, names)
    assert set(kinds(engine)) == {'device', 'host', 'disk'}
    engine.audit()
    facts = engine.facts()
    assert 0 < facts['host_used_bytes'] <= facts['host_bytes'] <= MIB // 2
    assert facts['pool_used_bytes'] <= facts['pool_bytes'] <= 2 * MIB
    assert facts['disk_used_bytes'] > 0
    assert list((tmp_path / 'capsules').iterdir()) == [], 'their files have no names'
    assert engine.list() == make().list() == [], 'they are listed nowhere'
    for name in (*names, *names):
        engine.rollback(name, to='tokens', value=0)  # names it
        assert digest(engine) == found[name]
        engine.audit()
    say(engine, 5, names[0])
    engine.save(names[1], 'kept')
    engine.fork(source_session=names[2], sessions=['branch'])
    engine.rollback('branch', to='tokens', value=0)
    assert digest(engine) == found[names[2]]
    for session in engine.sessions():
        engine.close_session(session.name)
    assert engine.facts()['disk_used_bytes'] == 0
    engine.restore(capsule='kept')
    assert digest(engine) == found[names[1]]


def test_a_parked_session_is_not_thrown_away_where_there_is_no_tier_below(make):
    engine, kept = make(directory='', host_bytes=0), {}
    with pytest.raises(Capacity, match=r'capsules\.device_bytes'):
        for n in range(20):
            kept |= converse(engine, [f's{n}'])
    assert len(kept) >= 2
    engine.close_session('s0')  # switching needs room for the one that is live
    del kept['s0']
    for name, expected in kept.items():
        engine.rollback(name, to='tokens', value=0)
        assert digest(engine) == expected


def test_the_disk_budget_counts_parked_sessions_and_never_takes_one(make, tmp_path):
    engine = make(host_bytes=0)
    fresh(engine, 250, 0, 'probe', persist=True)
    engine.flush()
    size = size_of(tmp_path, 'probe')
    engine.drop('probe')
    engine.close()
    engine = make(host_bytes=0, disk_bytes=2 * size + 100)
    fresh(engine, 250, 0, 'old', persist=True)
    engine.flush()
    engine.drop('old', disk=False)
    assert engine.info('old').tiers == ('disk',)
    found = {}
    with pytest.raises(Capacity):
        for n in range(20):
            found |= converse(engine, [f's{n}'])
    facts = engine.facts()
    assert size < facts['disk_used_bytes'] <= facts['disk_budget_bytes']
    assert facts['disk_evictions'] == 1, 'the capsule went, the sessions stay'
    engine.audit()
    for name in sorted(found)[-4:-1]:  # a pool and a disk that are full cannot swap
        engine.close_session(name)
        del found[name]
    for name, expected in found.items():
        engine.rollback(name, to='tokens', value=0)
        assert digest(engine) == expected
