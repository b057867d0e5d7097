"""The tiers of the store: budgets, least recently used, pins, shared pages."""

from engine_cases import DEVICE, digest, ids, poison, poison_dead, say
import numpy as np
import pytest
from store_cases import fresh, MIB, tiers

from flashrt_ros.capsule.pool import Ids, PAGE
from flashrt_ros.capsule.room import choose
from flashrt_ros.capsule.transfer import spans
from flashrt_ros.errors import Capacity

# -- who has to leave -----------------------------------------------------------------------------

def places(*items):
    return np.array(items, dtype=np.int64)


def test_choose_takes_the_least_recently_used_whose_going_frees_something():
    ids_ = Ids(10, 'pages', 'x')
    parent = ids_.take(4)
    child = ids_.take(2)
    ids_.hold(parent)  # the child shares all of its parent
    other = ids_.take(3)
    candidates = [('parent', parent), ('other', other), ('child', np.concatenate((parent, child)))]
    assert choose(ids_, candidates, 1) == []
    assert choose(ids_, candidates, 3) == ['other'], 'demoting the parent would free nothing'
    assert choose(ids_, candidates, 6) == ['parent', 'child']
    assert choose(ids_, candidates, 10) == ['parent', 'other', 'child']
    assert choose(ids_, candidates[:2], 5) is None


def test_locate_finds_held_places_by_what_they_hold():
    ids_ = Ids(8, 'pages', 'x')
    one, two = ids_.take(3), ids_.take(2)
    uids = ids_.uids[np.concatenate((two, one))]
    assert ids_.locate(uids).tolist() == [3, 4, 0, 1, 2]
    ids_.release(one)
    assert ids_.locate(uids).tolist() == [3, 4, -1, -1, -1]
    assert ids_.locate(places(0, 1 << 40)).tolist() == [-1, -1]
    assert ids_.locate(places()).tolist() == []


def test_spans_are_contiguous_on_both_sides():
    assert list(spans(places(0, 1, 2, 7), places(4, 5, 9, 10))) == [(0, 4, 2), (2, 9, 1),
                                                                    (7, 10, 1)]
    assert list(spans(places(), places())) == []


# -- down and up ----------------------------------------------------------------------------------

def test_case_05_device_host_disk_device_twice(make):
    engine = make()
    before = fresh(engine, 300, 1, 'c')
    expected = say(engine, 20)
    for path in (['host'], ['host', 'disk']):
        engine.reset()
        engine.lineage.forget()
        for tier in path:
            while engine.info('c').tiers[0] != tier:
                engine.demote('c')
        for _ in range(2):  # a promoted capsule is good for a second use
            poison(engine)
            engine.restore(capsule='c')
            assert digest(engine) == before
            assert say(engine, 20) == expected
        engine.audit()


def test_pages_go_down_once_and_come_up_only_if_they_left(make):
    engine = make()
    engine.append(token_ids=ids(192))
    engine.save(name='parent')
    engine.append(token_ids=ids(64, 1))
    engine.save(name='child')
    fixed, page = engine.arena.manifest.fixed_bytes, PAGE * engine.arena.manifest.row_bytes
    engine.demote('parent')
    assert engine.facts()['host_used_bytes'] == fixed + 3 * page
    engine.demote('child')
    assert engine.facts()['host_used_bytes'] == 2 * fixed + 4 * page, 'a shared page counts once'
    engine.reset()
    engine.lineage.forget()
    engine.fork('parent', sessions=['p'])
    used = engine.facts()['pool_used_bytes']
    engine.fork('child', sessions=['c'])
    assert engine.facts()['pool_used_bytes'] - used == fixed + page, 'the parent is still there'
    engine.audit()


@pytest.mark.skipif(DEVICE != 'cpu', reason='on a device a capsule has to come up')
def test_on_a_cpu_a_restore_reads_the_host_tier_itself(make):
    """One copy, no room taken in the pool; what is saved afterwards still shares its pages."""
    engine = make(pool_bytes=8 * MIB)
    manifest = engine.arena.manifest
    fixed, page = manifest.fixed_bytes, PAGE * manifest.row_bytes
    engine.append(token_ids=ids(200))
    engine.save(name='parent')
    wanted, tokens = digest(engine), say(engine, 9)
    engine.reset()
    engine.lineage.forget()
    engine.demote('parent')
    free = engine.lineage.pool.free()[1]
    for copied in (manifest.state_bytes(200), fixed):
        poison_dead(engine)
        result = engine.restore(capsule='parent')
        assert (result.bytes_copied, result.info.tiers) == (copied, ('host',))
        assert digest(engine) == wanted
        assert engine.lineage.pool.free()[1] == free
        engine.audit()
    assert say(engine, 9) == tokens
    assert engine.rollback(to='tokens', value=9).tokens_replayed == 0, 'it kept the boundary'
    engine.append(token_ids=ids(100, 1))
    engine.save(name='child')
    child = digest(engine)
    used = engine.facts()['host_used_bytes']
    engine.restore(capsule='parent')
    engine.demote('child')
    assert engine.facts()['host_used_bytes'] - used == fixed + 2 * page, 'three full pages shared'
    poison(engine)
    engine.restore(capsule='child')
    assert digest(engine) == child
    engine.drop('parent')
    engine.audit()
    assert engine.restore(capsule='child').bytes_copied == fixed
    engine.restore('other', 'child')
    engine.append('other', token_ids=ids(3))
    engine.rollback('default', to='tokens', value=0)
    assert digest(engine) == child
    engine.drop('child')
    engine.audit()


def test_a_family_stays_one_when_it_comes_back_from_the_disk(make):
    engine = make(host_bytes=0)
    engine.append(token_ids=ids(192))
    engine.save(name='parent')
    engine.append(token_ids=ids(64, 1))
    engine.save(name='child')
    engine.demote('child')
    assert tiers(engine) == {'parent': ('device',), 'child': ('disk',)}
    engine.restore(capsule='parent')
    engine.lineage.forget()
    free = engine.lineage.pool.free()
    assert engine.restore(capsule='child').tokens_reused == 256
    assert engine.lineage.pool.free() == (free[0] - 1, free[1] - 1)


@pytest.mark.parametrize('host_bytes', [0, MIB])
def test_a_page_that_was_filled_less_never_stands_for_a_fuller_one(make, host_bytes):
    """B lies below A on one page; B comes back with its 80 rows, then A needs all 100."""
    engine = make(host_bytes=host_bytes)
    engine.append(token_ids=ids(80))
    engine.append(token_ids=ids(20, 1))
    engine.save(name='a')
    expected = digest(engine)
    engine.rollback(to='position', value=80)
    engine.save(name='b')
    engine.reset()
    engine.lineage.forget()
    for name in 'ab':
        while engine.info(name).tiers[0] != 'disk':
            engine.demote(name)
    poison(engine)
    for rows in engine.lineage.pool.rows.planes:
        rows.fill_(0xEE)
    engine.restore(capsule='b')
    engine.reset()
    engine.restore(capsule='a')
    assert digest(engine) == expected
    engine.audit()


def test_case_30_least_recently_used_goes_down_and_pinned_stays(make):
    engine = make(host_bytes=MIB)
    digests = {f'c{n}': fresh(engine, 250, n, f'c{n}', pin=n == 0) for n in range(4)}
    engine.restore(capsule='c1')  # used now, hence later than c2
    for n in range(4, 12):
        digests[f'c{n}'] = fresh(engine, 250, n, f'c{n}')
    where = tiers(engine)
    assert where['c0'] == ('device',)
    assert where['c2'][0] in ('host', 'disk')
    assert {t for there in where.values() for t in there} == {'device', 'host', 'disk'}
    for name, expected in digests.items():
        engine.restore(capsule=name)
        assert digest(engine) == expected
        engine.audit()
        facts = engine.facts()
        assert facts['pool_used_bytes'] <= facts['pool_bytes'] <= 2 * MIB
        assert facts['host_used_bytes'] <= facts['host_bytes'] <= MIB
    with pytest.raises(Capacity, match='pinned'):
        engine.demote('c0')


def test_case_30_oversize_is_refused_before_anybody_moves(make):
    engine = make(context=2048, pool_bytes=MIB)
    engine.append(token_ids=ids(300))
    engine.save(name='small')
    where = tiers(engine)
    engine.append(token_ids=ids(1200, 1))
    before = digest(engine)
    with pytest.raises(Capacity, match='capsules.device_bytes'):
        engine.save(name='large')
    assert (tiers(engine), digest(engine)) == (where, before)
    engine.audit()


def test_case_30_nothing_is_thrown_away_where_there_is_no_tier_below(make):
    engine = make(directory='', host_bytes=0)
    kept = {}
    with pytest.raises(Capacity):
        for n in range(20):
            kept[f'c{n}'] = fresh(engine, 250, n, f'c{n}')
    assert len(kept) >= 2
    assert set(tiers(engine)) == set(kept)
    with pytest.raises(Capacity, match='no tier below'):
        engine.demote('c0')
    engine.audit()


def test_a_capsule_too_large_for_the_host_goes_to_the_disk(make):
    engine = make(host_bytes=200 << 10)
    before = fresh(engine, 500, 1, 'large')
    assert engine.demote('large').tiers == ('disk',)
    engine.restore(capsule='large')
    assert digest(engine) == before


def test_an_aligned_save_is_rebuilt_where_asked(make):
    engine = make(context=1500, pool_bytes=8 * MIB)
    engine.append(token_ids=ids(300))
    engine.append(token_ids=ids(300, 1))
    say(engine, 50)
    before, position = digest(engine), engine.arena.position
    tokens = engine.arena['tokens'].view(-1)[:position].tolist()
    result = engine.save(name='c', align=True, rebuild=True)
    assert (result.tokens_prefilled, result.info.tokens) == (512, position)
    assert result.info.aligned
    assert digest(engine) == before
    engine.audit()
    assert engine.restore(capsule='c').tokens_reused == 512
    engine.append(token_ids=ids(60, 2))
    after = digest(engine)
    engine.reset()
    engine.append(token_ids=tokens + ids(60, 2))
    assert digest(engine) == after
