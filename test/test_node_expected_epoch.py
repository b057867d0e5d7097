"""`expected_epoch` of a restore over DDS: from the client, the command line and a tree."""

import json
import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from builtin_interfaces.msg import Duration  # noqa: E402
from node_cases import clean, code_of, running, start_long, until, WAIT  # noqa: E402

from flashrt_ros import srv  # noqa: E402
from flashrt_ros.cli import exits  # noqa: E402
from flashrt_ros.errors import InvalidArgument  # noqa: E402
from flashrt_ros.msg import ErrorCode  # noqa: E402


@pytest.fixture(scope='module')
def node(tmp_path_factory):
    with running(tmp_path_factory.mktemp('node')) as (_, peer):
        yield peer


@pytest.fixture
def peer(node):
    clean(node.client)
    node.client.generate('a scene', max_tokens=0).result(WAIT)
    node.client.save('scene')
    return node


@pytest.fixture
def client(peer):
    return peer.client


def stands(client, session=''):
    """Return epoch and position of a session, which a refused rollback tells."""
    told = client.call('rollback', srv.Rollback.Request(
        session=session, expected_epoch=1), check=False)
    return told.epoch, told.position


def test_of_two_that_restore_in_one_epoch_the_second_is_refused(client):
    seen, _ = stands(client)
    first = client.restore('scene', expected_epoch=seen)
    assert first.epoch > seen
    client.generate('go', max_tokens=2).result(WAIT)
    before = stands(client)
    with pytest.raises(InvalidArgument) as refusal:
        client.restore('scene', expected_epoch=seen)
    told = int(re.search(r'is in epoch (\d+), not \d+', str(refusal.value))[1])
    assert told == refusal.value.response.epoch == first.epoch
    assert refusal.value.response.error_code == ErrorCode.INVALID_ARGUMENT
    assert stands(client) == before
    assert client.restore('scene', expected_epoch=told).epoch > told
    assert client.restore('scene').error_code == 0


def test_a_refusal_of_a_field_tells_where_the_session_stands_too(client):
    epoch, position = stands(client)
    assert epoch and position
    for request in (srv.RestoreCapsule.Request(capsule='scene', on_busy=9),
                    srv.RestoreCapsule.Request(capsule='no name'),
                    srv.RestoreCapsule.Request(capsule='scene', timeout=Duration(sec=-1))):
        told = client.call('restore_capsule', request, check=False)
        assert told.error_code in (ErrorCode.INVALID_ARGUMENT, ErrorCode.INVALID_NAME)
        assert told.epoch == epoch
    told = client.call('rollback', srv.Rollback.Request(to=7), check=False)
    assert told.error_code == ErrorCode.INVALID_ARGUMENT
    assert (told.epoch, told.position) == (epoch, position)


def test_a_stale_restore_preempts_nobody(client):
    seen, _ = stands(client)
    client.restore('scene')
    stream = start_long(client)
    assert code_of(lambda: client.restore('scene', on_busy='preempt', expected_epoch=seen)
                   ) == 'INVALID_ARGUMENT'
    assert not stream.done.done()
    present = stream.tokens[-1].epoch
    assert client.restore('scene', on_busy='preempt', expected_epoch=present).epoch > present
    assert stream.result(WAIT, check=False).error_code == ErrorCode.PREEMPTED


def test_who_waited_is_refused_by_what_happened_meanwhile(client):
    seen, _ = stands(client)
    stream = start_long(client)
    waiting = [client.call_async('restore_capsule', srv.RestoreCapsule.Request(
        capsule='scene', on_busy=srv.RestoreCapsule.Request.WAIT, expected_epoch=seen))
        for _ in range(2)]
    stream.cancel()
    until(lambda: all(future.done() for future in waiting))
    codes = sorted(future.result().error_code for future in waiting)
    assert codes == [ErrorCode.NONE, ErrorCode.INVALID_ARGUMENT]


def test_a_session_that_is_not_there(client):
    refused = client.call('restore_capsule', srv.RestoreCapsule.Request(
        session='nobody', capsule='scene', expected_epoch=7), check=False)
    assert (refused.error_code, refused.epoch) == (ErrorCode.UNKNOWN_SESSION, 0)
    assert code_of(lambda: client.close_session('nobody')) == 'UNKNOWN_SESSION'  # not made


def test_other_refusals_tell_the_epoch_too(client):
    refused = client.call('restore_capsule', srv.RestoreCapsule.Request(capsule='none'),
                          check=False)
    assert refused.error_code == ErrorCode.UNKNOWN_CAPSULE
    assert refused.epoch == stands(client)[0]


def test_the_command_line(client):
    def restore(epoch):
        process = subprocess.run(
            [sys.executable, '-m', 'flashrt_ros.cli.main', 'call', 'restore', 'scene',
             '--expected-epoch', str(epoch), '--json'], capture_output=True, text=True,
            timeout=120, env=os.environ, check=False)
        return process.returncode, json.loads(process.stdout)
    seen, _ = stands(client)
    status, done = restore(seen)
    assert status == exits.OK and done['epoch'] > seen
    status, refused = restore(seen)
    assert status == exits.for_code('INVALID_ARGUMENT')
    assert f'is in epoch {done["epoch"]}, not {seen}' in refused['error']['message']
    assert restore(-1)[0] == restore(2 ** 64)[0] == exits.USAGE


def test_a_tree(peer, monkeypatch):
    py_trees = pytest.importorskip('py_trees')
    from behaviours_cases import board, code, run
    from py_trees.common import Status

    from flashrt_ros.behaviours import FromBlackboard, Generate, RestoreCapsule, speculate
    client = peer.client
    py_trees.blackboard.Blackboard.clear()
    root = py_trees.composites.Sequence('Twice', memory=True, children=[
        Generate('Say', prompt='go', max_tokens=2, key='answer'),
        RestoreCapsule('First', capsule='scene', key='first',
                       expected_epoch=FromBlackboard('answer.epoch')),
        RestoreCapsule('Second', capsule='scene', key='second',
                       expected_epoch=FromBlackboard('answer.epoch'))])
    assert run(peer, root) == Status.FAILURE
    assert board('first').error_code == ErrorCode.NONE and code('second') == 'INVALID_ARGUMENT'
    assert board('second').epoch == board('first').epoch

    # Somebody restores between the look of a Speculate at the session and its commit.
    looked = speculate._moved

    def moved(*arguments):
        client.restore('scene')
        return looked(*arguments)
    monkeypatch.setattr(speculate, '_moved', moved)
    child = Generate('Think', prompt='go', max_tokens=2)
    assert run(peer, speculate.Speculate('Think', child)) == Status.FAILURE
    assert code('speculated') == 'INVALID_ARGUMENT'
    assert stands(client) == (board('speculated').epoch, client.list()[0].tokens)
