"""The directory of capsules as a tier: its budget, other nodes, names that are used again."""

from engine_cases import digest
import pytest
from store_cases import fresh, size_of, tiers

from flashrt_ros.errors import Capacity, NameExists


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
