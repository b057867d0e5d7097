"""Capsule files that are whole: round trips, layout, sizes, and what the writer refuses."""

from __future__ import annotations

from dataclasses import replace
import os
from pathlib import Path
import stat
import sys

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import codec_cases as cases  # noqa: E402

from flashrt_ros.arena import Arena  # noqa: E402
from flashrt_ros.capsule import codec, wire  # noqa: E402
from flashrt_ros.errors import InvalidArgument, NameExists, Storage  # noqa: E402

MANIFESTS = cases.manifests()


@pytest.mark.parametrize('position', cases.POSITIONS)
@pytest.mark.parametrize('kind', MANIFESTS)
def test_round_trip_is_byte_exact(tmp_path, kind, position):
    manifest = MANIFESTS[kind]
    image = cases.image(manifest, position)
    path = tmp_path / 'scene.capsule'
    size = codec.write(image, path, manifest, overwrite=False)
    assert size == path.stat().st_size == codec.file_bytes(image, manifest)
    back = codec.read(path, manifest)
    cases.assert_equal(image, back)
    assert replace(back.header, digests=None, payload_bytes=0) == image.header
    assert back.header == codec.verify(path) == codec.read_header(path)


def test_read_image_restores_with_pitched_copies(tmp_path):
    manifest, position = MANIFESTS['bf16'], 77
    live = cases.arena(manifest, position)
    rows = {b.name: live[b.name][:position] for b in manifest.rows}
    image = codec.Image(cases.header(manifest, position), live.fixed, rows)
    codec.write(image, tmp_path / 'a', manifest, overwrite=False)
    back = codec.read(tmp_path / 'a', manifest)
    other = Arena(manifest, 200)
    other.storage.fill_(0xA5)
    other.fixed.copy_(back.fixed)
    other.rows.copy_from(back.block, 0, 0, position)
    for mine, theirs in zip(live.live_bytes(), other.live_bytes(), strict=True):
        assert torch.equal(mine, theirs)


def test_reading_into_memory_that_is_used_again(tmp_path):
    memory, asked = torch.full((100_000,), 0xA5, dtype=torch.uint8), []
    for position in (300, 20, 0):
        image = cases.image(cases.small(), position)
        codec.write(image, tmp_path / 'a', cases.small(), overwrite=True)
        back = codec.read(tmp_path / 'a', cases.small(),
                          allocate=lambda n: asked.append(n) or memory)
        cases.assert_equal(image, back)
        assert position == 0 or memory.data_ptr() == back.rows['layer0.k'].untyped_storage(
            ).data_ptr()
    assert len(asked) == 3 and asked[0] > asked[1] > asked[2] == cases.small().fixed_bytes


def test_pages_and_strided_views_write_the_same_file(tmp_path):
    manifest, position = MANIFESTS['fp32'], 300
    whole = cases.image(manifest, position)
    pages = replace(whole, rows={n: [*r.split(64)] for n, r in whole.rows.items()})
    strided = replace(whole, rows={
        n: torch.stack([r, r], dim=1).transpose(0, 1)[1] for n, r in whole.rows.items()})
    assert not strided.rows['layer0.k'].is_contiguous()
    files = []
    for index, image in enumerate((whole, pages, strided)):
        path = tmp_path / str(index)
        codec.write(image, path, manifest, overwrite=False)
        files.append(path.read_bytes())
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize('block', [64, 100, 4096])
def test_blocks_of_any_size_write_the_same_file(tmp_path, monkeypatch, block):
    manifest, position = MANIFESTS['fp32'], 300
    image = cases.image(manifest, position)
    codec.write(image, tmp_path / 'a', manifest, overwrite=False)
    monkeypatch.setattr(codec, 'BLOCK', block)
    monkeypatch.setattr(codec, 'DIRECT', 2048)
    mixed = replace(image, rows={n: [r[:7], r[7:8], r[8:8], r[8:290], r[290:]]
                                 for n, r in image.rows.items()})
    codec.write(mixed, tmp_path / 'b', manifest, overwrite=False)
    assert (tmp_path / 'a').read_bytes() == (tmp_path / 'b').read_bytes()
    cases.assert_equal(image, codec.read(tmp_path / 'b', manifest))


@pytest.mark.parametrize('kind', MANIFESTS)
def test_any_safetensors_reader_opens_it(tmp_path, kind):
    safetensors = pytest.importorskip('safetensors')
    manifest, position = MANIFESTS[kind], 64
    image = cases.image(manifest, position)
    path = tmp_path / 'scene.capsule'
    codec.write(image, path, manifest, overwrite=False)
    with safetensors.safe_open(path, 'pt') as file:
        described = {d['name'] for d in manifest.describe()}
        assert set(file.keys()) == described
        assert file.metadata()['format'] == 'flashrt_ros.capsule'
        for name, rows in image.rows.items():
            tensor = file.get_tensor(name)
            assert tensor.dtype is rows.dtype and tensor.shape == rows.shape
            assert cases.raw(tensor) == cases.raw(rows)
        assert file.get_tensor('position').tolist() == [position]
    assert wire.PADDING not in described


def test_nonzero_padding_is_kept_as_a_region_of_its_own(tmp_path):
    manifest = MANIFESTS['bf16']
    image = cases.image(manifest, 3)
    plain = codec.file_bytes(image, manifest)
    for start, end in wire.gaps(manifest):
        image.fixed[start:end].random_(1, 256)
    codec.write(image, tmp_path / 'a', manifest, overwrite=False)
    back = codec.read(tmp_path / 'a', manifest)
    cases.assert_equal(image, back)
    assert wire.PADDING in back.header.digests and codec.verify(tmp_path / 'a')
    assert codec.file_bytes(image, manifest) > plain


def test_size_follows_live_tokens_and_not_capacity(tmp_path):
    manifest = MANIFESTS['fp32']
    sizes = {}
    for position in (0, 100, 200):
        live = Arena(manifest, 5000)
        live.set_position(position)
        image = codec.Image(cases.header(manifest, position), live.fixed,
                            {b.name: live[b.name][:position] for b in manifest.rows})
        sizes[position] = codec.write(image, tmp_path / str(position), manifest, overwrite=False)
    for position in (100, 200):
        grown = sizes[position] - sizes[0]
        assert abs(grown - position * manifest.row_bytes) <= 128, 'rows and digits of offsets only'


def test_mode_is_0600_whatever_the_umask(tmp_path):
    old = os.umask(0o777)
    try:
        codec.write(cases.image(cases.small(), 3), tmp_path / 'a', cases.small(), overwrite=False)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / 'a').stat().st_mode) == 0o600


def test_overwriting_must_be_asked_for(tmp_path):
    manifest, path = cases.small(), tmp_path / 'a'
    codec.write(cases.image(manifest, 3), path, manifest, overwrite=False)
    first = path.read_bytes()
    with pytest.raises(NameExists, match='exists already'):
        codec.write(cases.image(manifest, 5), path, manifest, overwrite=False)
    assert path.read_bytes() == first
    codec.write(cases.image(manifest, 5), path, manifest, overwrite=True)
    assert codec.verify(path).position == 5
    assert os.listdir(tmp_path) == ['a']


def test_a_file_being_read_is_not_disturbed_by_overwriting(tmp_path):
    manifest, path = cases.small(), tmp_path / 'a'
    image = cases.image(manifest, 50)
    codec.write(image, path, manifest, overwrite=False)
    done = []

    def overwrite(point):
        if point == 'codec.read' and not done:
            done.append(point)
            codec.write(cases.image(manifest, 20, seed=1), path, manifest, overwrite=True)

    with codec.faults.observe(overwrite):
        cases.assert_equal(image, codec.read(path, manifest))
    assert done and codec.verify(path).position == 20


@pytest.mark.parametrize('change, words', [
    (lambda i: setattr(i, 'fixed', i.fixed[:-1]), 'fixed block'),
    (lambda i: i.rows.pop('ids'), 'rows'),
    (lambda i: i.rows.update(more=torch.zeros(3)), 'rows'),
    (lambda i: i.rows.update(ids=i.rows['ids'][:2]), "'ids'"),
    (lambda i: i.rows.update(ids=i.rows['ids'].long()), "'ids'"),
    (lambda i: i.fixed.view(torch.int64)[0].fill_(4), 'position'),
    (lambda i: setattr(i, 'header', replace(i.header, host={'x': float('nan')})), 'JSON'),
    (lambda i: setattr(i, 'header', replace(i.header, host={'x': {1, 2}})), 'JSON'),
    (lambda i: setattr(i, 'header', replace(i.header, host={'x': 'a' * (17 << 20)})), 'header'),
    (lambda i: setattr(i, 'header', replace(i.header, created=float('inf'))), 'created'),
    (lambda i: setattr(i, 'header', replace(i.header, name='a/b')), 'name'),
    (lambda i: setattr(i, 'header', replace(i.header, note='x' * 70000)), 'note'),
    (lambda i: setattr(i, 'header', replace(i.header, manifest=[])), 'manifest'),
])
def test_the_writer_refuses_what_no_reader_would_take(tmp_path, change, words):
    image = cases.image(cases.small(), 3)
    change(image)
    with pytest.raises(InvalidArgument, match=words):
        codec.write(image, tmp_path / 'a', cases.small(), overwrite=False)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize('path', ['no/such/directory/a', 'file/a', '.'])
def test_writing_to_an_impossible_place_is_a_storage_error(tmp_path, path):
    (tmp_path / 'file').touch()
    with pytest.raises(Storage, match=r'^Writing .*(ENOENT|ENOTDIR|EISDIR|EBUSY)'):
        codec.write(cases.image(cases.small(), 3), tmp_path / 'x' if path == 'x' else
                    os.path.join(tmp_path, path), cases.small(), overwrite=True)
    assert os.listdir(tmp_path) == ['file']
