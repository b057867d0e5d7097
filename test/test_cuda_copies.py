"""Light boundaries and guards by the copy kernel of an emulated device."""

from pathlib import Path
import shutil

import pytest
import torch

from flashrt_ros.arena import Arena, Buffer, Manifest, Role
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.capsule.pool import Pool
from flashrt_ros.errors import DeviceFault

pytestmark = pytest.mark.skipif(not shutil.which('g++'), reason='the emulated device needs g++')


@pytest.fixture
def line(monkeypatch):
    """Return a lineage whose copies are launches."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import cuda_emulator

    from flashrt_ros.cuda.copies import Mover
    cuda_emulator.install(monkeypatch)
    manifest = Manifest([Buffer('ids', Role.ROWS, torch.int32, (1,)),
                         Buffer('s', Role.RECURRENT, torch.float32, (77,))])
    arena, pool = Arena(manifest, 100), Pool(manifest, 1 << 16)
    line = Lineage(arena, pool)
    line.mover = Mover(arena, pool)
    arena.storage.random_(0, 256)
    arena.set_position(70)
    return line


def test_a_light_boundary_comes_back(line):
    rows = line.arena.rows.planes[0].clone()
    before = line.arena.fixed.clone()
    block = line.keep()
    line.arena.fixed.random_(0, 256)
    assert line.put_back(block, 70) == line.arena.manifest.fixed_bytes
    assert torch.equal(line.arena.fixed, before) and line.arena.position == 70
    assert torch.equal(line.arena.rows.planes[0], rows)


@pytest.mark.parametrize('kept', [False, True])
def test_a_guard_puts_the_fixed_block_back(line, kept):
    before = line.arena.fixed.clone()
    block = line.keep() if kept else None
    free = line.pool.free()
    with pytest.raises(ValueError), line.guard(block):
        line.arena.fixed.random_(0, 256)
        raise ValueError
    assert torch.equal(line.arena.fixed, before) and line.pool.free() == free
    with line.guard(block):
        line.arena.fixed.zero_()
    assert not line.arena.fixed.any() and line.pool.free() == free


def lose(*_):
    raise DeviceFault('lost')


def test_a_boundary_that_cannot_come_back_leaves_nothing_valid(line, monkeypatch):
    block = line.keep()
    monkeypatch.setattr(line.mover, 'move', lose)
    line.arena.mirror = 70
    with pytest.raises(DeviceFault):
        line.put_back(block, 40)
    assert not line.arena.valid and line.arena.mirror == 70


@pytest.mark.parametrize('kept', [False, True])
def test_an_undo_that_is_lost_leaves_nothing_valid(line, monkeypatch, kept):
    block = line.keep() if kept else None
    free = line.pool.free()
    with pytest.raises(DeviceFault), line.guard(block):
        monkeypatch.setattr(line.mover, 'move', lose)
        monkeypatch.setattr(line, '_copy_block', lose)
        raise ValueError
    assert not line.arena.valid and line.pool.free() == free


def test_a_save_without_a_new_row_copies_the_block_alone(line):
    first, copied = line.save()
    assert copied == line.arena.manifest.state_bytes(70)
    line.arena.fixed.random_(0, 256)
    line.arena.set_position(70)
    second, copied = line.save()
    assert copied == line.arena.manifest.fixed_bytes
    assert torch.equal(line.pool.blocks[second.block], line.arena.fixed)
    assert not torch.equal(line.pool.blocks[first.block], line.arena.fixed)
