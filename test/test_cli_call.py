"""`flashrt-ros call` and `top` against a real node: answers, exit codes, completion."""

import contextlib
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from node_cases import clean, LATCHED, running, until, WAIT  # noqa: E402
import rclpy  # noqa: E402
from rclpy.action import ActionServer  # noqa: E402

from flashrt_ros.action import Generate  # noqa: E402
from flashrt_ros.cli import exits  # noqa: E402
from flashrt_ros.msg import CapsuleList, NodeState  # noqa: E402
from flashrt_ros.srv import ListCapsules  # noqa: E402

NAMESPACE = '/robot3'


def start(*arguments, stdout=subprocess.PIPE, **environment):
    return subprocess.Popen(
        [sys.executable, '-m', 'flashrt_ros.cli.main', *arguments], stdin=subprocess.PIPE,
        stdout=stdout, stderr=subprocess.PIPE, text=True,
        env={**os.environ, 'FLASHRT_NAMESPACE': NAMESPACE, **environment})


def run(*arguments, stdin='', **environment):
    process = start(*arguments, **environment)
    out, err = process.communicate(stdin, timeout=2 * WAIT)
    assert 'Traceback' not in err, err
    return process.returncode, out, err


def ask(*arguments):
    """Return the document of a call that succeeds."""
    status, out, err = run('call', *arguments, '--json')
    assert status == 0, err
    return json.loads(out)


@pytest.fixture(scope='module')
def system(tmp_path_factory):
    with running(tmp_path_factory.mktemp('node'), namespace=NAMESPACE) as (process, peer):
        yield process, peer


@pytest.fixture(autouse=True)
def client(system):
    clean(system[1].client, 'left', 'right', 'planner_b')
    return system[1].client


def test_a_whole_conversation():
    scene = ask('generate', 'The cup is on the table.', '--max-tokens', '0')
    saved = ask('save', 'scene', '--pin', '--note', 'from a script')
    assert saved['info']['tokens'] == scene['position'] and saved['info']['pinned']
    one = ask('generate', 'go', '--capsule', 'scene', '--max-tokens', '6', '--temperature', '0')
    assert one['tokens_reused'] == scene['position'] and one['completion_tokens'] <= 6
    restored = ask('restore', 'scene')
    assert restored['tokens_reused'] == scene['position'] and restored['elapsed'] > 0
    two = ask('generate', 'go', '--max-tokens', '6', '--temperature', '0', '--save-as', 'after')
    assert two['token_ids'] == one['token_ids'] and two['info']['name'] == 'after'
    back = ask('rollback', '--position', str(scene['position']))
    assert back['position'] == scene['position']
    assert ask('fork', 'left', 'right', '--capsule', 'after')['sessions'] == ['left', 'right']
    assert ask('close', 'left')['error_code'] == 0
    assert [info['name'] for info in ask('list')['capsules']] == ['after', 'scene']
    assert not ask('pin', 'scene', '--release')['info']['pinned']
    assert ask('drop', 'after')['bytes_freed'] >= 0
    assert ask('reset')['success'] and ask('cancel')['success']


def test_people_read_text_and_sentences():
    status, out, err = run('call', 'generate', '-', '--max-tokens', '5', stdin='hello there')
    assert status == 0 and 'tokens/s' in err
    status, out, _ = run('call', 'save', 'words', '--overwrite')
    assert status == 0 and out.startswith('saved words: ')
    status, out, _ = run('call', 'list')
    assert status == 0 and 'words' in out and 'tokens' in out


@pytest.mark.parametrize('code, arguments', [
    ('UNKNOWN_CAPSULE', ('restore', 'nobody')),
    ('INVALID_NAME', ('save', '../up')),
    ('UNKNOWN_SESSION', ('save', 'x', '--session', 'nobody')),
    ('INVALID_ARGUMENT', ('generate', 'x', '--temperature', '-3')),
    ('INVALID_ARGUMENT', ('rollback', '--position', '999999'))])
def test_each_refusal_has_its_exit_code(code, arguments):
    status, out, err = run('call', *arguments, '--json')
    assert status == exits.for_code(code)
    assert json.loads(out)['error']['code'] == code and err.startswith('flashrt-ros: ')


@pytest.mark.parametrize('arguments', [
    ('rollback',), ('rollback', '--tokens', '1', '--turns', '1'), ('save',),
    ('restore', 'x', '--on-busy', 'whatever')])
def test_what_makes_no_sense_is_usage(arguments):
    assert run('call', *arguments)[0] == exits.USAGE


def test_a_node_that_is_not_there_is_not_active():
    begin = time.monotonic()
    status, _, err = run('call', 'list', '--namespace', '/nowhere', '--discovery-timeout', '4')
    assert status == exits.for_code('NOT_ACTIVE') and time.monotonic() - begin < WAIT
    assert '/nowhere/flashrt was not found' in err and f'{NAMESPACE}/flashrt' in err
    status, _, _ = run('top', '--once', '--namespace', '/nowhere', '--discovery-timeout', '1')
    assert status == exits.for_code('NOT_ACTIVE')


def test_a_node_that_does_not_answer_is_a_timeout(system):
    silent = rclpy.create_node('flashrt', namespace='/silent', context=system[1].context)
    # Never spun: it can be found, and answers nothing.
    ActionServer(silent, Generate, '/silent/flashrt/generate', lambda goal: Generate.Result())
    silent.create_service(ListCapsules, '/silent/flashrt/list_capsules', lambda _, answer: answer)
    try:
        status, out, _ = run('call', 'list', '--namespace', '/silent', '--timeout', '1', '--json')
        assert status == exits.for_code('TIMEOUT')
        assert json.loads(out)['error']['message'].startswith('/silent/flashrt did not send')
    finally:
        silent.destroy_node()


def test_an_inactive_node_answers_its_code(client):
    assert client.change_state('deactivate')
    try:
        status, out, _ = run('call', 'save', 'x', '--json')
        assert status == exits.for_code('NOT_ACTIVE')
        assert 'ros2 lifecycle set' in json.loads(out)['error']['message']
    finally:
        assert client.change_state('activate')


def test_interrupt_cancels_the_goal(client):
    process = start('call', 'generate', 'tell me', '--max-tokens', '6000', '--session', 'long',
                    '--json')
    until(lambda: _busy(client) or process.poll() is not None)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT)
    if process.returncode != 0:  # an answer may end by chance before the signal comes
        assert process.returncode == exits.INTERRUPTED, err
        assert json.loads(out)['error']['code'] == 'INTERRUPTED'
    client.close_session('long')  # BUSY if it still ran


def _busy(client):
    try:
        client.rollback(tokens=0, session='long')
        return False
    except Exception as error:
        return getattr(error, 'code', '') == 'BUSY'


def complete(*words):
    """Return what bash would offer for the last word."""
    status, out, err = run(_FLASHRT_ROS_COMPLETE='complete_bash',
                           COMP_WORDS=' '.join(('flashrt-ros', *words)),
                           COMP_CWORD=str(len(words)),
                           _TYPER_COMPLETE_ARGS=' '.join(('flashrt-ros', *words)))
    assert status == 0, err
    return [line.rpartition(',')[2] for line in out.split()]


def test_names_complete_from_the_latched_topics(system, client):
    client.save('kitchen', overwrite=True)
    client.save('kiosk', overwrite=True)
    client.fork(['planner_b'], 'kitchen')
    # The topics tell of an answer a moment later.
    lists = system[1].collect(CapsuleList, f'{NAMESPACE}/flashrt/capsules', LATCHED)
    states = system[1].collect(NodeState, f'{NAMESPACE}/flashrt/state', LATCHED)
    until(lambda: {'kiosk', 'kitchen'} <= {info.name for info in lists[-1].capsules})
    until(lambda: 'planner_b' in {session.name for session in states[-1].sessions})
    assert complete('call', 'restore', 'ki') == ['kiosk', 'kitchen']
    assert complete('call', 'drop', 'kitc') == ['kitchen']
    assert complete('call', 'save', 'x', '--session', 'pl') == ['planner_b']
    assert complete('call', 'rest') == ['restore']


def test_top_once(client):
    client.generate('go', max_tokens=4).result(WAIT)
    status, out, err = run('top', '--once')
    assert status == 0, err
    assert f'{NAMESPACE}/flashrt' in out and 'active' in out and 'default' in out
    assert 'latency' in out and max(map(len, out.splitlines())) <= 100
    status, out, _ = run('top', '--once', '--json')
    found = json.loads(out)
    assert found['state']['lifecycle'] == 'active'
    assert found['diagnostics']['runtime']['level'] == 'ok'
    assert {'memory', 'latency', 'requests', 'stall'} <= found['diagnostics'].keys()


def test_top_live_draws_and_ends():
    ours, theirs = os.openpty()  # it draws for people only
    process = start('top', '--interval', '0.1', stdout=theirs, TERM='xterm', COLUMNS='100',
                    LINES='30')
    os.close(theirs)
    drawn = b''
    while b'active' not in drawn:
        drawn += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # once their side is closed
        while os.read(ours, 4096):
            pass
    os.close(ours)
    _, err = process.communicate(timeout=WAIT)
    assert process.returncode == exits.INTERRUPTED and 'Traceback' not in err
