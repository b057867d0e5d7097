"""Lifecycle, parameters, latched topics and diagnostics (acceptance 35, 39)."""

from pathlib import Path
import sys

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from diagnostic_msgs.msg import DiagnosticArray  # noqa: E402
from node_cases import code_of, LATCHED, Peer, running, start_long, until, WAIT  # noqa: E402
from rcl_interfaces.srv import DescribeParameters, SetParameters  # noqa: E402
from rclpy.parameter import Parameter  # noqa: E402
from std_msgs.msg import String  # noqa: E402
from std_srvs.srv import Trigger  # noqa: E402

from flashrt_ros import srv  # noqa: E402
from flashrt_ros.msg import CapsuleList, NodeState  # noqa: E402

EVERY_SERVICE = {
    'save_capsule': srv.SaveCapsule.Request(capsule='x'),
    'restore_capsule': srv.RestoreCapsule.Request(capsule='x'),
    'fork_capsule': srv.ForkCapsule.Request(capsule='x', sessions=['a']),
    'rollback': srv.Rollback.Request(to=1, value=1),
    'list_capsules': srv.ListCapsules.Request(),
    'drop_capsule': srv.DropCapsule.Request(capsule='x'),
    'pin_capsule': srv.PinCapsule.Request(capsule='x'),
    'close_session': srv.CloseSession.Request(session='x'),
    'reset': Trigger.Request(), 'cancel_all': Trigger.Request()}


@pytest.fixture(scope='module')
def peer(tmp_path_factory):
    with running(tmp_path_factory.mktemp('node'), autostart=False) as (_, peer):
        yield peer


@pytest.fixture
def client(peer):
    return peer.client


def ask(peer, kind, name, request):
    client = peer.service(kind, name)
    future = client.call_async(request)
    until(future.done)
    peer.node.destroy_client(client)
    return future.result()


def set_parameter(peer, name, value):
    return ask(peer, SetParameters, 'set_parameters', SetParameters.Request(
        parameters=[Parameter(name, value=value).to_parameter_msg()])).results[0]


def go(client, *transitions):
    for transition in transitions:
        assert client.change_state(transition, timeout=WAIT), transition


def to_unconfigured(client):
    state = client.lifecycle()
    if state == 'active':
        go(client, 'deactivate')
    if state != 'unconfigured':
        go(client, 'cleanup')


def all_refuse(client, word):
    for service, request in EVERY_SERVICE.items():
        assert code_of(lambda s=service, r=request: client.call(s, r)) == 'NOT_ACTIVE', service
    result = client.generate('x').result(WAIT, check=False)
    assert result.error_code == 42001 and word in result.error_msg
    assert 'ros2 lifecycle set /flashrt' in result.error_msg


def test_every_service_in_every_wrong_state(client, peer):
    to_unconfigured(client)
    all_refuse(client, 'unconfigured')
    go(client, 'configure')
    all_refuse(client, 'inactive')
    go(client, 'activate')
    assert client.generate('x', max_tokens=2).result(WAIT).error_code == 0
    go(client, 'deactivate')
    all_refuse(client, 'inactive')
    prompts = peer.node.create_publisher(String, '/flashrt/prompt', 10)
    until(prompts.get_subscription_count)
    prompts.publish(String(data='nobody answers this'))
    go(client, 'cleanup')
    all_refuse(client, 'unconfigured')
    # Transitions that do not exist from here change nothing.
    for transition in ('activate', 'deactivate', 'cleanup'):
        assert not client.change_state(transition)
    assert client.lifecycle() == 'unconfigured'


@pytest.mark.parametrize('name, bad, good', [
    ('model.path', '/nowhere/at/all', 'random:tiny'),
    ('model.path', 'random:unheard_of', 'random:tiny'),
    ('model.path', 'no/such-model', 'random:tiny'),
    ('capsules.boot', 'no_such_capsule', ''),
    ('context.max_tokens', 1 << 24, 8192),
    ('capsules.device_bytes', 1 << 46, 64 << 20),
    ('capsules.directory', '/proc/nowhere', ''),
])
def test_a_failed_configure_leaves_a_node_that_can_be_configured(client, peer, name, bad, good):
    to_unconfigured(client)
    assert set_parameter(peer, name, bad).successful
    assert not client.change_state('configure', timeout=WAIT)
    assert client.lifecycle() == 'unconfigured'
    all_refuse(client, 'unconfigured')
    assert set_parameter(peer, name, good).successful
    go(client, 'configure', 'activate')
    assert client.generate('x', max_tokens=2).result(WAIT).error_code == 0


def test_a_file_in_place_of_a_model(client, peer, tmp_path):
    to_unconfigured(client)
    (tmp_path / 'config.json').write_text('{"model_type": "gpt_neox"')
    for path in (tmp_path, tmp_path / 'config.json'):
        assert set_parameter(peer, 'model.path', str(path)).successful
        assert not client.change_state('configure', timeout=WAIT)
        assert client.lifecycle() == 'unconfigured'
    assert set_parameter(peer, 'model.path', 'random:tiny').successful
    go(client, 'configure')


def test_ten_cycles_with_work_in_between(client):
    to_unconfigured(client)
    answers = []
    for _ in range(10):
        go(client, 'configure', 'activate')
        answers.append(list(client.generate('count', max_tokens=8).result(WAIT).token_ids))
        client.save('kept', overwrite=True)
        go(client, 'deactivate', 'activate')
        assert client.restore('kept').tokens_reused > 0  # deactivate keeps the state
        go(client, 'deactivate', 'cleanup')
    assert all(answer == answers[0] for answer in answers)


def test_deactivate_ends_goals_at_a_boundary(client):
    to_unconfigured(client)
    go(client, 'configure', 'activate')
    stream = start_long(client)
    waiting = client.generate('x', session='a')
    until(lambda: waiting.handle)
    go(client, 'deactivate')
    result = stream.result(WAIT, check=False)
    assert result.error_code == 42001 and result.completion_tokens > 0
    assert code_of(lambda: waiting.result(WAIT)) == 'NOT_ACTIVE'
    go(client, 'activate')
    following = client.generate(max_tokens=2).result(WAIT)
    assert following.tokens_reused == result.position


@pytest.mark.parametrize('name, value, words', [
    ('generation.temperature', -1.0, ''),
    ('generation.temperature', float('nan'), ''),
    ('generation.temperature', 'hot', 'a number'),
    ('generation.top_p', 0.0, 'above 0'),
    ('generation.max_tokens', 0, ''),
    ('stream.depth', -3, ''),
    ('timeouts.service', 0.0, ''),
    ('timeouts.stall', float('inf'), ''),
    ('device', 'abacus', 'one of auto, cpu, cuda'),
    ('model.dtype', 'int3', 'one of auto, float32, bfloat16'),
    ('capsules.directory', 'relative/path', 'absolute'),
    ('capsules.boot', '../etc/passwd', 'letter'),
])
def test_refused_parameters_say_what_is_allowed(client, peer, name, value, words):
    to_unconfigured(client)
    result = set_parameter(peer, name, value)
    assert not result.successful and words in result.reason and len(result.reason) > 20
    descriptor = ask(peer, DescribeParameters, 'describe_parameters',
                     DescribeParameters.Request(names=[name])).descriptors[0]
    assert descriptor.description and descriptor.additional_constraints


def test_baked_parameters_need_an_unconfigured_node(client, peer):
    to_unconfigured(client)
    go(client, 'configure')
    for name, value in (('context.max_tokens', 512), ('model.path', 'random:tiny'),
                        ('sessions.max', 3)):
        result = set_parameter(peer, name, value)
        assert not result.successful
        assert 'ros2 lifecycle set /flashrt cleanup' in result.reason
    for name, value in (('generation.temperature', 1), ('generation.temperature', 0.0),
                        ('stream.max_rate_hz', 0.0), ('stream.max_rate_hz', 100.0)):
        assert set_parameter(peer, name, value).successful
    go(client, 'cleanup')
    assert set_parameter(peer, 'sessions.max', 3).successful
    assert set_parameter(peer, 'sessions.max', 16).successful


def test_late_joiners_see_state_and_capsules(client):
    to_unconfigured(client)
    go(client, 'configure', 'activate')
    client.generate('x', max_tokens=2, session='a').result(WAIT)
    client.save('late', 'a')
    late = Peer()
    try:
        states = late.collect(NodeState, '/flashrt/state', LATCHED)
        lists = late.collect(CapsuleList, '/flashrt/capsules', LATCHED)
        # What is latched tells of an answer a moment later.
        state = until(lambda: {'a', 'default'} <= {
            session.name for session in states[-1].sessions} and states[-1])
        assert state.lifecycle == 'active' and state.model == 'random:tiny'
        names = [session.name for session in state.sessions]
        assert names == sorted(names)
        until(lambda: [info.name for info in lists[-1].capsules] == ['late'])
        client.drop('late')
        until(lambda: not lists[-1].capsules)
        go(client, 'deactivate', 'cleanup')
        until(lambda: states[-1].lifecycle == 'unconfigured' and not states[-1].sessions)
    finally:
        late.close()


def test_diagnostics(client, peer):
    to_unconfigured(client)
    go(client, 'configure', 'activate')
    arrays = peer.collect(DiagnosticArray, '/diagnostics', 10, first=True)
    client.generate('x', max_tokens=4).result(WAIT)
    client.save('x', overwrite=True)
    client.restore('x')
    assert code_of(lambda: client.restore('nope')) == 'UNKNOWN_CAPSULE'

    def values(name):
        status = next(s for s in arrays[-1].status if s.name == f'/flashrt: {name}')
        return {value.key: value.value for value in status.values}

    until(lambda: values('requests').get('restore_capsule UNKNOWN_CAPSULE') == '1')
    assert {status.name for status in arrays[-1].status} == {
        f'/flashrt: {name}' for name in ('runtime', 'latency', 'memory', 'requests', 'stall')}
    assert values('runtime')['lifecycle'] == 'active'
    assert values('latency')['restore count'] == '1'
    until(lambda: int(values('memory')['pool_used_bytes']) > 0)  # as of the last look at it
    assert all(status.hardware_id == 'cpu' for status in arrays[-1].status)
    assert set_parameter(peer, 'warn.pool_use', 1e-9).successful
    until(lambda: any(s.level == b'\x01' and 'warn.pool_use' in s.message
                      for s in arrays[-1].status))
    assert set_parameter(peer, 'warn.pool_use', 0.9).successful
