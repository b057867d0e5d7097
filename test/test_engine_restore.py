"""Acceptance groups A, B and F: restores are complete, nothing stale, samples continue."""

import subprocess
import sys

from engine_cases import build, digest, ids, logits, poison, poison_dead, say, tidy
import pytest
import torch

from flashrt_ros.arena import Role
from flashrt_ros.errors import InvalidArgument

SAMPLED = {'temperature': 0.9, 'top_k': 50, 'top_p': 0.95}


@pytest.fixture(scope='module')
def engine():
    engine = build()
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def clean(engine):
    yield
    tidy(engine)


@pytest.mark.parametrize('length', [1, 63, 64, 65, 700])
def test_case_01_byte_exact_after_poison(engine, length):
    engine.append(token_ids=ids(length))
    engine.save(name='c')
    before = digest(engine)
    expected = say(engine, 64), logits(engine)
    poison(engine)
    engine.restore(capsule='c')
    assert digest(engine) == before
    poison_dead(engine)
    assert say(engine, 64) == expected[0]
    assert torch.equal(logits(engine), expected[1])


def test_case_02_turns_of_save_and_restore_equal_one_linear_run(engine):
    for turn in range(6):
        engine.append(token_ids=ids(30, turn))
        say(engine, 5)
    expected = digest(engine)
    engine.reset()
    for turn in range(6):
        engine.append(token_ids=ids(30, turn))
        engine.save(name='c', overwrite=True)
        poison(engine)
        engine.restore(capsule='c')
        say(engine, 5)
        engine.save(name='d', overwrite=True)
        poison(engine)
        engine.restore(capsule='d')
    assert digest(engine) == expected


def test_case_02_five_restores_give_five_identical_streams(engine):
    engine.append(token_ids=ids(100))
    engine.save(name='c')
    streams = set()
    for _ in range(5):
        engine.restore(capsule='c', seed=4)
        streams.add(say(engine, 20, **SAMPLED))
    assert len(streams) == 1


def test_case_03_every_state_class_is_load_bearing(engine):
    """Leave one class out of a restore by hand: the logits of the next steps move."""
    engine.append(token_ids=ids(100))
    engine.save(name='c')
    saved = engine.arena.storage.clone()
    say(engine, 8)
    expected = logits(engine)
    for role in (Role.ROWS, Role.RECURRENT, Role.CONV, Role.BOUNDARY):
        engine.reset()
        engine.append(token_ids=ids(140, seed=9))
        stale = engine.arena.storage.clone()
        engine.arena.storage.copy_(saved)
        left_out = [b for b in engine.arena.manifest.buffers if b.role is role]
        now = type(engine.arena)(engine.arena.manifest, engine.arena.capacity, storage=stale)
        for buffer in left_out:
            engine.arena[buffer.name].copy_(now[buffer.name])
        for _ in range(8):
            engine.plan.step()
        assert not torch.equal(logits(engine), expected), f'{role} made no difference'
    engine.reset()


def test_case_05_device_disk_device(tmp_path):
    engine = build(directory=str(tmp_path))
    engine.append(token_ids=ids(300))
    engine.save(name='c', persist=True)
    engine.flush()
    before, expected = digest(engine), say(engine, 20)
    engine.close()
    again = build(directory=str(tmp_path))
    assert [i.tiers for i in again.list()] == [('disk',)]
    for _ in range(2):
        poison(again)
        result = again.restore(capsule='c')
        assert digest(again) == before
        assert say(again, 20) == expected
        assert result.info.exact_future
    again.close()


def test_case_06_suffixes_leak_nothing(engine):
    engine.append(token_ids=ids(200))
    engine.save(name='c')
    engine.append(token_ids=ids(150, 1))
    engine.restore(capsule='c')
    engine.append(token_ids=ids(20, 2))
    after = digest(engine)
    engine.reset()
    poison_dead(engine)
    engine.append(token_ids=ids(200))
    engine.append(token_ids=ids(20, 2))
    assert digest(engine) == after


def test_case_07_restore_in_a_new_process(tmp_path):
    engine = build(directory=str(tmp_path))
    engine.append(token_ids=ids(200))
    engine.save(name='c', persist=True)
    engine.flush()
    before = digest(engine)
    expected = say(engine, 10)
    engine.close()
    code = ('import sys; sys.path.insert(0, sys.argv[1])\n'
            'from engine_cases import *\n'
            'e = build(directory=sys.argv[2]); e.restore(capsule="c")\n'
            'print(e.arena.position, digest(e), say(e, 10))')
    out = subprocess.run([sys.executable, '-c', code, __file__.rpartition('/')[0], str(tmp_path)],
                         capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout.strip() == f'200 {before} {expected}'


def test_case_08_bytes_restored_are_the_manifest_s(engine):
    engine.append(token_ids=ids(321))
    engine.save(name='c')
    engine.arena.clean = 0
    assert engine.restore(capsule='c').bytes_copied == engine.arena.manifest.state_bytes(321)


def test_case_09_a_reset_equals_a_fresh_process(engine):
    fresh = build()
    engine.append(token_ids=ids(90, 5))
    say(engine, 10, temperature=1.0, seed=9)
    engine.reset()
    poison_dead(engine)
    for one in (fresh, engine):
        one.append(token_ids=ids(70))
    assert digest(fresh) == digest(engine)
    assert say(fresh, 20) == say(engine, 20)
    fresh.close()


def test_case_26_sampling(engine):
    engine.append(token_ids=ids(60))
    engine.save(name='c')
    whole = say(engine, 64, seed=7, **SAMPLED)
    engine.restore(capsule='c')
    first = say(engine, 30, seed=7, **SAMPLED)
    engine.save(name='middle')
    poison(engine)
    engine.restore(capsule='middle')
    assert first + say(engine, 34) == whole  # settings and counter came with the capsule
    engine.restore(capsule='c', seed=8)
    other = say(engine, 64, **SAMPLED)
    assert other != whole
    engine.restore(capsule='c', seed=7)
    assert say(engine, 64, **SAMPLED) == whole


def test_position_zero_is_a_boundary_without_logits(engine):
    engine.save(name='zero')
    engine.append(token_ids=ids(10))
    engine.restore(capsule='zero')
    with pytest.raises(InvalidArgument, match='nothing is folded'):
        say(engine, 1)
    engine.append(token_ids=ids(10))
    assert len(say(engine, 3)) == 3
