"""The disk tier: names, listing, budget and rivals in one directory."""

from __future__ import annotations

from dataclasses import replace
import errno
import os
from pathlib import Path
import shutil
import stat
import sys
import threading

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import codec_cases as cases  # noqa: E402

from flashrt_ros.capsule import codec, faults, tiers  # noqa: E402
from flashrt_ros.capsule.names import check_name, is_name  # noqa: E402
from flashrt_ros.capsule.tiers import DiskTier  # noqa: E402
from flashrt_ros.errors import (  # noqa: E402
    Capacity,
    Corrupt,
    Incompatible,
    InvalidName,
    NameExists,
    Storage,
    UnknownCapsule,
)

MANIFEST = cases.small()
BAD_NAMES = ['', '.', '..', '../x', 'a/b', '/etc/passwd', 'a\0', 'a\n', 'a' * 129, 'a' * 300, '-a',
             '_a', '.a', 'é', 'имя', '名前', 'a b', 'a\\b', '٣', None, 7, b'a', '\ud800', '~',
             'a:b', '%2e%2e']


@pytest.fixture
def tier(tmp_path):
    return DiskTier(tmp_path / 'capsules')


def put(tier, name='scene', position=10, overwrite=False, **fields):
    return tier.put(cases.image(MANIFEST, position, name=name, **fields), MANIFEST, overwrite)


@pytest.fixture
def settled(monkeypatch):
    """Trust the times of files at once, so that the cache of headers is used."""
    monkeypatch.setattr(tiers, '_SETTLED', -1)


@pytest.mark.parametrize('name', BAD_NAMES, ids=ascii)
def test_bad_names_are_refused_with_the_rule(tier, name):
    assert not is_name(name)
    for verb in (check_name, tier.path, tier.remove):
        with pytest.raises(InvalidName, match='a name is 1 to 128 characters') as caught:
            verb(name)
        assert len(str(caught.value)) < 300
        str(caught.value).encode('ascii')
    with pytest.raises(UnknownCapsule):
        tier.get(name, MANIFEST)


@pytest.mark.parametrize('name', ['a', '0', 'A.b-c_d', 'a..b', 'a' * 128, 'scene.capsule', 'x.tmp'])
def test_good_names(tier, name):
    put(tier, name)
    assert [h.name for h, _ in tier.headers()] == [name]
    assert tier.get(name, MANIFEST).header.name == name
    assert tier.path(name).parent == tier.directory
    tier.remove(name)
    assert tier.headers() == []


def test_put_get_list_remove(tier):
    sizes = {name: put(tier, name, n, id=f'id-{name}') for name, n in (('b', 3), ('a', 70))}
    assert [(h.name, s) for h, s in tier.headers()] == [('a', sizes['a']), ('b', sizes['b'])]
    cases.assert_equal(tier.get('id-a', MANIFEST), cases.image(MANIFEST, 70))
    assert tier.find('id-b') == 'b' and tier.find('b') == 'b'
    assert tier.remove('a') == sizes['a']
    for verb in (lambda: tier.get('a', MANIFEST), lambda: tier.get('id-a', MANIFEST),
                 lambda: tier.remove('a')):
        with pytest.raises(UnknownCapsule, match=r'\.$'):
            verb()
    assert [h.name for h, _ in tier.headers()] == ['b']


def test_the_directory_is_made_on_demand_and_private(tmp_path):
    tier = DiskTier(tmp_path / 'deep' / 'capsules')
    assert tier.headers() == [] and not (tmp_path / 'deep').exists()
    with pytest.raises(UnknownCapsule):
        tier.get('a', MANIFEST)
    put(tier)
    assert stat.S_IMODE(tier.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(tier.path('scene').stat().st_mode) == 0o600


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(Storage, match='Creating the capsule directory'):
        put(DiskTier(tmp_path / 'file' / 'capsules'))
    with pytest.raises(Storage, match='Listing|Creating'):
        put(DiskTier(tmp_path / 'file'))
    with pytest.raises(Storage, match='Listing'):
        DiskTier(tmp_path / 'file').headers()
    with faults.fail_at('tier.make_directory', errno.EROFS):
        with pytest.raises(Storage, match='read-only'):
            put(DiskTier(tmp_path / 'x'))


def test_overwriting(tier):
    put(tier)
    with pytest.raises(NameExists):
        put(tier, position=20)
    assert tier.get('scene', MANIFEST).header.position == 10
    put(tier, position=20, overwrite=True)
    assert tier.get('scene', MANIFEST).header.position == 20


def test_unreadable_files_are_skipped_and_reported(tier, tmp_path):
    put(tier)
    put(tier, 'cut')
    os.truncate(tier.path('cut'), 100)
    outside = tmp_path / 'outside'
    codec.write(cases.image(MANIFEST, 3), outside, MANIFEST, overwrite=False)
    os.symlink(outside, tier.path('link'))
    os.symlink(tmp_path / 'nowhere', tier.path('dangling'))
    tier.path('folder').mkdir()
    os.mkfifo(tier.path('fifo'))
    (tier.directory / '-bad.capsule').touch()
    (tier.directory / os.fsdecode(b'\xff.capsule')).touch()
    (tier.directory / 'empty.capsule').touch()
    (tier.directory / 'other.txt').touch()
    (tier.directory / '.flashrt-00000000-1-0123456789abcdef.tmp').touch()
    for _ in range(2):
        assert [h.name for h, _ in tier.headers()] == ['scene']
        reasons = {path.name: reason for path, reason in tier.problems()}
        assert reasons.keys() == {
            'cut.capsule', 'link.capsule', 'dangling.capsule', 'folder.capsule', 'fifo.capsule',
            '-bad.capsule', os.fsdecode(b'\xff.capsule'), 'empty.capsule'}
        assert 'truncated' in reasons['cut.capsule'] and 'a directory' in reasons['folder.capsule']
        assert 'symbolic link' in reasons['link.capsule']
        assert '1 to 128 characters' in reasons['-bad.capsule']
    with pytest.raises(Storage, match='symbolic link'):
        tier.get('link', MANIFEST)
    with pytest.raises(Corrupt):
        tier.get('cut', MANIFEST)
    tier.remove('link')
    assert outside.exists(), 'removing a link leaves its target'
    with pytest.raises(Storage, match='Removing'):
        tier.remove('folder')


def test_a_link_is_never_written_through(tier, tmp_path):
    put(tier)
    outside = tmp_path / 'outside'
    outside.write_text('mine')
    os.symlink(outside, tier.path('link'))
    with pytest.raises(NameExists):
        put(tier, 'link')
    put(tier, 'link', overwrite=True)
    assert outside.read_text() == 'mine' and not tier.path('link').is_symlink()


def test_a_file_may_be_copied_or_renamed(tier):
    put(tier)
    shutil.copy(tier.path('scene'), tier.path('copy'))
    os.rename(tier.path('scene'), tier.path('moved'))
    assert [h.name for h, _ in tier.headers()] == ['copy', 'moved']
    assert tier.get('moved', MANIFEST).header.name == 'moved'


def test_headers_are_cached_until_a_file_changes(tier, settled):
    put(tier, 'a')
    put(tier, 'b')
    tier.headers()
    read = []
    with faults.observe(lambda p: read.append(p) if p == 'atomic.open' else None):
        assert len(tier.headers()) == 2 and read == []
        put(tier, 'b', position=11, overwrite=True)
        assert [h.position for h, _ in tier.headers()] == [10, 11] and len(read) == 1
        data = bytearray(tier.path('a').read_bytes())
        data[20] ^= 1
        tier.path('a').write_bytes(data)
        assert [h.name for h, _ in tier.headers()] == ['b']
        assert [p.name for p, _ in tier.problems()] == ['a.capsule']


def test_a_young_file_is_read_again_because_its_times_may_repeat(tier):
    put(tier)
    read = []
    with faults.observe(lambda p: read.append(p) if p == 'atomic.open' else None):
        tier.headers()
        os.utime(tier.path('scene'), (2e9, 2e9))  # a clock that is ahead
        tier.headers()
        tier.headers()
    assert len(read) == 3


def test_a_passing_read_error_is_not_remembered(tier, settled):
    put(tier)
    with faults.fail_at('codec.read', errno.EIO):
        assert tier.headers() == [] and 'check the disk' in tier.problems()[0][1]
    assert len(tier.headers()) == 1 and tier.problems() == []


def test_a_listing_error_is_a_storage_error(tier):
    with faults.fail_at('tier.list', errno.EACCES), pytest.raises(Storage, match='permission'):
        tier.headers()


def test_oversize_is_refused_before_anything_is_written(tmp_path):
    size = codec.file_bytes(cases.image(MANIFEST, 100), MANIFEST)
    tier = DiskTier(tmp_path, size - 1)
    passed = []
    with faults.observe(passed.append):
        with pytest.raises(Capacity, match='larger than the whole disk budget'):
            put(tier, position=100)
    assert 'atomic.create' not in passed and os.listdir(tmp_path) == []
    assert put(DiskTier(tmp_path, size), position=100) == size


def test_the_budget_holds_under_churn(tmp_path):
    size = codec.file_bytes(cases.image(MANIFEST, 100, name='a'), MANIFEST)
    tier = DiskTier(tmp_path, 2 * size)
    put(tier, 'a', 100)
    put(tier, 'b', 100)
    with pytest.raises(Capacity, match='drop capsules or raise the budget'):
        put(tier, 'c', 1)
    put(tier, 'b', 100, overwrite=True)  # replacing counts once
    put(tier, 'b', 50, overwrite=True)
    put(tier, 'c', 1)
    with pytest.raises(Capacity):
        put(tier, 'b', 100, overwrite=True)
    tier.remove('a')
    put(tier, 'b', 100, overwrite=True)
    assert sum(s for _, s in tier.headers()) <= 2 * size


def test_the_budget_holds_with_several_threads(tmp_path):
    image = cases.image(MANIFEST, 100)
    size = codec.file_bytes(replace(image, header=replace(image.header, name='n0')), MANIFEST)
    tier = DiskTier(tmp_path, 3 * size)
    said = []

    def work(index):
        try:
            put(tier, f'n{index}', 100)
            said.append('ok')
        except Capacity:
            said.append('full')

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == ['full'] * 5 + ['ok'] * 3
    assert len(tier.headers()) == 3


def test_identity_is_checked_on_get(tier):
    put(tier)
    with pytest.raises(Incompatible, match='weights'):
        tier.get('scene', MANIFEST, tiers.Fingerprint({'weights': 'x'}, {}))
    with pytest.raises(Incompatible, match='manifest'):
        tier.get('scene', cases.manifests()['bf16'])
    with pytest.raises(Capacity, match='room for 10 rows'):
        tier.get('scene', MANIFEST, capacity=9)
    tier.get('scene', MANIFEST, tiers.Fingerprint({'weights': 'w'}, {'threads': 99}))


def test_a_file_dropped_while_listing_is_no_problem(tier):
    put(tier, 'a')
    put(tier, 'b')

    def drop(point):
        if point == 'atomic.open' and tier.path('a').exists():
            tier.path('a').unlink()

    with faults.observe(drop):
        assert [h.name for h, _ in tier.headers()] == ['b']
    assert tier.problems() == []
