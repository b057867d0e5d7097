"""Damaged, forged and foreign capsule files: every one is refused by a typed error."""

from __future__ import annotations

from dataclasses import replace
import json
import os
from pathlib import Path
import sys

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import codec_cases as cases  # noqa: E402

from flashrt_ros.arena import Buffer, Manifest, Role  # noqa: E402
from flashrt_ros.capsule import codec  # noqa: E402
from flashrt_ros.capsule.fingerprint import Fingerprint  # noqa: E402
from flashrt_ros.errors import Capacity, Corrupt, Incompatible, Storage, UnknownCapsule  # noqa: E402

POSITION = 20
MANIFEST = cases.manifests()['bf16']


@pytest.fixture
def path(tmp_path):
    path = tmp_path / 'scene.capsule'
    codec.write(cases.image(MANIFEST, POSITION), path, MANIFEST, overwrite=False)
    return path


def refuse(path, error=Corrupt, match=None, header_too=True):
    """All readers refuse; without ``header_too`` the header alone is still readable."""
    with pytest.raises(error, match=match) as caught:
        codec.read(path, MANIFEST)
    message = str(caught.value)
    assert message.endswith('.') and message[0].isupper() and len(message) < 1000, message
    if error is Corrupt:
        with pytest.raises(Corrupt):
            codec.verify(path)
        if header_too:
            with pytest.raises(Corrupt):
                codec.read_header(path)
    return message


def flip(path, offset, bit):
    """Flip one bit in place; a second call mends it."""
    with open(path, 'r+b', buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), offset)


def borders(path):
    """Offsets of the length, the header, and the start and end of every region."""
    table, payload = cases.parts(path)
    start = path.stat().st_size - len(payload)
    spans = {name: [start + o for o in item['data_offsets']]
             for name, item in table.items() if name != '__metadata__'}
    return start, spans


def test_a_flipped_bit_in_each_region_names_the_region(path):
    whole = path.read_bytes()
    _, spans = borders(path)
    assert spans.keys() == {d['name'] for d in MANIFEST.describe()}
    for name, (begin, end) in spans.items():
        for offset, bit in ((begin, 0), ((begin + end) // 2, 3), (end - 1, 7)):
            flip(path, offset, bit)
            refuse(path, match=f'Region {name!r} .*altered', header_too=False)
            flip(path, offset, bit)
    assert path.read_bytes() == whole


def test_a_flipped_bit_anywhere_in_the_header_is_refused(path):
    whole = path.read_bytes()
    start, _ = borders(path)
    for offset in range(start):
        flip(path, offset, offset % 8)
        # Only a version that reads as another number is taken for a file of the future.
        with pytest.raises((Corrupt, Incompatible)) as caught:
            codec.read_header(path)
        assert caught.type is Corrupt or 'format version' in str(caught.value)
        flip(path, offset, offset % 8)
    assert path.read_bytes() == whole


def test_truncation_at_and_around_every_border(path):
    whole = path.read_bytes()
    start, spans = borders(path)
    cuts = {0, 1, 7, 8, 9, start - 1, start, start + 1}
    cuts |= {o + d for span in spans.values() for o in span for d in (-1, 0, 1)}
    for cut in sorted(c for c in cuts if c < len(whole)):
        path.write_bytes(whole[:cut])
        refuse(path, match='truncated')


@pytest.mark.parametrize('more', [b'\0', b'x' * 100, None])
def test_trailing_bytes(path, more):
    path.write_bytes(path.read_bytes() + (path.read_bytes() if more is None else more))
    refuse(path, match='trailing bytes')


@pytest.mark.parametrize('content', [
    b'', b'\0', b'\0' * 8, b'\0' * 4096, b'\xff' * 8, b'\xff' * 4096,
    (2).to_bytes(8, 'little') + b'{}', (4).to_bytes(8, 'little') + b'null',
    (1 << 40).to_bytes(8, 'little') + b'{}', b'PK\x03\x04' + b'\0' * 600,
    (200_000).to_bytes(8, 'little') + b'[' * 200_000,
    (200_000).to_bytes(8, 'little') + b'{"a":' * 40_000,
    (200_000).to_bytes(8, 'little') + b'9' * 200_000,
    (13).to_bytes(8, 'little') + b'{"a":1,"a":2}',
], ids=lambda c: repr(c[:12]))
def test_files_that_are_no_capsules(path, content):
    path.write_bytes(content)
    refuse(path)


def test_other_safetensors_files_are_refused(path):
    from safetensors.torch import save_file
    save_file({'a': torch.zeros(3)}, path)
    refuse(path, match='no capsule file')
    save_file({'a': torch.zeros(3)}, path, metadata={'format': 'pt'})
    refuse(path, match='no capsule file')


def test_missing_file(tmp_path):
    for name in ('none', 'no/directory', 'nul\0byte'):
        with pytest.raises(UnknownCapsule, match=r'\.$'):
            codec.read(os.path.join(tmp_path, name), MANIFEST)
        with pytest.raises(UnknownCapsule):
            codec.verify(os.path.join(tmp_path, name))


def test_things_that_are_no_regular_files(tmp_path, path):
    (tmp_path / 'directory').mkdir()
    os.mkfifo(tmp_path / 'fifo')
    os.symlink(path, tmp_path / 'link')
    refuse(tmp_path / 'directory', match='a directory')
    refuse(tmp_path / 'fifo', match='no regular file')  # and it does not wait for a writer
    refuse(tmp_path / 'link', Storage, match='symbolic link')
    refuse(path / 'x', Storage, match='ENOTDIR')


@pytest.mark.parametrize('rows', [10 ** 12, 10 ** 9, 1 << 31, (1 << 31) + 1, -1, 19, 21, True,
                                  20.0, '20', None, 10 ** 400])
def test_absurd_row_counts_are_refused_before_anything_is_allocated(path, rows, monkeypatch):
    cases.forge(path, lambda table, ours: ours.update(position=rows))
    monkeypatch.setattr(torch, 'empty', lambda *a, **k: pytest.fail('allocated'))
    monkeypatch.setattr(torch, 'zeros', lambda *a, **k: pytest.fail('allocated'))
    refuse(path)


def test_a_consistent_claim_of_many_rows_is_still_a_truncated_file(path, monkeypatch):
    def edit(table, ours):
        ours['position'] = rows = 10 ** 9
        offset = 0
        for name, item in table.items():
            if name == '__metadata__':
                continue
            size = item['data_offsets'][1] - item['data_offsets'][0]
            if MANIFEST.by_name[name].role is Role.ROWS:
                item['shape'][0] = rows
                size = size // POSITION * rows
            item['data_offsets'] = [offset, offset + size]
            offset += size
        ours['payload_bytes'] = offset

    cases.forge(path, edit)
    monkeypatch.setattr(torch, 'empty', lambda *a, **k: pytest.fail('allocated'))
    refuse(path, match='truncated: .* 1000000000 rows')


def table_edits():
    yield 'missing', lambda t, o: t.pop('k'), "missing \\['k'\\]"
    yield 'added', lambda t, o: t.update(extra=dict(t['k'])), "added \\['extra'\\]"
    yield 'renamed', lambda t, o: t.update(kk=t.pop('k')), 'missing .* added'
    yield 'shape', lambda t, o: t['k'].update(shape=[20, 16, 1]), "Region 'k'"
    yield 'dtype', lambda t, o: t['k'].update(dtype='F16'), "Region 'k'"
    yield 'offsets', lambda t, o: t['k'].update(data_offsets=[0, 640]), "Region '"
    yield 'swapped', lambda t, o: t.update(
        k={**t['k'], 'data_offsets': t['v']['data_offsets']},
        v={**t['v'], 'data_offsets': t['k']['data_offsets']}), "Region '"
    yield 'no shape', lambda t, o: t['k'].pop('shape'), "Region 'k'"
    yield 'no object', lambda t, o: t.update(k=3), "Region 'k'"
    yield 'no metadata', lambda t, o: t.pop('__metadata__'), 'no capsule'
    yield 'more metadata', lambda t, o: t['__metadata__'].update(x='y'), 'metadata'
    yield 'no digest', lambda t, o: o['digests'].pop('k'), 'digests'
    yield 'digest added', lambda t, o: o['digests'].update(x='0' * 64), 'digests'
    yield 'digest short', lambda t, o: o['digests'].update(k='00'), 'digests'
    yield 'digests null', lambda t, o: o.update(digests=None), 'digests'
    yield 'padding claimed', lambda t, o: o['digests'].update({'~padding': '0' * 64}), 'padding'
    yield 'payload', lambda t, o: o.update(payload_bytes=1), 'payload'
    yield 'manifest gone', lambda t, o: o.update(manifest=[]), 'manifest'
    yield 'manifest twice', lambda t, o: o['manifest'].append(o['manifest'][-1]), 'manifest'
    yield 'manifest scratch', lambda t, o: o['manifest'][1].update(role='scratch'), 'manifest'
    yield 'manifest dtype', lambda t, o: o['manifest'][1].update(dtype='qint8'), 'manifest'
    yield 'manifest dtype list', lambda t, o: o['manifest'][1].update(dtype=[]), 'manifest'
    yield 'manifest shape', lambda t, o: o['manifest'][1].update(shape=[1 << 41]), 'manifest'
    yield 'manifest shape 0', lambda t, o: o['manifest'][1].update(shape=[0]), 'manifest'
    yield 'manifest deep', lambda t, o: o['manifest'][1].update(shape=[1] * 99), 'manifest'
    yield 'manifest name', lambda t, o: o['manifest'][1].update(name='../x'), 'manifest'
    yield 'manifest key', lambda t, o: o['manifest'][1].update(more=1), 'manifest'
    yield 'no position', lambda t, o: o['manifest'].pop(0), 'position|manifest'
    yield 'field gone', lambda t, o: o.pop('note'), 'note'
    yield 'field added', lambda t, o: o.update(zzz=1), 'zzz'
    yield 'name', lambda t, o: o.update(name='../../etc'), 'name'
    yield 'id', lambda t, o: o.update(id=''), 'id'
    yield 'note half', lambda t, o: o.update(note='\ud800'), 'note'
    yield 'created', lambda t, o: o.update(created='now'), 'created'
    yield 'aligned', lambda t, o: o.update(aligned=1), 'aligned'
    yield 'host', lambda t, o: o.update(host=[]), 'host'
    yield 'fingerprint', lambda t, o: o.update(fingerprint={'hard': {}}), 'fingerprint'
    yield 'fingerprint list', lambda t, o: o.update(fingerprint={'hard': [], 'soft': {}}), 'finger'
    yield 'infinite', lambda t, o: o.update(created=float('inf')), 'JSON'
    yield 'nan', lambda t, o: o.update(host={'x': float('nan')}), 'JSON'
    yield 'inner version', lambda t, o: o.update(format_version=2), 'format_version'


@pytest.mark.parametrize('edit, match', [pytest.param(e, m, id=n) for n, e, m in table_edits()])
def test_a_forged_header_with_a_right_digest_is_refused(path, edit, match):
    cases.forge(path, edit)
    refuse(path, match=match)


def test_json_out_of_range_and_doubled_keys_with_a_right_digest(path):
    whole = path.read_bytes()
    table, payload = cases.parts(path)
    table['__metadata__']['blake3'] = '0' * 64
    ours = table['__metadata__']['header']
    for old, new in (('1700000000.25', '1e999'), ('"aligned":false', '"aligned":0,"aligned":false'),
                     ('"position":20', '"position":2' + '0' * 5000),
                     ('"note":', '"id":"x","note":')):
        assert old in ours
        table['__metadata__']['header'] = ours.replace(old, new)
        path.write_bytes(cases.seal(json.dumps(table, separators=(',', ':'))) + payload)
        refuse(path, match='JSON')
    path.write_bytes(whole)
    codec.read(path, MANIFEST)


def test_a_position_that_contradicts_the_fixed_block(path):
    image = cases.image(MANIFEST, POSITION)
    table, payload = cases.parts(path)
    begin, end = table['position']['data_offsets']
    payload = payload[:begin] + (19).to_bytes(8, 'little') + payload[end:]
    digest = codec.blake3((19).to_bytes(8, 'little')).hexdigest()
    cases.forge(path, lambda t, o: o['digests'].update(position=digest), payload)
    refuse(path, match='fixed block says 19', header_too=False)
    assert image.header.position == POSITION


def test_another_format_version_is_incompatible(path):
    def edit(table, ours):
        table['__metadata__']['format_version'] = '2'

    cases.forge(path, edit)
    refuse(path, Incompatible, match="version '2'; this package reads version 1")


def changed(which, **fields):
    return Manifest([replace(b, **fields) if b.name == which else b for b in MANIFEST.buffers[1:]])


@pytest.mark.parametrize('other, match', [
    (changed('k', dtype=torch.float16), "'k' has dtype bfloat16 in the capsule and float16 here"),
    (changed('k', shape=(4, 8)), r"'k' has shape \[4, 4\] in the capsule and \[4, 8\] here"),
    (changed('k', name='kk'), "'kk' is missing in the capsule; 'k' is unknown here"),
    (changed('logits', role=Role.CONV), "'logits' has role boundary"),
    (Manifest(MANIFEST.buffers[1:-1]), "'odd' is unknown here"),
    (Manifest([*MANIFEST.buffers[1:], Buffer('new', Role.CONV, torch.float32, (1,))]),
     "'new' is missing in the capsule"),
    (Manifest(MANIFEST.buffers[:0:-1]), 'order'),
])
def test_another_manifest_is_incompatible_and_named(path, other, match, monkeypatch):
    monkeypatch.setattr(torch, 'empty', lambda *a, **k: pytest.fail('allocated'))
    with pytest.raises(Incompatible, match=match):
        codec.read(path, other)
    codec.verify(path)


def test_the_fingerprint_refuses_before_the_payload_is_read(path):
    here = Fingerprint({'weights': 'other'}, {'threads': 4})
    with codec.faults.observe(lambda point: None), pytest.raises(
            Incompatible, match='weights is "w" in the capsule and "other" here'):
        codec.read(path, MANIFEST, here)
    codec.read(path, MANIFEST, Fingerprint({'weights': 'w'}, {'threads': 4}))


def test_capacity_has_to_suffice(path):
    codec.read(path, MANIFEST, capacity=20)
    with pytest.raises(Capacity, match='room for 20 rows, but there is room for 19'):
        codec.read(path, MANIFEST, capacity=19)


def test_memory_that_does_not_suffice_is_a_capacity_error(path, monkeypatch):
    def empty(*args, **kwargs):
        raise RuntimeError('DefaultCPUAllocator: not enough memory')

    monkeypatch.setattr(torch, 'empty', empty)
    with pytest.raises(Capacity, match='bytes of memory'):
        codec.read(path, MANIFEST)


def test_a_file_that_shrinks_while_it_is_read(path):
    def shrink(point):
        if point == 'codec.read' and path.stat().st_size > 100:
            os.truncate(path, 100)

    with codec.faults.observe(shrink), pytest.raises(Corrupt, match='shorter'):
        codec.read(path, MANIFEST)


@pytest.mark.parametrize('nth', [1, 2, 3, 9])
def test_a_reading_error_is_a_storage_error(path, nth):
    with codec.faults.fail_at('codec.read', nth=nth) as passed:
        with pytest.raises(Storage, match='Reading .* EIO|Reading .*EIO'):
            codec.read(path, MANIFEST)
    assert passed.count('codec.read') == nth
