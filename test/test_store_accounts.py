"""What the store says of itself: sizes in a list, what a drop frees, bytes on disk."""

from engine_cases import ids
from store_cases import MIB

from flashrt_ros.capsule.pool import PAGE


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


def test_the_bytes_on_disk_are_told_while_the_writer_changes_them(make, monkeypatch):
    files = make().store.files
    # What was counted is forgotten at once, as by a write that ends right then.
    monkeypatch.setattr(type(files), '_used', property(lambda _: None, lambda *_: None),
                        raising=False)
    assert files.used_bytes() == 0
