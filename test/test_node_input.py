"""Bad input over DDS: a typed refusal each, state unchanged, node alive (acceptance 25, 37)."""

import math
from pathlib import Path
import sys

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from node_cases import clean, LATCHED, running, until, WAIT  # noqa: E402
from std_msgs.msg import String  # noqa: E402

from flashrt_ros import srv  # noqa: E402
from flashrt_ros.action import Generate  # noqa: E402
from flashrt_ros.client import to_duration  # noqa: E402
from flashrt_ros.msg import ChatMessage, ErrorCode, NodeState  # noqa: E402

BAD_NAMES = ['a/b', '../x', '..', '.hidden', '-x', 'x' * 300, 'кухня', '厨房', 'a b', 'a\nb', ' ',
             'é', 'a:b', '~', '$HOME', 'a\\b', '%s', 'x' * 129]
NEGATIVE = to_duration(0.0)
NEGATIVE.sec = -1  # the type allows it


@pytest.fixture(scope='module')
def peer(tmp_path_factory):
    with running(tmp_path_factory.mktemp('node'), context__max_tokens=512, sessions__max=4,
                 capsules__device_bytes=4 << 20) as (_, peer):
        clean(peer.client)
        peer.client.generate('a scene', max_tokens=4).result(WAIT)
        peer.client.save('scene')
        yield peer


@pytest.fixture
def client(peer):
    """The client; after each test, the state must be what it was."""
    before = peer.client.list()
    position = peer.client.save('probe', overwrite=True).info.tokens
    peer.client.drop('probe')
    yield peer.client
    assert peer.client.lifecycle() == 'active'
    assert [(i.name, i.id, i.tokens) for i in peer.client.list()] == [
        (i.name, i.id, i.tokens) for i in before]
    assert peer.client.save('probe', overwrite=True).info.tokens == position
    peer.client.drop('probe')


def refused(response, code):
    assert response.error_code == getattr(ErrorCode, code), response
    assert len(response.error_msg) > 20 and response.error_msg[-1] in '.!?', response.error_msg


@pytest.mark.parametrize('name', BAD_NAMES)
def test_names_that_break_the_rule(client, name):
    for service, request in (
            ('save_capsule', srv.SaveCapsule.Request(capsule=name)),
            ('save_capsule', srv.SaveCapsule.Request(capsule='x', session=name)),
            ('restore_capsule', srv.RestoreCapsule.Request(capsule=name)),
            ('restore_capsule', srv.RestoreCapsule.Request(capsule='scene', session=name)),
            ('fork_capsule', srv.ForkCapsule.Request(capsule=name, sessions=['a'])),
            ('fork_capsule', srv.ForkCapsule.Request(capsule='scene', sessions=['a', name])),
            ('fork_capsule', srv.ForkCapsule.Request(source_session=name, sessions=['a'])),
            ('rollback', srv.Rollback.Request(session=name, to=1, value=1)),
            ('list_capsules', srv.ListCapsules.Request(session=name)),
            ('drop_capsule', srv.DropCapsule.Request(capsule=name)),
            ('pin_capsule', srv.PinCapsule.Request(capsule=name)),
            ('close_session', srv.CloseSession.Request(session=name))):
        refused(client.call(service, request, check=False), 'INVALID_NAME')
    for field in ('session', 'capsule', 'save_as'):
        stream = client.generate('x', max_tokens=1, **{field: name})
        refused(stream.result(WAIT, check=False), 'INVALID_NAME')


def test_names_that_are_missing(client):
    for service, request in (
            ('save_capsule', srv.SaveCapsule.Request()),
            ('restore_capsule', srv.RestoreCapsule.Request()),
            ('drop_capsule', srv.DropCapsule.Request()),
            ('pin_capsule', srv.PinCapsule.Request())):
        refused(client.call(service, request, check=False), 'INVALID_NAME')
    refused(client.call('fork_capsule', srv.ForkCapsule.Request(), check=False),
            'INVALID_ARGUMENT')


@pytest.mark.parametrize('code, service, request_', [
    ('UNKNOWN_CAPSULE', 'restore_capsule', srv.RestoreCapsule.Request(capsule='nope')),
    ('UNKNOWN_CAPSULE', 'fork_capsule', srv.ForkCapsule.Request(capsule='nope', sessions=['a'])),
    ('UNKNOWN_CAPSULE', 'drop_capsule', srv.DropCapsule.Request(capsule='nope')),
    ('UNKNOWN_CAPSULE', 'pin_capsule', srv.PinCapsule.Request(capsule='nope')),
    ('UNKNOWN_SESSION', 'save_capsule', srv.SaveCapsule.Request(capsule='x', session='nope')),
    ('UNKNOWN_SESSION', 'rollback', srv.Rollback.Request(session='nope', to=1, value=1)),
    ('UNKNOWN_SESSION', 'close_session', srv.CloseSession.Request(session='nope')),
    ('UNKNOWN_SESSION', 'fork_capsule',
     srv.ForkCapsule.Request(source_session='nope', sessions=['a'])),
    ('NAME_EXISTS', 'save_capsule', srv.SaveCapsule.Request(capsule='scene')),
    ('NAME_EXISTS', 'fork_capsule',
     srv.ForkCapsule.Request(capsule='scene', sessions=['a', 'default'])),
    ('CAPACITY', 'fork_capsule',
     srv.ForkCapsule.Request(capsule='scene', sessions=['a', 'b', 'c', 'd'])),
    ('INVALID_ARGUMENT', 'fork_capsule',
     srv.ForkCapsule.Request(capsule='scene', sessions=['a', 'a'])),
    ('INVALID_ARGUMENT', 'fork_capsule',
     srv.ForkCapsule.Request(capsule='scene', sessions=['a', 'b'], seeds=[1])),
    ('INVALID_ARGUMENT', 'fork_capsule',
     srv.ForkCapsule.Request(capsule='scene', source_session='default', sessions=['a'])),
    ('INVALID_ARGUMENT', 'save_capsule', srv.SaveCapsule.Request(capsule='x', timeout=NEGATIVE)),
    ('INVALID_ARGUMENT', 'save_capsule', srv.SaveCapsule.Request(capsule='x', note='n' * 5000)),
    ('INVALID_ARGUMENT', 'save_capsule', srv.SaveCapsule.Request(capsule='x', align=True)),
    ('INVALID_ARGUMENT', 'restore_capsule', srv.RestoreCapsule.Request(capsule='scene', on_busy=9)),
    ('INVALID_ARGUMENT', 'rollback', srv.Rollback.Request(to=7, value=1)),
    ('INVALID_ARGUMENT', 'rollback', srv.Rollback.Request(to=0, value=2 ** 64 - 1)),
    ('INVALID_ARGUMENT', 'rollback', srv.Rollback.Request(to=1, value=100000)),
    ('INVALID_ARGUMENT', 'rollback', srv.Rollback.Request(to=2, value=100)),
    ('INVALID_ARGUMENT', 'rollback', srv.Rollback.Request(to=1, value=1, expected_epoch=7)),
])
def test_services(client, code, service, request_):
    refused(client.call(service, request_, check=False), code)


def answer(client, goal):
    """Return the response to a goal that is sent as it is, without the checks of our client."""
    sent = []
    client.action.send_goal_async(goal).add_done_callback(sent.append)
    handle = until(lambda: sent)[0].result()
    assert handle.accepted
    done = []
    handle.get_result_async().add_done_callback(done.append)
    return until(lambda: done)[0].result()


@pytest.mark.parametrize('code, fields', [
    ('INVALID_ARGUMENT', {'temperature': math.nan}),
    ('INVALID_ARGUMENT', {'temperature': math.inf}),
    ('INVALID_ARGUMENT', {'temperature': -0.5}),
    ('INVALID_ARGUMENT', {'top_p': math.nan}),
    ('INVALID_ARGUMENT', {'top_p': 0.0}),
    ('INVALID_ARGUMENT', {'top_p': 1.5}),
    ('INVALID_ARGUMENT', {'top_p': -2.0}),
    ('INVALID_ARGUMENT', {'top_k': -2}),
    ('INVALID_ARGUMENT', {'max_tokens': -2}),
    ('INVALID_ARGUMENT', {'max_tokens': -2 ** 31}),
    ('INVALID_ARGUMENT', {'on_busy': 77}),
    ('INVALID_ARGUMENT', {'on_cancel': 2}),
    ('INVALID_ARGUMENT', {'timeout': NEGATIVE}),
    ('INVALID_ARGUMENT', {'stop': ['']}),
    ('INVALID_ARGUMENT', {'stop': ['x'] * 100}),
    ('INVALID_ARGUMENT', {'stop': ['x' * 1000]}),
    ('INVALID_ARGUMENT', {'token_ids': [1, 2]}),
    ('INVALID_ARGUMENT', {'messages': [ChatMessage(role='user', content='x')]}),
    ('INVALID_ARGUMENT', {'prompt': '', 'messages': [ChatMessage(content='no role')]}),
    ('INVALID_ARGUMENT', {'prompt': '', 'token_ids': [-1]}),
    ('INVALID_ARGUMENT', {'prompt': '', 'token_ids': [2 ** 31 - 1]}),
    ('INVALID_ARGUMENT', {'prompt': '', 'token_ids': [1], 'raw': True}),
    ('INVALID_ARGUMENT', {'prompt': 'x' * (1 << 20)}),
    ('CONTEXT_FULL', {'prompt': 'x ' * 2000}),
    ('CONTEXT_FULL', {'prompt': '', 'token_ids': [1] * 512}),
    ('UNKNOWN_CAPSULE', {'capsule': 'nope'}),
    ('INVALID_ARGUMENT', {'prompt': '', 'session': 'fresh'}),
])
def test_goals(client, code, fields):
    goal = Generate.Goal(**{'prompt': 'x', 'max_tokens': 1, **fields})
    response = answer(client, goal)
    assert response.status == 6  # aborted
    refused(response.result, code)


def test_absurd_numbers_that_are_legal(client):
    client.save('here')
    for fields in ({'seed': 2 ** 64 - 1}, {'temperature': 1e300}, {'top_k': 2 ** 31 - 1},
                   {'timeout': 2.0 ** 31 - 1}, {'temperature': 1e-300}, {'top_p': 1e-300}):
        result = client.generate('x', max_tokens=2, capsule='here', **fields).result(
            WAIT, check=False)
        assert result.error_code in (0, ErrorCode.INVALID_ARGUMENT), (fields, result.error_msg)
    client.restore('here')
    client.drop('here')


def test_text_that_dds_cannot_carry(client):
    client.save('here')
    for prompt in ('a\0b', '\N{REPLACEMENT CHARACTER}', '\U0001f916\u200b', '\r\n\t'):
        goal = Generate.Goal(prompt=prompt, max_tokens=2, capsule='here')
        assert answer(client, goal).result.error_code == 0
    client.restore('here')
    client.drop('here')


def test_a_bad_prompt_on_the_topic_ends_nothing(client, peer):
    publisher = peer.node.create_publisher(String, '/flashrt/prompt', 10)
    until(publisher.get_subscription_count)
    publisher.publish(String(data='x' * (1 << 20)))
    publisher.publish(String(data=''))
    states = peer.collect(NodeState, '/flashrt/state', LATCHED)
    assert states[-1].lifecycle == 'active'
