"""Crashes, full disks and rivals in the middle of a write: the old capsule stays whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import codec_cases as cases  # noqa: E402

from flashrt_ros.capsule import atomic, codec, faults  # noqa: E402
from flashrt_ros.capsule.tiers import DiskTier  # noqa: E402
from flashrt_ros.errors import NameExists, Storage  # noqa: E402

MANIFEST = cases.small()
POINTS = ('atomic.create', 'codec.write', 'codec.write_header', 'atomic.fsync', 'atomic.publish')

# A process that forks writers, so that torch is imported once. Its commands: a function and words.
PRELUDE = """
import os, sys, time
import torch
torch.set_num_threads(1)  # a pool of threads does not survive a fork
sys.path[:0] = {path!r}
import codec_cases as cases
from flashrt_ros.capsule import codec, faults
from flashrt_ros.capsule.tiers import DiskTier
from flashrt_ros.errors import FlashrtError
manifest = cases.small()
"""


def script(body: str) -> list[str]:
    root = Path(codec.__file__).parents[2]
    prelude = PRELUDE.format(path=[str(root), str(Path(__file__).parent)])
    return [sys.executable, '-c', prelude + body]


ENDLESS_WRITER = """
images = [cases.image(manifest, n, seed=n, id=f'id{n}') for n in (500, 1000)]
for start, line in enumerate(sys.stdin):
    pid = os.fork()
    if not pid:
        with faults.observe(lambda point: time.sleep(0.001)):
            for turn in range(start + 1, 10 ** 9):
                codec.write(images[turn % 2], sys.argv[1], manifest, overwrite=True)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


def test_kill_9_at_ten_random_moments_leaves_the_old_capsule_whole(tmp_path):
    """At ten or more: on a busy machine it takes some luck to hit both writes."""
    directory = tmp_path / 'capsules'
    tier = DiskTier(directory)
    tier.put(cases.image(MANIFEST, 500, seed=500, id='id500'), MANIFEST)
    wanted = {n: cases.image(MANIFEST, n, seed=n, id=f'id{n}') for n in (500, 1000)}
    moments = random.Random(24)
    kills, debris, seen = 0, 0, set()
    command = [*script(ENDLESS_WRITER), str(tier.path('scene'))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as child:
        while kills < 10 or kills < 100 and (debris < 3 or len(seen) < 2):
            kills += 1
            child.stdin.write('write\n')
            child.stdin.flush()
            pid = int(child.stdout.readline())
            time.sleep(moments.uniform(0.01, 0.25))
            os.kill(pid, signal.SIGKILL)
            assert int(child.stdout.readline()) == signal.SIGKILL
            left = [n for n in os.listdir(directory) if n != 'scene.capsule']
            assert all(atomic.is_temporary(n) for n in left)
            debris += len(left)
            [(header, size)] = tier.headers()  # the debris is not listed
            assert not tier.problems() and header.name == 'scene'
            assert size == tier.path('scene').stat().st_size
            cases.assert_equal(wanted[header.position], tier.get('scene', MANIFEST))
            seen.add(header.position)
            DiskTier(directory)  # a new start sweeps
            assert os.listdir(directory) == ['scene.capsule']
        child.stdin.close()
    assert debris >= 3 and len(seen) == 2, 'the kills did not hit in the middle of writes'
    print(f'{debris} of {kills} kills left a temporary; positions seen {seen}')


STOPPED_WRITER = """
def stop(point):
    if point == 'codec.write_header':
        print('in the middle', flush=True)
        time.sleep(600)
with faults.observe(stop):
    codec.write(cases.image(manifest, 10), sys.argv[1], manifest, overwrite=True)
"""


def test_a_temporary_in_work_is_not_swept_and_a_dead_one_is(tmp_path):
    command = [*script(STOPPED_WRITER), str(tmp_path / 'a.capsule')]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == 'in the middle\n'
            assert atomic.sweep(tmp_path) == 0
            [name] = os.listdir(tmp_path)
            assert atomic.is_temporary(name) and name.startswith('.')
            assert DiskTier(tmp_path).headers() == []
        finally:
            child.kill()
    assert os.listdir(tmp_path) == [name]
    # Debris of another host: its lock may be invisible here, so only its age counts.
    foreign = tmp_path / f'.flashrt-{"0" * 7}f-1-{"a" * 16}.tmp'
    foreign.touch()
    assert atomic.sweep(tmp_path) == 1
    assert os.listdir(tmp_path) == [foreign.name]
    old = time.time() - atomic.FOREIGN_AGE - 60
    os.utime(foreign, (old, old))
    assert atomic.sweep(tmp_path) == 1 and os.listdir(tmp_path) == []
    (tmp_path / '.other-program.tmp').touch()
    assert atomic.sweep(tmp_path) == 0
    assert atomic.sweep(tmp_path / 'missing') == 0


@pytest.mark.parametrize('overwrite', [False, True])
@pytest.mark.parametrize('point', POINTS)
@pytest.mark.parametrize('code, words', [
    (errno.ENOSPC, 'disk is full; free space'), (errno.EROFS, 'read-only; remount'),
    (errno.EACCES, 'permission was denied; check'), (errno.EIO, 'check the disk')])
def test_a_fault_at_every_step_leaves_nothing(tmp_path, point, code, words, overwrite):
    path = tmp_path / 'scene.capsule'
    if overwrite:
        codec.write(cases.image(MANIFEST, 5), path, MANIFEST, overwrite=False)
    before = path.read_bytes() if overwrite else None
    with faults.fail_at(point, code) as passed:
        with pytest.raises(Storage, match=f'^Writing .*{words}.*{errno.errorcode[code]}') as caught:
            codec.write(cases.image(MANIFEST, 9), path, MANIFEST, overwrite=overwrite)
    assert passed[-1] == point and isinstance(caught.value.__cause__, OSError)
    assert os.listdir(tmp_path) == (['scene.capsule'] if overwrite else [])
    assert not overwrite or path.read_bytes() == before


def test_a_fault_at_every_single_passing(tmp_path):
    image = cases.image(MANIFEST, 9)
    with faults.fail_at('never') as passed:
        codec.write(image, tmp_path / 'whole', MANIFEST, overwrite=False)
    steps = [(name, passed[:i + 1].count(name)) for i, name in enumerate(passed)]
    assert {name for name, _ in steps} == {*POINTS, 'atomic.fsync_directory'}
    for name, nth in steps[:-1]:
        for fault in (OSError(errno.ENOSPC, 'x'), KeyboardInterrupt(), MemoryError()):
            with faults.fail_at(name, fault, nth), pytest.raises((Storage, type(fault))):
                codec.write(image, tmp_path / 'a', MANIFEST, overwrite=False)
            assert os.listdir(tmp_path) == ['whole']


def test_a_directory_that_cannot_be_flushed_is_told(tmp_path):
    with faults.fail_at('atomic.fsync_directory', errno.EIO):
        with pytest.raises(Storage, match='written and whole, but .* power cut; save again'):
            codec.write(cases.image(MANIFEST, 9), tmp_path / 'a', MANIFEST, overwrite=False)
    assert codec.verify(tmp_path / 'a').position == 9
    with faults.fail_at('atomic.fsync_directory', errno.EINVAL):  # some file systems cannot
        codec.write(cases.image(MANIFEST, 9), tmp_path / 'b', MANIFEST, overwrite=False)


@pytest.mark.parametrize('code', [errno.EPERM, errno.EOPNOTSUPP])
def test_file_systems_without_hard_links(tmp_path, monkeypatch, code):
    def link(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, 'link', link)
    codec.write(cases.image(MANIFEST, 9), tmp_path / 'a', MANIFEST, overwrite=False)

    def rival(point):
        if point == 'atomic.publish':
            (tmp_path / 'b').write_text('rival')

    with faults.observe(rival), pytest.raises(NameExists):
        codec.write(cases.image(MANIFEST, 9), tmp_path / 'b', MANIFEST, overwrite=False)
    assert sorted(os.listdir(tmp_path)) == ['a', 'b']
    assert (tmp_path / 'b').read_text() == 'rival'


RIVALS = """
me = sys.argv[2]
image = cases.image(manifest, 50 + int(me), id=f'rival{me}')
tier = DiskTier(sys.argv[1])
print('ready', flush=True)
for line in sys.stdin:
    name = line.strip()
    image.header = cases.header(manifest, 50 + int(me), name, id=f'rival{me}')
    try:
        tier.put(image, manifest, overwrite=name.startswith('over'))
        print('won', flush=True)
    except FlashrtError as error:
        print(error.code, flush=True)
"""


def test_two_processes_writing_one_name_cannot_both_win(tmp_path):
    children = [subprocess.Popen([*script(RIVALS), str(tmp_path), str(n)], text=True,
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE) for n in (0, 1)]
    winners = []
    try:
        for child in children:
            assert child.stdout.readline() == 'ready\n'
        for turn in range(20):
            name = f'{"over" if turn % 4 == 3 else "name"}{turn}'
            for child in children[::1 if turn % 2 else -1]:
                child.stdin.write(name + '\n')
                child.stdin.flush()
            said = [child.stdout.readline().strip() for child in children]
            header = codec.verify(tmp_path / f'{name}.capsule')
            if name.startswith('over'):
                assert said == ['won', 'won']
            else:
                assert sorted(said) == ['NAME_EXISTS', 'won']
                winners.append(said.index('won'))
                assert header.id == f'rival{winners[-1]}' and header.position == 50 + winners[-1]
    finally:
        for child in children:
            child.stdin.close()
            child.wait(30)
            child.stdout.close()
    assert len(os.listdir(tmp_path)) == 20, 'no temporary is left'
    print(f'process 1 won {sum(winners)} of {len(winners)}')


def test_a_rival_between_check_and_publish_wins(tmp_path):
    path = tmp_path / 'a'

    def rival(point):
        if point == 'atomic.publish':
            path.write_text('rival')

    with faults.observe(rival), pytest.raises(NameExists):
        codec.write(cases.image(MANIFEST, 9), path, MANIFEST, overwrite=False)
    assert path.read_text() == 'rival' and os.listdir(tmp_path) == ['a']


LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tier = DiskTier(sys.argv[1])
tier.put(cases.image(manifest, 10), manifest)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    tier.put(cases.image(manifest, 1000), manifest, overwrite=True)
except FlashrtError as error:
    print(error.code, error)
print(os.listdir(sys.argv[1]), tier.get('scene', manifest).header.position)
"""


def test_a_file_size_limit(tmp_path):
    done = subprocess.run([*script(LIMITED), str(tmp_path)], text=True, stdout=subprocess.PIPE)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith('STORAGE Writing') and 'larger than the limit' in lines[0]
    assert lines[1] == "['scene.capsule'] 10"


MOUNTED = """
import subprocess
place = sys.argv[1]
def mount(*options):
    subprocess.run(['mount', *options, place], check=True)
try:
    mount('-t', 'tmpfs', '-o', 'size=256k', 'tmpfs')
except (OSError, subprocess.CalledProcessError):
    sys.exit(77)
tier = DiskTier(place)
def attempt(image, name):
    image.header = cases.header(manifest, image.header.position, name)
    try:
        print(tier.put(image, manifest, overwrite=True) > 0, flush=True)
    except FlashrtError as error:
        print(error.code, error, flush=True)
    print(sorted(os.listdir(place)), tier.get('a', manifest).header.position, flush=True)
attempt(cases.image(manifest, 1000), 'a')
attempt(cases.image(manifest, 1001), 'a')
attempt(cases.image(manifest, 1002), 'b')
mount('-o', 'remount,ro')
attempt(cases.image(manifest, 1), 'c')
attempt(cases.image(manifest, 1), 'a')
try:
    tier.remove('a')
except FlashrtError as error:
    print(error.code, error, flush=True)
"""


def test_a_really_full_and_a_really_read_only_file_system(tmp_path):
    """A small tmpfs in a mount namespace of its own, so that nothing is left behind."""
    if shutil.which('unshare') is None or shutil.which('mount') is None:
        pytest.skip('there is no unshare or mount here to make a small file system with')
    flags = ['--mount'] if os.geteuid() == 0 else ['--user', '--map-root-user', '--mount']
    done = subprocess.run(['unshare', *flags, *script(MOUNTED), str(tmp_path)], text=True,
                          capture_output=True)
    if done.returncode == 77 or done.stderr.startswith('unshare'):
        pytest.skip(f'no small file system could be mounted: {done.stderr.strip()[-200:]}')
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == 'True' and lines[1] == "['a.capsule'] 1000"
    for full in (lines[2], lines[4]):
        assert full.startswith('STORAGE Writing') and 'the disk is full' in full
    for read_only in (lines[6], lines[8], lines[10]):
        assert read_only.startswith('STORAGE') and 'read-only' in read_only
    assert {lines[i] for i in (3, 5, 7, 9)} == {"['a.capsule'] 1000"}


def test_a_directory_without_write_permission(tmp_path):
    if os.geteuid() == 0:
        pytest.skip('root ignores modes; the mounted read-only file system stands for this')
    tier = DiskTier(tmp_path)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(Storage, match='permission was denied'):
            tier.put(cases.image(MANIFEST, 1), MANIFEST)
        assert tier.headers() == []
    finally:
        tmp_path.chmod(0o700)
