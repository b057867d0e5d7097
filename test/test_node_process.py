"""The process: signals, kill and respawn, boot capsule, start values (acceptance 34, 38)."""

from pathlib import Path
import signal
import sys
import time

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from diagnostic_msgs.msg import DiagnosticArray  # noqa: E402
from node_cases import NodeProcess, Peer, running, start_long, until, WAIT  # noqa: E402

from flashrt_ros.msg import Token  # noqa: E402


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signal_mid_goal(tmp_path, number):
    with running(tmp_path) as (process, peer):
        stream = start_long(peer.client)
        waiting = peer.client.generate('x', session='a')
        until(lambda: len(peer.client.action._pending_result_requests) == 2)
        peer.client.list()  # what was asked before is there: a node that leaves takes no more
        begin = time.monotonic()
        process.send(number)
        result = stream.result(WAIT, check=False)
        answered = time.monotonic() - begin
        process.send(number)  # a second one changes nothing
        assert result.error_code == 42001 and result.finish_reason == Token.CANCELED
        assert result.completion_tokens > 0 and 'shutting down' in result.error_msg
        assert waiting.result(WAIT, check=False).error_code == 42001
        assert process.wait() == 0, process.log
        assert answered < 10.0
        print(f'result after {answered:.3f} s, exit after {time.monotonic() - begin:.3f} s')


def test_signal_while_loading(tmp_path):
    process = NodeProcess(tmp_path)
    try:
        until(lambda: 'loading model' in process.log)
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.log
    finally:
        process.close()


def test_kill_and_respawn(tmp_path):
    with running(tmp_path, timeouts__goal=60.0) as (process, peer):
        client = peer.client
        client.generate('the kitchen has a cup', max_tokens=0).result(WAIT)
        saved = client.save('kitchen', persist=True)
        until(lambda: client.list()[0].tiers & 4)
        wanted = list(client.generate('bring it', max_tokens=12).result(WAIT).token_ids)
        client.save('only_in_memory')
        stream = start_long(client, session='a')
        epoch = stream.tokens[-1].epoch
        process.send(signal.SIGKILL)
        process.wait()
    with running(tmp_path, capsules__boot='kitchen') as (process, peer):
        client = peer.client
        assert [(i.name, i.id) for i in client.list()] == [('kitchen', saved.info.id)]
        booted = client.generate('bring it', max_tokens=12)
        result = booted.result(WAIT)
        assert result.tokens_reused == saved.info.tokens  # the boot capsule is live
        assert list(result.token_ids) == wanted
        assert until(lambda: booted.tokens)[0].epoch > epoch
        restored = client.restore('kitchen', 'b')
        assert restored.tokens_reused == saved.info.tokens
        assert list(client.generate('bring it', session='b', max_tokens=12).result(
            WAIT).token_ids) == wanted


def test_sessions_persist_on_shutdown(tmp_path):
    with running(tmp_path, capsules__persist_on_shutdown=True) as (process, peer):
        position = peer.client.generate('remember this', max_tokens=6).result(WAIT).position
        process.send(signal.SIGINT)
        assert process.wait() == 0, process.log
    with running(tmp_path, capsules__boot='default.last') as (_, peer):
        assert peer.client.generate(max_tokens=1).result(WAIT).tokens_reused == position


def test_a_session_that_was_emptied_does_not_come_back(tmp_path):
    options = {'capsules__persist_on_shutdown': True}
    with running(tmp_path, **options) as (_, peer):
        peer.client.generate('remember this', max_tokens=6).result(WAIT)
    with running(tmp_path, capsules__boot='default.last', **options) as (_, peer):
        peer.client.reset()
    with running(tmp_path, capsules__boot='default.last') as (_, peer):
        [last] = peer.client.list()
        assert (last.name, last.tokens) == ('default.last', 0)
        assert peer.client.generate('x', max_tokens=1).result(WAIT).tokens_reused == 0


def test_a_session_without_tokens_leaves_no_file(tmp_path):
    with running(tmp_path, capsules__persist_on_shutdown=True):
        pass
    assert not [*tmp_path.rglob('*.capsule')]


@pytest.mark.parametrize(('name', 'value', 'words'), [
    ('device', 'abacus', "device must be one of auto, cpu, cuda, not 'abacus'."),
    ('model__threads', -1, 'model.threads must be an integer, at least 0 and at most 1024, not '
                           '-1.'),
    ('context__max_tokens', 2.5, 'context.max_tokens must be an integer, at least 16 and at most '
                                 '16777216, not 2.5.')])
def test_start_values_are_checked(tmp_path, name, value, words):
    process = NodeProcess(tmp_path, **{name: value})
    assert process.wait() == 2
    assert f'INVALID_ARGUMENT: The node cannot start with this parameter: {words}' in process.log
    assert 'Traceback' not in process.log


def test_two_robots_are_told_apart_in_diagnostics(tmp_path):
    for name in ('one', 'two'):
        (tmp_path / name).mkdir()
    with running(tmp_path / 'one', namespace='/robot1') as (_, peer):
        with running(tmp_path / 'two', namespace='/robot2') as (_, _):
            arrays = peer.collect(DiagnosticArray, '/diagnostics', 100)
            robots = {'robot1', 'robot2'}
            until(lambda: {s.name.split('/')[1] for a in list(arrays) for s in a.status} == robots)
            statuses = [s for array in list(arrays) for s in array.status]
            for robot in robots:
                own = [s for s in statuses if s.name.startswith(f'/{robot}/flashrt: ')]
                assert {s.name.partition(': ')[2] for s in own} == {
                    'runtime', 'latency', 'memory', 'requests', 'stall'}
                assert {s.hardware_id for s in own} == {f'{robot}/cpu'}


def test_namespace_and_misspelt_parameter(tmp_path):
    process = NodeProcess(tmp_path, namespace='/robot1', model__paht='x', generation__top_k=5,
                          generation__temperature=0)
    peer = Peer('/robot1/flashrt')
    try:
        peer.client.wait_until_active(WAIT)
        assert peer.client.generate('x', max_tokens=2).result(WAIT).error_code == 0
        until(lambda: 'model.paht is not known' in process.log and 'model.path?' in process.log)
    finally:
        peer.close()
        process.close()
