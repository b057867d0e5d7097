"""Acceptance group E through the engine: what a file can do to a running one. Case 22 to 24."""

import contextlib
from dataclasses import replace
import errno
import os
from pathlib import Path
import random
import shutil
import signal
import subprocess
import sys
import time

import codec_cases
from engine_cases import build, DEVICE, digest, ids, say
import pytest

from flashrt_ros.capsule import atomic, codec, faults
from flashrt_ros.capsule.fingerprint import Fingerprint
from flashrt_ros.errors import Capacity, Corrupt, FlashrtError, Incompatible, Storage

ROOT = Path(codec.__file__).parents[2]


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """Make a directory with a good capsule 'c'; return it with the digest of its state."""
    directory = tmp_path_factory.mktemp('saved')
    engine = build(directory=str(directory))
    engine.append(token_ids=ids(130))
    engine.save(name='c', persist=True)
    engine.flush()
    expected = digest(engine)
    engine.close()
    return directory, expected


@pytest.fixture
def directory(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / 'capsules')
    return tmp_path / 'capsules'


def flip(where):
    def damage(path):
        data = bytearray(path.read_bytes())
        data[where if where >= 0 else len(data) + where] ^= 1
        path.write_bytes(bytes(data))
    return damage


def cut(share):
    def damage(path):
        data = path.read_bytes()
        path.write_bytes(data[:int(len(data) * share)])
    return damage


def absurd(path):
    def edit(table, ours):
        ours['position'] = 10 ** 12
    codec_cases.forge(path, edit)


def as_directory(path):
    path.unlink()
    path.mkdir()


DAMAGE = {
    'a bit in the length': flip(3), 'a bit in the header': flip(300),
    'a bit in the first region': flip(-60_000), 'a bit in the middle': flip(-30_000),
    'a bit in the last region': flip(-1), 'truncated in the header': cut(0.01),
    'truncated in the payload': cut(0.6), 'one byte short': lambda p: os.truncate(
        p, p.stat().st_size - 1),
    'trailing bytes': lambda p: p.write_bytes(p.read_bytes() + b'x'),
    'empty': lambda p: p.write_bytes(b''), 'missing': lambda p: p.unlink(),
    'a directory': as_directory, '10^12 rows': absurd}


@pytest.mark.parametrize('damage', DAMAGE)
@pytest.mark.parametrize('known', [False, True])
def test_case_22_a_rejected_file_leaves_the_live_state(saved, directory, damage, known):
    """``known``: the damage came after the engine had listed the file."""
    if not known:
        DAMAGE[damage](directory / 'c.capsule')
    engine = build(directory=str(directory))
    engine.append(token_ids=ids(40, 5))
    before = digest(engine)
    if known:
        DAMAGE[damage](directory / 'c.capsule')
    for _ in range(2):
        with pytest.raises(FlashrtError) as raised:
            engine.restore(capsule='c')
        assert raised.value.code in ('CORRUPT', 'UNKNOWN_CAPSULE'), damage
        assert digest(engine) == before
        engine.list()  # looks at the directory again
        engine.audit()
    assert len(say(engine, 2)) == 2
    shutil.rmtree(directory)
    shutil.copytree(saved[0], directory)
    engine.restore(capsule='c')
    assert digest(engine) == saved[1]
    engine.close()


HARD = ('weights', 'architecture.rope_theta', 'architecture.num_layers', 'dtype',
        'manifest.order', 'manifest.buffers.logits', 'layout_version', 'tokenizer', 'adapter')
SOFT = ('device', 'kernel_sources', 'model_sources', 'package', 'torch', 'numpy', 'threads',
        'cpu_capability', 'grid', *(['cuda_sources', 'nvrtc'] if DEVICE == 'cuda' else []))


def changed(part, path):
    """Return a copy of a fingerprint part with one field, by dotted path, set to another value."""
    head, _, rest = path.partition('.')
    old = part.get(head)
    return {**part, head: changed(old, rest) if rest else f'not {old}'}


def refusals(engine):
    """Change each hard field of the engine in turn; yield field and message of the refusal."""
    ours = engine.store.fingerprint
    fields = []
    for field in ours.hard:
        if field == 'architecture':
            fields += [f'architecture.{key}' for key in ours.hard[field]]
        elif field == 'manifest':
            fields += ['manifest.order', *(f'manifest.buffers.{name}' for name in list(
                ours.hard[field]['buffers'])[:2])]
        else:
            fields.append(field)
    for field in fields:
        engine.store.fingerprint = replace(ours, hard=changed(ours.hard, field))
        try:
            engine.restore(capsule='c')
            yield field, ''
        except Incompatible as error:
            yield field, str(error)
        finally:
            engine.store.fingerprint = ours


def test_case_23_each_hard_field_is_refused_by_name_with_both_values(directory):
    engine = build(directory=str(directory))
    engine.append(token_ids=ids(40, 5))
    before = digest(engine)
    seen = dict(refusals(engine))
    assert {f.partition('.')[0] for f in HARD} == {f.partition('.')[0] for f in seen}
    for field, message in seen.items():
        assert f'{field} is ' in message, f'{field}: {message!r}'
        assert ' in the capsule and ' in message
        assert '"not ' in message
    assert digest(engine) == before
    engine.restore(capsule='c')
    engine.close()


def test_case_23_soft_fields_load_and_say_so(directory):
    for field in SOFT:
        engine = build(directory=str(directory))
        ours = engine.store.fingerprint
        assert field in ours.soft
        engine.store.fingerprint = Fingerprint(ours.hard, changed(ours.soft, field), ours.recorded)
        engine.store._capsules.clear()
        engine.store.scan()
        result = engine.restore(capsule='c')
        assert not result.info.exact_future
        assert engine.store.find('c').warnings[0].startswith(f'{field} is ')
        engine.close()


def test_case_23_the_table_of_refusals():
    """``tools/refusals.py`` finds no field that is let through, and the page says what it says."""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, str(root / 'tools' / 'refusals.py')],
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    def told(text):
        rows = [line.strip('| ').split(' | ') for line in text.splitlines()
                if line.startswith('|')]
        return [(row[0], row[1], row[-1]) for row in rows]
    assert told(done.stdout) == told((root / 'docs' / 'refusals.md').read_text('utf-8'))


def test_the_fields_of_the_fingerprint_are_all_tried(directory):
    engine = build(directory=str(directory))
    assert set(engine.fingerprint.soft) <= set(SOFT)
    assert {f.partition('.')[0] for f in HARD} == set(engine.fingerprint.hard)
    engine.close()


def test_case_23_other_weights_of_the_same_shapes(directory):
    engine = build(model='random:tiny?seed=2', directory=str(directory))
    assert engine.list() == []
    with pytest.raises(Incompatible, match='weights is'):
        engine.restore(capsule='c')
    engine.close()


def test_case_23_too_small_a_context_says_what_is_needed(directory):
    engine = build(context=100, directory=str(directory))
    with pytest.raises(Capacity, match='130 rows'):
        engine.restore(capsule='c')
    engine.close()


def test_case_23_a_name_and_a_note_are_free(saved, directory):
    os.rename(directory / 'c.capsule', directory / 'renamed.capsule')
    engine = build(directory=str(directory))
    assert [i.name for i in engine.list()] == ['renamed']
    engine.restore(capsule='renamed')
    assert digest(engine) == saved[1]
    engine.save(name='noted', note='zwölf Boxkämpfer', persist=True)
    engine.flush()
    engine.close()
    again = build(directory=str(directory))
    assert again.info('noted').note == 'zwölf Boxkämpfer'
    again.close()


def test_case_24_size_follows_tokens_and_not_capacity(tmp_path):
    sizes = {}
    for context in (512, 4096):
        engine = build(context=context, directory=str(tmp_path / str(context)))
        for length in (10, 400):
            engine.reset()
            engine.append(token_ids=ids(length))
            engine.save(name=f'c{length}', persist=True)
        engine.flush()
        sizes[context] = engine.store.disk.usage()
        engine.close()
    assert sizes[512] == sizes[4096]
    row = engine.arena.manifest.row_bytes
    assert 0 <= sizes[512]['c400'] - sizes[512]['c10'] - 390 * row < 512


@pytest.mark.parametrize('code', [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize('point', ['atomic.create', 'codec.write', 'atomic.fsync',
                                   'atomic.publish'])
def test_case_24_a_disk_that_refuses(directory, code, point):
    engine = build(directory=str(directory))
    engine.append(token_ids=ids(70, 5))
    before = digest(engine)
    with faults.fail_at(point, code) as passed:
        engine.save(name='d', persist=True)
        with pytest.raises(Storage):
            engine.flush()
    assert point in passed
    assert digest(engine) == before
    assert engine.info('d').tiers == ('device',)
    assert os.listdir(directory) == ['c.capsule']
    engine.persist('d')
    engine.flush()
    assert sorted(os.listdir(directory)) == ['c.capsule', 'd.capsule']
    engine.close()


SAVER = """
import os, sys
sys.path[:0] = {path!r}
from engine_cases import build, digest, ids
engine = build(directory=sys.argv[1])
engine.append(token_ids=ids(1800))
for start, line in enumerate(sys.stdin):
    pid = os.fork()
    if not pid:
        from concurrent.futures import ThreadPoolExecutor
        engine.store.files._writer = ThreadPoolExecutor(1)  # threads do not survive a fork
        for turn in range(10 ** 9):
            engine.save(name='c', overwrite=True, persist=True, note=str(turn))
            engine.flush()
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


def test_case_24_twenty_kills_in_the_middle_of_saves(tmp_path):
    """SIGKILL at twenty random moments: the old capsule or the new one, and no debris listed."""
    directory = tmp_path / 'capsules'
    engine = build(directory=str(directory))
    engine.append(token_ids=ids(1800))
    engine.save(name='c', persist=True)
    engine.flush()
    expected = digest(engine)
    engine.close()
    moments, debris = random.Random(24), 0
    script = SAVER.format(path=[str(ROOT), str(Path(__file__).parent)])
    with subprocess.Popen([sys.executable, '-c', script, str(directory)], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        for _ in range(20):
            child.stdin.write('save\n')
            child.stdin.flush()
            pid = int(child.stdout.readline())
            time.sleep(moments.uniform(0.005, 0.1))
            os.kill(pid, signal.SIGKILL)
            assert int(child.stdout.readline()) == signal.SIGKILL
            left = [n for n in os.listdir(directory) if n != 'c.capsule']
            assert all(atomic.is_temporary(n) for n in left)
            debris += len(left)
            assert codec.verify(directory / 'c.capsule').position == 1800
        child.stdin.close()
    again = build(directory=str(directory))
    assert [i.name for i in again.list()] == ['c']
    assert os.listdir(directory) == ['c.capsule'], 'the next start sweeps'
    again.restore(capsule='c')
    assert digest(again) == expected
    again.close()
    print(f'{debris} of 20 kills left a temporary')


def test_case_24_a_really_full_disk(tmp_path):
    """A tmpfs of 300 KiB, where this user may mount one."""
    place = tmp_path / 'small'
    place.mkdir()
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=300k', 'tmpfs', str(place)],
                             capture_output=True, check=False).returncode == 0
    if not mounted:
        pytest.skip('mounting a tmpfs is not allowed here')
    try:
        engine = build(directory=str(place / 'capsules'))
        engine.append(token_ids=ids(100))
        engine.save(name='fits', persist=True)
        engine.flush()
        engine.append(token_ids=ids(400, 1))
        before = digest(engine)
        engine.save(name='large', persist=True)
        with pytest.raises(Storage, match='disk is full'):
            engine.flush()
        assert digest(engine) == before
        assert os.listdir(place / 'capsules') == ['fits.capsule']
        assert {i.name: i.tiers for i in engine.list()} == {'fits': ('device', 'disk'),
                                                            'large': ('device',)}
        engine.audit()
        engine.close()
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(['umount', str(place)], check=False)


def test_case_22_a_corrupt_capsule_named_in_a_request_changes_nothing(directory):
    flip(-1)(directory / 'c.capsule')
    engine = build(directory=str(directory))
    engine.append(token_ids=ids(40, 5))
    before = digest(engine)
    with pytest.raises(Corrupt):
        say(engine, 3, capsule='c')
    with pytest.raises(Corrupt):
        engine.fork('c', sessions=['x', 'y'])
    assert digest(engine) == before
    assert [s.name for s in engine.sessions()] == ['default']
    engine.close()
