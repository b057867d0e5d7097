"""The arena: layout, closedness of names, rows moved plane by plane."""

import pytest
import torch

from flashrt_ros.arena import ALIGN, Arena, Buffer, Manifest, Role, Rows


def manifest() -> Manifest:
    return Manifest([
        Buffer('id', Role.ROWS, torch.int32, (1,)),
        Buffer('state', Role.RECURRENT, torch.float32, (3, 5)),
        Buffer('window', Role.CONV, torch.bfloat16, (7,)),
        Buffer('a.k', Role.ROWS, torch.float32, (2, 4)),
        Buffer('a.v', Role.ROWS, torch.float32, (2, 4)),
        Buffer('b.k', Role.ROWS, torch.float32, (3,)),
        Buffer('box', Role.SCRATCH, torch.int32, (1,)),
    ])


def test_the_state_is_one_allocation():
    arena = Arena(manifest(), 100)
    start, size = arena.storage.data_ptr(), arena.storage.numel()
    assert size == manifest().storage_bytes(100)
    spans = []
    for buffer in arena.manifest.buffers:
        view = arena[buffer.name]
        inside = start <= view.data_ptr() < start + size
        assert inside == (buffer.role is not Role.SCRATCH), buffer.name
        if inside and buffer.role is not Role.ROWS:
            assert view.data_ptr() - start < arena.manifest.fixed_bytes
            assert (view.data_ptr() - start) % ALIGN == 0
        spans.append((view.data_ptr(), view.nbytes))
    spans.sort()
    for (one, length), (two, _) in zip(spans, spans[1:], strict=False):
        assert one + length <= two, 'buffers overlap'


def test_fields_of_equal_row_size_share_a_plane():
    assert manifest().planes == {4: ['id'], 32: ['a.k', 'a.v'], 12: ['b.k']}
    assert manifest().row_bytes == 4 + 32 + 32 + 12


def test_views_alias_the_planes():
    arena = Arena(manifest(), 10)
    arena['a.v'][3] = 7.0
    assert (arena.rows.planes[1][1, 3].view(torch.float32) == 7.0).all()
    assert int(arena.rows.planes[1][0].sum()) == 0


def test_rows_move_between_arena_and_pages():
    arena = Arena(manifest(), 50)
    arena.storage.random_(0, 256)
    pages = Rows(manifest(), 128, torch.zeros(Rows.bytes_for(manifest(), 128), dtype=torch.uint8))
    assert pages.copy_from(arena.rows, 5, 70, 20) == 20 * arena.manifest.row_bytes
    for buffer in arena.manifest.rows:
        live = arena[buffer.name][5:25].contiguous().view(torch.uint8)
        kept = pages.view(buffer.name)[70:90].contiguous().view(torch.uint8)
        assert torch.equal(live, kept), buffer.name
        assert int(pages.view(buffer.name)[:70].contiguous().view(torch.uint8).sum()) == 0
        assert int(pages.view(buffer.name)[90:].contiguous().view(torch.uint8).sum()) == 0


def test_slots_are_arenas_of_one_allocation():
    one, two = Arena.slots(manifest(), 20, 2)
    assert two.storage.data_ptr() - one.storage.data_ptr() == manifest().storage_bytes(20)
    two['state'].fill_(1.0)
    assert int(one.storage.sum()) == 0


def test_watermark_only_falls():
    arena = Arena(manifest(), 20)
    arena.clean = 10
    arena.will_write(12)
    assert arena.clean == 10
    arena.will_write(4)
    assert arena.clean == 4


@pytest.mark.parametrize('bad', [
    [Buffer('x', Role.CONV, torch.float32, (1,)), Buffer('x', Role.CONV, torch.float32, (1,))],
    [Buffer('position', Role.CONV, torch.float32, (1,))],
    [Buffer('a/b', Role.CONV, torch.float32, (1,))],
    [Buffer('x', Role.CONV, torch.float32, (0,))],
])
def test_malformed_manifests_are_refused(bad):
    with pytest.raises(ValueError):
        Manifest(bad)


def test_wrong_storage_is_refused():
    with pytest.raises(ValueError, match='bytes of uint8'):
        Arena(manifest(), 4, storage=torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match='at least one row'):
        Arena(manifest(), 0)
