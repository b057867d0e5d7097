"""`flashrt-ros capsule import` of what is no capsule: a sentence and the code of its class."""

import json
import os
from pathlib import Path

import pytest

from flashrt_ros.cli import exits
from flashrt_ros.cli.main import main


@pytest.fixture
def attempt(tmp_path, capfd):
    def run(what):
        capfd.readouterr()
        status = main(['capsule', 'import', str(what), '-d', str(tmp_path / 'here'), '--json'])
        out, err = capfd.readouterr()
        error = json.loads(out)['error']
        assert 'Traceback' not in err and err.splitlines()[-1] == f'flashrt-ros: {error["message"]}'
        assert status == exits.for_code(error['code']) and not (tmp_path / 'here').exists()
        return error
    return run


@pytest.mark.parametrize('content', [b'', b'root:x:0:0:root:/root:/bin/bash\n', b'\0' * 4096])
@pytest.mark.parametrize('name', ['passwd', 'passwd.capsule'])
def test_a_file_that_is_no_capsule_is_corrupt_whatever_its_name(attempt, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    error = attempt(tmp_path / name)
    assert error['code'] == 'CORRUPT' and str(tmp_path / name) in error['message']


def test_the_password_file_is_no_capsule(attempt):
    if not Path('/etc/passwd').exists():
        pytest.skip('no such file here')
    assert attempt('/etc/passwd')['message'].startswith("'/etc/passwd' is no capsule file: those")


def test_what_is_no_file_at_all(attempt, tmp_path):
    (tmp_path / 'place.capsule').mkdir()
    os.mkfifo(tmp_path / 'pipe.capsule')
    for what, code in (('place.capsule', 'CORRUPT'), ('pipe.capsule', 'CORRUPT'),
                       ('absent.capsule', 'UNKNOWN_CAPSULE'), ('absent', 'UNKNOWN_CAPSULE'),
                       ('.', 'UNKNOWN_CAPSULE'), ('a name.capsule', 'INVALID_NAME')):
        assert attempt(tmp_path / what)['code'] == code, what
    assert attempt('')['code'] == 'UNKNOWN_CAPSULE'
    assert attempt('nonsense://host/x.capsule')['code'] == 'STORAGE'
