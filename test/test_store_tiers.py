"""The tiers of the store: budgets, least recently used, pins, shared pages, ring, accounts."""

from engine_cases import build, DEVICE, digest, ids, poison, poison_dead, say
import numpy as np
import pytest

from flashrt_ros.capsule.pool import Ids, PAGE
from flashrt_ros.capsule.room import choose
from flashrt_ros.capsule.transfer import spans
from flashrt_ros.errors import Capacity, NameExists

MIB = 1 << 20


@pytest.fixture
def make(tmp_path):
    engines = []

    def start(**options):
        options.setdefault('directory', str(tmp_path / 'capsules'))
        engines.append(build(**{'context': 700, 'pool_bytes': 2 * MIB, 'host_bytes': MIB,
                                **options}))
        return engines[-1]
    yield start
    for engine in engines:
        engine.close()


def fresh(engine, length, seed, name, **options):
    """Save an unrelated text under a name; return the digest of its state."""
    engine.reset()
    engine.append(token_ids=ids(length, seed))
    engine.save(name=name, **options)
    return digest(engine)


def tiers(engine):
    return {i.name: i.tiers for i in engine.list()}


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


# -- parked sessions ------------------------------------------------------------------------------

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


# -- disk -----------------------------------------------------------------------------------------

def size_of(tmp_path, name):
    return (tmp_path / 'capsules' / f'{name}.capsule').stat().st_size


def test_case_30_the_disk_budget_evicts_the_least_recently_used(make, tmp_path):
    engine = make(host_bytes=0)
    fresh(engine, 200, 0, 'probe', persist=True)
    engine.flush()
    size = size_of(tmp_path, 'probe')
    engine.drop('probe')
    engine.close()
    engine = make(host_bytes=0, disk_bytes=3 * size + 100)
    for n, pin in ((0, True), (1, False), (2, False)):
        fresh(engine, 200, n, f'c{n}', pin=pin, persist=True)
        engine.flush()
    engine.restore(capsule='c1')
    fresh(engine, 200, 3, 'c3', persist=True)
    engine.flush()
    assert tiers(engine) == {'c0': ('device', 'disk'), 'c1': ('device', 'disk'),
                             'c2': ('device',), 'c3': ('device', 'disk')}
    facts = engine.facts()
    assert facts['disk_used_bytes'] <= facts['disk_budget_bytes']
    assert facts['disk_evictions'] == 0, 'c2 is still in memory'
    engine.audit()
    with pytest.raises(Capacity, match='disk_bytes'):
        fresh(engine, 690, 4, 'large', persist=True)
    fresh(engine, 690, 4, 'large')
    engine.persist('large')  # the file itself is checked too
    with pytest.raises(Capacity, match='disk_bytes'):
        engine.flush()
    assert tiers(engine)['c1'] == ('device', 'disk'), 'refused before anybody left'


def test_a_capsule_of_another_node_is_found_and_not_overwritten(make):
    one, two = make(), make()
    before = fresh(one, 100, 1, 'shared', persist=True)
    one.flush()
    two.restore(capsule='shared')
    assert digest(two) == before
    assert 'shared' in tiers(two)
    fresh(one, 100, 2, 'mine')
    fresh(two, 100, 3, 'mine', persist=True)
    two.flush()
    with pytest.raises(Capacity, match='another node'):
        for _ in range(2):
            one.demote('mine')
    with pytest.raises(NameExists):
        one.save(name='shared', persist=True)
    one.drop('shared')
    two.reset()
    assert tiers(two)['shared'] == ('device',)
    two.restore(capsule='shared')
    assert digest(two) == before


def test_dropping_a_name_drops_what_it_replaced(make):
    engine = make()
    fresh(engine, 100, 1, 'c', persist=True)
    engine.flush()
    fresh(engine, 100, 2, 'c', overwrite=True)
    assert tiers(engine) == {'c': ('device',)}
    engine.drop('c')
    assert engine.list() == []
    assert engine.store.disk.usage() == {}


# -- the ring -------------------------------------------------------------------------------------

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


# -- accounts -------------------------------------------------------------------------------------

def test_list_facts_and_allocator_agree(make):
    engine = make(pool_bytes=8 * MIB)
    manifest, free = engine.arena.manifest, engine.facts()
    engine.append(token_ids=ids(192))
    engine.save(name='root')
    engine.append(token_ids=ids(100, 1))
    engine.save(name='leaf')
    engine.reset()
    engine.lineage.forget()
    info = {i.name: i for i in engine.list()}
    page = PAGE * manifest.row_bytes
    facts = engine.facts()
    assert info['root'].bytes == manifest.state_bytes(192)
    assert info['root'].bytes_exclusive == manifest.fixed_bytes
    assert info['leaf'].bytes_exclusive == manifest.fixed_bytes + 2 * page
    assert facts['pool_capsule_bytes'] == 2 * manifest.fixed_bytes + 5 * page
    assert facts['pool_used_bytes'] - free['pool_used_bytes'] == facts['pool_capsule_bytes']
    engine.drop('root')
    freed = facts['pool_used_bytes'] - engine.facts()['pool_used_bytes']
    assert freed == manifest.fixed_bytes, 'dropping an ancestor frees what nobody else holds'
    freed = engine.facts()['pool_used_bytes']
    engine.drop('leaf')
    assert freed - engine.facts()['pool_used_bytes'] == manifest.fixed_bytes + 5 * page
    engine.audit()


# -- aligned --------------------------------------------------------------------------------------

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


def test_the_bytes_on_disk_are_told_while_the_writer_changes_them(make, monkeypatch):
    files = make().store.files
    # What was counted is forgotten at once, as by a write that ends right then.
    monkeypatch.setattr(type(files), '_used', property(lambda _: None, lambda *_: None),
                        raising=False)
    assert files.used_bytes() == 0


def test_what_a_drop_would_free_leaves_out_what_sessions_hold(make):
    engine = make(pool_bytes=8 * MIB)
    engine.append(token_ids=ids(192))
    engine.save(name='root')
    engine.fork('root', sessions=['left', 'right'])
    engine.reset()
    engine.lineage.forget()
    told = engine.info('root').bytes_exclusive
    before = engine.facts()['pool_used_bytes']
    engine.drop('root')
    assert before - engine.facts()['pool_used_bytes'] == told == 0
    engine.audit()
