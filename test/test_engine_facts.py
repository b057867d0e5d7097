"""What an engine tells of itself; its disk that goes away and comes back."""

import shutil

from engine_cases import build, ids
import pytest

from flashrt_ros.errors import Capacity, UnknownCapsule

DISK = 'disk'


def test_a_directory_that_vanished_is_a_fact_and_everything_else_goes_on(tmp_path):
    folder = tmp_path / 'capsules'
    engine = build(directory=str(folder))
    engine.append(token_ids=ids(50))
    assert engine.facts()['disk_fault'] == '', 'it is made when first needed'
    engine.save(name='c', persist=True)
    engine.flush()
    assert engine.facts()['disk_fault'] == ''

    shutil.rmtree(folder)
    facts = engine.facts()
    assert str(folder) in facts['disk_fault'] and 'mount or make' in facts['disk_fault']
    assert facts['pool_used_bytes'] > 0 and facts['capsules'] == 1
    assert [info.name for info in engine.list()] == ['c']
    assert engine.restore(capsule='c').tokens_reused == 50

    folder.write_text('a file in the way')
    facts = engine.facts()
    assert str(folder) in facts['disk_fault'] and facts['disk_used_bytes'] == 0
    assert facts['pool_used_bytes'] > 0 and facts['capsules'] == 1
    assert [info.name for info in engine.list()] == ['c']
    engine.save(name='d')

    folder.unlink()
    engine.save(name='e', persist=True)
    engine.flush()
    assert engine.facts()['disk_fault'] == '' and engine.facts()['disk_used_bytes'] > 0
    engine.close()


def test_a_pool_of_its_own_size_holds_sixteen_boundaries_and_two_contexts():
    from flashrt_ros.config import pool_budget
    from flashrt_ros.models import load_model
    from flashrt_ros.plan import manifest_of
    model = load_model('random:tiny')
    manifest = manifest_of(model, model.config.vocab_size)
    assert pool_budget(0, manifest, 2048) == (256 << 20, 16)
    assert pool_budget(5 << 20, manifest, 2048) == (5 << 20, 8)
    context = 1 << 20
    budget, blocks = pool_budget(0, manifest, context)
    assert budget == 16 * manifest.fixed_bytes + 2 * context * manifest.row_bytes > 256 << 20
    engine = build(pool_bytes=0)
    assert engine.facts()['pool_free_blocks'] >= 15
    engine.close()


def test_a_directory_that_comes_back_brings_its_files_back(tmp_path):
    folder, away = tmp_path / 'capsules', tmp_path / 'away'
    engine = build(directory=str(folder))
    engine.append(token_ids=ids(50))
    for name in ('kept', 'dropped'):
        engine.save(name=name, persist=True)
    engine.flush()
    folder.rename(away)
    assert all(DISK not in info.tiers for info in engine.list())
    away.rename(folder)
    engine.drop('dropped')
    assert not (folder / 'dropped.capsule').exists()
    assert [info.name for info in engine.list()] == ['kept']
    assert DISK in engine.info('kept').tiers
    with pytest.raises(UnknownCapsule):
        engine.restore(capsule='dropped')
    engine.close()


def test_what_can_never_fit_the_disk_budget_is_refused_before_anything_is_saved(tmp_path):
    engine = build(directory=str(tmp_path), disk_bytes=1000)
    engine.append(token_ids=ids(50))
    with pytest.raises(Capacity, match='capsules.disk_bytes'):
        engine.save(name='large', persist=True)
    assert engine.list() == []
    engine.save(name='large')
    engine.close()
