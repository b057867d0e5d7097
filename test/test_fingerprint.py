"""Fingerprints: what refuses, what only costs exactness, and the digest of weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
import time

import pytest
import torch

from flashrt_ros.arena import Buffer, Manifest, Role
from flashrt_ros.capsule import fingerprint, weights
from flashrt_ros.capsule.fingerprint import build, Fingerprint, weights_digest
from flashrt_ros.errors import Corrupt, Incompatible, Storage


class FakeText:
    def __init__(self, tokens='t', chat='c'):
        self._tokens, self._chat = tokens, chat

    def digest(self):
        return self._tokens

    def chat_digest(self):
        return self._chat


class FakeModel:
    """A model of two tensors, from files, from a seed or from nowhere."""

    def __init__(self, spec='memory', files=(), scale=1.0, **architecture):
        self.spec, self.weight_files, self.dtype = spec, list(files), torch.float32
        self._scale = scale
        self._architecture = {'hidden': 8, 'rope': {'theta': 10000.0, 'kind': 'default'},
                              **architecture}

    def weights(self):
        yield 'a', torch.arange(12.0).reshape(3, 4).t() * self._scale
        yield 'b', torch.ones(5, dtype=torch.bfloat16)

    def architecture(self):
        return self._architecture


def manifest(dtype=torch.float32):
    return Manifest([Buffer('k', Role.ROWS, dtype, (2, 4)),
                     Buffer('logits', Role.BOUNDARY, torch.float32, (9,))])


HERE = build(FakeModel(), manifest(), FakeText())
THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def same_threads():
    """Engines of other tests set the thread count of the process, which is a soft field."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def test_the_same_thing_is_compatible_and_exact():
    again = build(FakeModel(), manifest(), FakeText())
    assert again == HERE and again.digest == HERE.digest and len(HERE.digest) == 16
    assert HERE.refuse_unless_compatible(again) == [] and HERE.exact_future(again)
    stored = json.loads(json.dumps(HERE.to_json()))
    assert Fingerprint.from_json(stored) == HERE
    assert HERE.refuse_unless_compatible(stored) == [] and HERE.exact_future(stored)
    assert {'weights', 'architecture', 'dtype', 'manifest', 'layout_version', 'tokenizer',
            'adapter'} == HERE.hard.keys()
    assert {'device', 'kernel_sources', 'torch', 'numpy', 'package', 'threads', 'cpu_capability',
            'grid'} <= HERE.soft.keys()


@pytest.mark.parametrize('other, match', [
    (build(FakeModel(scale=2.0), manifest(), FakeText()), 'weights is "tensors:'),
    (build(FakeModel(rope={'theta': 500000.0, 'kind': 'default'}), manifest(), FakeText()),
     r'architecture.rope.theta is 500000.0 in the capsule and 10000.0 here'),
    (build(FakeModel(extra=True), manifest(), FakeText()),
     r'architecture.extra is true in the capsule and \(absent\) here'),
    (build(FakeModel(), manifest(torch.bfloat16), FakeText()),
     r'manifest.buffers.k is "rows bfloat16 \[2, 4\]" in the capsule and "rows float32 \[2, 4\]"'),
    (build(FakeModel(), Manifest(manifest().buffers[:0:-1]), FakeText()), 'manifest.order is'),
    (build(FakeModel(), manifest(), FakeText(tokens='u')), 'tokenizer is "u" in the capsule'),
    (build(FakeModel(), manifest(), None), 'tokenizer is null in the capsule and "t" here'),
    (build(FakeModel(), manifest(), FakeText(), adapter='lora'), 'adapter is "lora"'),
])
def test_hard_fields_refuse_and_are_named_with_both_values(other, match):
    with pytest.raises(Incompatible, match=match) as caught:
        HERE.refuse_unless_compatible(other)
    assert str(caught.value).startswith('The capsule was saved by something else: ')
    assert other.digest != HERE.digest


def test_every_differing_hard_field_is_named():
    model = FakeModel(scale=3.0, hidden=16, long='x' * 5000)
    model.dtype = torch.bfloat16
    with pytest.raises(Incompatible) as caught:
        HERE.refuse_unless_compatible(build(model, manifest(), FakeText(tokens='u')))
    message = str(caught.value)
    for field in ('weights', 'architecture.hidden', 'architecture.long', 'dtype', 'tokenizer'):
        assert f'{field} is ' in message
    assert len(message) < 1000, 'long values are shortened'


def test_soft_fields_are_reported_and_cost_exactness_only():
    other = build(FakeModel(), manifest(), FakeText(), grid=256, soft={'tuned': {'mm': 3}})
    said = HERE.refuse_unless_compatible(other)
    assert 'grid is 256 in the capsule and 512 here' in said
    assert 'tuned.mm is 3 in the capsule and (absent) here' in said and len(said) == 2
    assert not HERE.exact_future(other) and HERE.digest == other.digest
    assert HERE.full_digest != other.full_digest


def test_the_chat_template_only_warns():
    other = build(FakeModel(), manifest(), FakeText(chat='d'))
    assert HERE.refuse_unless_compatible(other) == [] and HERE.exact_future(other)
    assert HERE.warnings(other) == ['chat_template is "d" in the capsule and "c" here']


@pytest.mark.parametrize('data', [None, [], {}, {'hard': {}}, {'hard': {}, 'soft': []},
                                  {'hard': {}, 'soft': {}, 'more': {}}])
def test_malformed_fingerprints_are_corrupt(data):
    with pytest.raises(Corrupt, match='fingerprint'):
        Fingerprint.from_json(data)


def test_one_differs_from_true_and_from_one_point_zero():
    assert fingerprint.differences({'x': 1}, {'x': True}) and fingerprint.differences(
        {'x': 1}, {'x': 1.0}) and not fingerprint.differences({'x': [1]}, {'x': [1]})


def test_an_empty_object_differs_from_an_absent_one():
    assert fingerprint.differences({'x': {}}, {}) == ['x is {} in the capsule and (absent) here']
    assert fingerprint.differences({'x.y': 1}, {'x': {'y': 1}}) == [
        'the nesting of the fields differs']
    assert fingerprint.differences({}, {}) == []


def test_sources_digest_sees_every_kernel_file():
    root = Path(fingerprint.__file__).parents[1]
    whole = fingerprint.sources_digest('capsule')
    assert whole == fingerprint.sources_digest('capsule') and len(whole) == 32
    assert whole != fingerprint.sources_digest('capsule/names.py')
    assert root.name == 'flashrt_ros'


# -- weights --------------------------------------------------------------------------------------

def test_tensors_in_memory_are_hashed_whole():
    one = weights_digest(FakeModel())
    assert one.startswith('tensors:') and one == weights_digest(FakeModel(spec='elsewhere'))
    assert one != weights_digest(FakeModel(scale=1.0000001))


def test_seeded_weights_hash_the_spec_and_a_sample():
    one = weights_digest(FakeModel('random:tiny'))
    assert one.startswith('seeded:') and one == weights_digest(FakeModel('random:tiny'))
    assert one != weights_digest(FakeModel('random:tiny?seed=1'))
    assert one != weights_digest(FakeModel('random:tiny', scale=2.0))


@pytest.fixture
def files(tmp_path):
    """Two old weight files, worth a cache."""
    result = []
    for name, byte in (('model-2.safetensors', b'b'), ('model-1.safetensors', b'a')):
        path = tmp_path / 'model' / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(byte * 1000)
        result.append(path)
    return result


@pytest.fixture(autouse=True)
def no_user_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'user-cache'))


@pytest.fixture
def cached(monkeypatch):
    """Cache small and young files too; return the list of files hashed."""
    hashed = []
    real = weights._hash_file
    monkeypatch.setattr(weights, 'CACHE_FROM', 0)
    monkeypatch.setattr(weights, '_SETTLED', -1.0)
    monkeypatch.setattr(weights, '_hash_file', lambda p: hashed.append(p.name) or real(p))
    return hashed


def test_files_are_hashed_by_content_in_the_order_of_their_names(files, tmp_path):
    one = weights_digest(FakeModel(files=files))
    assert one.startswith('files:') and one == weights_digest(FakeModel(files=files[::-1]))
    copies = []
    for index, path in enumerate(sorted(files)):
        copies.append(tmp_path / f'shard{index}')
        copies[-1].write_bytes(path.read_bytes())
    assert weights_digest(FakeModel(files=copies)) == one, 'names are no content'
    files[0].write_bytes(b'c' * 1000)
    assert weights_digest(FakeModel(files=files)) != one
    assert not (files[0].parent / weights.CACHE_NAME).exists(), 'small models need no cache'


def test_the_cache_is_used_and_never_trusts_a_name(files, cached):
    one = weights_digest(FakeModel(files=files))
    assert cached == ['model-1.safetensors', 'model-2.safetensors']
    cache = files[0].parent / weights.CACHE_NAME
    assert cache.exists() and cache.stat().st_mode & 0o777 == 0o600
    del cached[:]
    assert weights_digest(FakeModel(files=files)) == one and cached == []
    # Same name, size and modification time, but other content written in place.
    info = files[0].stat()
    with open(files[0], 'r+b') as file:
        file.write(b'x')
    os.utime(files[0], ns=(info.st_atime_ns, info.st_mtime_ns))
    other = weights_digest(FakeModel(files=files))
    assert other != one and cached == ['model-2.safetensors']
    # The same again through a replaced file.
    twin = files[0].with_suffix('.new')
    twin.write_bytes(b'b' * 1000)
    os.utime(twin, ns=(info.st_atime_ns, info.st_mtime_ns))
    os.replace(twin, files[0])
    assert weights_digest(FakeModel(files=files)) == one


def test_a_young_file_is_not_cached(files, cached, monkeypatch):
    monkeypatch.setattr(weights, '_SETTLED', 3600.0)
    weights_digest(FakeModel(files=files))
    assert not (files[0].parent / weights.CACHE_NAME).exists()


@pytest.mark.parametrize('damage', [
    b'', b'\0' * 100, b'{}', b'[]', b'null', b'{"version": 1, "digests": 3}', b'[' * 100000,
    b'x' * (2 << 20), None], ids=range(9))
def test_a_corrupted_cache_is_ignored_and_mended(files, cached, damage):
    one = weights_digest(FakeModel(files=files))
    cache = files[0].parent / weights.CACHE_NAME
    if damage is None:  # a digest that was altered by hand
        data = json.loads(cache.read_text())
        key = next(iter(data['digests']))
        data['digests'][key] = '0' * 64
        damage = json.dumps(data).encode()
    cache.write_bytes(damage)
    assert weights_digest(FakeModel(files=files)) == one
    del cached[:]
    assert weights_digest(FakeModel(files=files)) == one and cached == []


def test_where_the_checkpoint_cannot_be_written_the_user_cache_is_used(files, cached, tmp_path,
                                                                      monkeypatch):
    real = weights.atomic_file

    def refuse(path, **kwargs):
        if Path(path).parent == files[0].parent:
            raise Storage('read-only')
        return real(path, **kwargs)

    monkeypatch.setattr(weights, 'atomic_file', refuse)
    one = weights_digest(FakeModel(files=files))
    assert (tmp_path / 'user-cache' / 'flashrt_ros' / weights.CACHE_NAME).exists()
    del cached[:]
    assert weights_digest(FakeModel(files=files)) == one and cached == []
    monkeypatch.setattr(weights, 'atomic_file', lambda *a, **k: refuse(files[0]))
    (tmp_path / 'user-cache' / 'flashrt_ros' / weights.CACHE_NAME).unlink()
    assert weights_digest(FakeModel(files=files)) == one, 'no cache at all is no fault'


def test_a_file_changed_while_it_is_hashed_is_not_cached(files, cached, monkeypatch):
    inner = weights._hash_file

    def hash_and_touch(path):
        digest = inner(path)
        time.sleep(0.02)
        os.utime(path)
        return digest

    monkeypatch.setattr(weights, '_hash_file', hash_and_touch)
    weights_digest(FakeModel(files=files))
    assert not (files[0].parent / weights.CACHE_NAME).exists()


def test_a_missing_weight_file_is_a_storage_error(files):
    files[0].unlink()
    with pytest.raises(Storage, match='weight file cannot be read'):
        weights_digest(FakeModel(files=files))
