"""`flashrt-ros capsule` on real files, made by a real engine."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from flashrt_ros.cli import exits
from flashrt_ros.cli.main import main
from flashrt_ros.engine import Engine, EngineConfig


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """Return a directory with two capsules, the second grown from the first."""
    directory = tmp_path_factory.mktemp('capsules')
    engine = Engine(EngineConfig(model='random:tiny', context=128, pool_bytes=8 << 20,
                                 directory=str(directory)))
    engine.append(token_ids=range(1, 41))
    engine.save(name='first', persist=True, note='a note with [markup]')
    engine.append(token_ids=range(1, 10))
    engine.save(name='second', persist=True)
    engine.flush()
    engine.close()
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    """Return a copy that a test may damage."""
    return shutil.copytree(saved, tmp_path / 'capsules')


@pytest.fixture
def capsule(capfd):
    """Return a function that runs `capsule ... --json`; it returns exit code and document."""
    def run(*arguments, directory):
        capfd.readouterr()
        status = main(['capsule', *arguments, '--directory', str(directory), '--json'])
        out, err = capfd.readouterr()
        assert 'Traceback' not in err
        return status, json.loads(out)
    return run


@pytest.fixture
def people(capfd):
    """Return a function that runs it for people; it returns exit code and text."""
    def run(*arguments, directory):
        capfd.readouterr()
        status = main(['capsule', *arguments, '--directory', str(directory)])
        return status, capfd.readouterr().out
    return run


def flip(path, offset):
    """Flip a bit in a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_ls_lists_names_tokens_and_sizes(saved, capsule, people):
    status, found = capsule('ls', directory=saved)
    assert status == exits.OK and found['unreadable'] == []
    rows = {row['name']: row for row in found['capsules']}
    assert rows['first']['tokens'] == 40 and rows['second']['tokens'] == 49
    assert rows['second']['parent_id'] == rows['first']['id']
    assert rows['first']['file_bytes'] == (saved / 'first.capsule').stat().st_size
    status, text = people('ls', directory=saved)
    assert status == exits.OK and 'a note with [markup]' in text
    assert max(map(len, text.splitlines())) <= 100


def test_ls_of_a_directory_that_is_not_there_yet_is_empty(tmp_path):
    process = subprocess.run(
        [sys.executable, '-m', 'flashrt_ros.cli.main', 'capsule', 'ls', '--json'],
        capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, 'ROS_HOME': str(tmp_path), 'FLASHRT_CAPSULES': ''})
    found = json.loads(process.stdout)
    assert found['capsules'] == []
    assert found['directory'] == str(tmp_path / 'flashrt')


def test_ls_tells_of_a_file_that_it_cannot_read(directory, capsule):
    flip(directory / 'first.capsule', 40)
    status, found = capsule('ls', directory=directory)
    assert status == exits.FAILED
    assert [row['name'] for row in found['capsules']] == ['second']
    assert found['unreadable'][0]['file'] == 'first.capsule' and found['unreadable'][0]['reason']


def test_show_tells_everything_by_name_and_by_id(saved, capsule, people):
    status, shown = capsule('show', 'second', directory=saved)
    assert status == exits.OK
    assert {'name', 'id', 'tokens', 'identity', 'manifest', 'digests', 'host',
            'format_version'} <= shown.keys()
    assert shown['manifest'][0]['name'] == 'position'
    assert capsule('show', shown['id'], directory=saved)[1]['name'] == 'second'
    status, text = people('show', 'second', directory=saved)
    assert status == exits.OK and 'hard: ' in text and shown['id'] in text


@pytest.mark.parametrize(('name', 'code'), [
    ('absent', 'UNKNOWN_CAPSULE'), ('../first', 'UNKNOWN_CAPSULE'), ('a b', 'UNKNOWN_CAPSULE')])
@pytest.mark.parametrize('verb', ['show', 'verify', 'rm'])
def test_a_name_that_is_not_there_is_refused(saved, verb, name, code, capsule):
    status, found = capsule(verb, name, directory=saved)
    assert status == exits.for_code(code) and found['error']['code'] == code
    assert len(list(saved.glob('*.capsule'))) == 2


def test_verify_checks_every_digest(directory, capsule):
    status, found = capsule('verify', directory=directory)
    assert status == exits.OK and found['passed']
    assert [item['name'] for item in found['capsules']] == ['first', 'second']
    size = (directory / 'second.capsule').stat().st_size
    for offset in (size - 1, size // 2):
        flip(directory / 'second.capsule', offset)
        status, found = capsule('verify', 'second', directory=directory)
        assert status == exits.FAILED and not found['passed']
        assert found['capsules'][0]['code'] == 'CORRUPT' and found['capsules'][0]['message']
        flip(directory / 'second.capsule', offset)
    assert capsule('verify', 'second', directory=directory)[0] == exits.OK


def test_verify_of_a_directory_counts_unreadable_files(directory, capsule):
    (directory / 'second.capsule').write_bytes(b'')
    status, found = capsule('verify', directory=directory)
    assert status == exits.FAILED
    assert {item['name']: item['passed'] for item in found['capsules']} == {
        'first': True, 'second': False}


def test_rm_removes_all_or_nothing(directory, capsule):
    status, found = capsule('rm', 'first', 'absent', directory=directory)
    assert status == exits.for_code('UNKNOWN_CAPSULE')
    assert (directory / 'first.capsule').exists()
    size = (directory / 'first.capsule').stat().st_size
    status, found = capsule('rm', 'first', 'first', directory=directory)
    assert status == exits.OK and found['removed'] == [{'name': 'first', 'bytes_freed': size}]
    assert [path.name for path in directory.iterdir()] == ['second.capsule']


def test_the_environment_names_the_directory(saved):
    process = subprocess.run(
        [sys.executable, '-m', 'flashrt_ros.cli.main', 'capsule', 'ls', '--json'],
        capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, 'FLASHRT_CAPSULES': str(saved)})
    assert len(json.loads(process.stdout)['capsules']) == 2
