"""Wrong input, as a distrustful user tries it: a sentence, an exit code, valid JSON, each time."""

import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import time

import pytest

from flashrt_ros.cli import exits, output
from flashrt_ros.cli.main import main

sys.path.insert(0, str(Path(__file__).parent))


def error_in(status, out, err):
    """Return the error of a command that ended so, which must be whole."""
    error = json.loads(out)['error']
    assert 'Traceback' not in err and status not in (exits.OK, exits.BUG), err
    assert len(error['message']) > 20
    return error


@pytest.fixture
def attempt(capfd):
    """Return a function that runs a command line with --json, in this process."""
    def run(*arguments):
        capfd.readouterr()
        status = main([*map(os.fsdecode, arguments), '--json'])
        return status, error_in(status, *capfd.readouterr())
    return run


@pytest.mark.parametrize(('code', 'arguments'), [
    ('STORAGE', ('bench', 'store', '--directory', '/nonexistent')),
    ('STORAGE', ('bench', 'store', '--directory', '/dev/null')),
    ('STORAGE', ('capsule', 'ls', '-d', 'x' * 300)),
    ('STORAGE', ('capsule', 'ls', '-d', '~nobody-of-that-name')),
    ('STORAGE', ('capsule', 'ls', '-d', 's3://bucket')),
    ('STORAGE', ('capsule', 'ls', '-d', b'\xff'))])
def test_places_that_cannot_be_used(attempt, code, arguments):
    status, error = attempt(*arguments)
    assert error['code'] == code and status == exits.for_code(code), error


@pytest.mark.parametrize(('name', 'arguments'), [
    ('--threads', ('verify', '--threads', '-1')), ('--seconds', ('verify', '--seconds', 'nan')),
    ('--context', ('verify', '--context', 'nan')), ('--only', ('verify', '--only', b'\xff')),
    ('--seed', ('bench', 'ttft', '--seed', str(1 << 63))),
    ('--prefix', ('bench', 'ttft', '--prefix', '1e3')),
    ('--timeout', ('call', 'list', '--timeout', 'nan')),
    ('--position', ('call', 'rollback', '--position', '-1')),
    ('--seed', ('call', 'restore', 'x', '--seed', '-1'))])
def test_usage_names_the_option_in_json_too(attempt, name, arguments):
    status, error = attempt(*arguments)
    assert status == exits.USAGE and error['code'] == 'USAGE' and name in error['message'], error


@pytest.fixture
def closed(tmp_path):
    """A directory that nobody may look into, and what runs a command without root's rights."""
    place = tmp_path / 'closed'
    place.mkdir()
    place.chmod(0)
    prefix = ()
    if os.access(place, os.R_OK):
        tool = shutil.which('setpriv')
        prefix = (tool, '--bounding-set', '-dac_override,-dac_read_search')
        if tool is None or subprocess.run(
                [*prefix, 'ls', place], capture_output=True, check=False).returncode == 0:
            pytest.skip('this user may look everywhere')
    yield place, prefix
    place.chmod(0o700)


def test_a_directory_that_may_not_be_read(closed):
    place, prefix = closed
    for arguments in (('capsule', 'ls', '-d', place), ('capsule', 'ls', '-d', place / 'below'),
                      ('verify', '--model', place), ('verify', '--model', place / 'below'),
                      ('demo', '--keep-log', place / 'x')):
        process = subprocess.run(
            [*prefix, sys.executable, '-m', 'flashrt_ros.cli.main', *map(str, arguments),
             '--json'], capture_output=True, text=True, timeout=100, check=False)
        error = error_in(process.returncode, process.stdout, process.stderr)
        assert error['code'] == 'STORAGE', arguments
        assert process.returncode == exits.for_code('STORAGE')


@pytest.mark.parametrize('namespace', ['a b', '1x', 'ü', 'a//b', '~', '{x}', 'x' * 201, b'\xff'])
def test_a_name_that_is_no_namespace(namespace):
    from flashrt_ros.cli.live import full_name
    from flashrt_ros.errors import InvalidName
    if isinstance(namespace, bytes):
        namespace = namespace.decode(errors='surrogateescape')
    begun = time.process_time()
    for text in (namespace, f'/{"a" * 40}/{namespace}/x'):
        with pytest.raises(InvalidName, match='is no namespace'):
            full_name(text)
    assert time.process_time() - begun < 1.0
    assert full_name('') == full_name('/') == '/flashrt'
    assert full_name('/site_1/robot1/') == '/site_1/robot1/flashrt'


def test_a_document_with_what_is_no_utf8_is_json(capfdbinary):
    output._documents = 0
    with output.stdout_for_json(True):
        output.emit({'name': 'odd \udcff'})
    assert json.loads(capfdbinary.readouterr().out.decode()) == {'name': 'odd \udcff'}
    output._documents = 0


# -- what needs ROS --------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def node(tmp_path_factory):
    pytest.importorskip('rclpy')
    from node_cases import running
    with running(tmp_path_factory.mktemp('node')) as (_, peer):
        peer.client.generate('a scene', max_tokens=3).result(20)
        yield peer


@pytest.mark.parametrize(('code', 'arguments'), [
    ('INVALID_ARGUMENT', ('generate', 'go', '--temperature', 'nan')),
    ('INVALID_ARGUMENT', ('generate', 'go', '--top-p', 'inf')),
    ('INVALID_ARGUMENT', ('generate', 'go', '--top-k', str(1 << 40))),
    ('INVALID_ARGUMENT', ('generate', 'go', '--max-tokens', str(1 << 40))),
    ('INVALID_ARGUMENT', ('generate', 'go', '--seed', str(1 << 64))),
    ('INVALID_ARGUMENT', ('generate', 'go', '--timeout', 'inf')),
    ('INVALID_ARGUMENT', ('generate', b'\xff')),
    ('INVALID_ARGUMENT', ('generate', 'go', '--stop', b'\xff')),
    ('INVALID_ARGUMENT', ('rollback', '--tokens', '1', '--max-replay', str(1 << 32))),
    ('INVALID_ARGUMENT', ('rollback', '--position', str(1 << 64))),
    ('INVALID_ARGUMENT', ('fork', 'a', '--seed', str(1 << 64))),
    ('INVALID_ARGUMENT', ('save', 'x', '--note', 'n' * 5000)),
    ('INVALID_ARGUMENT', ('close', b'\xff')),
    ('INVALID_NAME', ('list', '--namespace', 'a b')),
    ('INVALID_NAME', ('list', '--namespace', b'\xff'))])
def test_calls(node, attempt, code, arguments):
    before = [(info.name, info.id) for info in node.client.list()]
    status, error = attempt('call', *arguments)
    assert (error['code'], status) == (code, exits.for_code(code)), error
    assert [(info.name, info.id) for info in node.client.list()] == before


def test_top_of_no_namespace(attempt):
    pytest.importorskip('rclpy')
    assert attempt('top', '--once', '--namespace', '1x')[1]['code'] == 'INVALID_NAME'


def test_a_model_that_cannot_be_loaded_ends_demo_and_bench_at_once(attempt):
    pytest.importorskip('rclpy')
    begun = time.monotonic()
    process = subprocess.run(
        [sys.executable, '-m', 'flashrt_ros.cli.main', 'demo', '--model', 'nowhere', '--json'],
        capture_output=True, text=True, timeout=100, check=False)
    told = json.loads(process.stdout)
    assert process.returncode == exits.FAILED and not told['passed']
    assert 'STORAGE: there is no model directory' in told['claims'][-1]['detail']
    assert time.monotonic() - begun < 60  # the limit for a node that starts slowly is 120
    status, error = attempt('bench', 'ros', '--model', 'nowhere')
    assert status == exits.for_code('STORAGE') and 'no model directory' in error['message']
