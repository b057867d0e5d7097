"""What is answered while a long prefill runs, over DDS (acceptance 33)."""

from pathlib import Path
import sys
import time

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from diagnostic_msgs.msg import DiagnosticArray  # noqa: E402
from node_cases import clean, code_of, running, until  # noqa: E402
from rcl_interfaces.srv import GetParameters  # noqa: E402
from rclpy.qos import DurabilityPolicy, QoSProfile  # noqa: E402

from flashrt_ros import srv  # noqa: E402
from flashrt_ros.client import to_duration  # noqa: E402
from flashrt_ros.msg import NodeState  # noqa: E402

CHUNK = 0.4  # seconds that a chunk takes here, as with a larger model
LONG = list(range(60, 90)) * 200  # 6000 tokens, 12 chunks: about five seconds
SLOW = f"""
import time
from flashrt_ros import plan
append = plan.EagerPlan.append
def slow(self, ids):
    if len(ids) >= 64:
        time.sleep({CHUNK})
    return append(self, ids)
plan.EagerPlan.append = slow
"""
CALL = 5 * CHUNK  # a call waits for the end of a chunk; the rest is for a slow machine


@pytest.fixture(scope='module')
def system(tmp_path_factory):
    # A busy machine adds to the five seconds of a prefill, which are the limit by default.
    with running(tmp_path_factory.mktemp('node'), fault=SLOW,
                 timeouts__service=20.0) as (process, peer):
        yield peer


@pytest.fixture
def peer(system):
    clean(system.client)
    system.client.generate('a scene', max_tokens=3, session='other').result(20)
    system.client.save('scene', 'other')
    return system


def prefilling(client, **fields):
    """Return the stream of a goal whose prefill has begun."""
    stream = client.generate(token_ids=LONG, session='long', max_tokens=4, **fields)
    until(lambda: stream.handle)
    time.sleep(CHUNK)
    return stream


def quick(function):
    begun = time.monotonic()
    value = function()
    assert time.monotonic() - begun < CALL
    return value


def test_what_needs_no_boundary_of_the_session_is_answered(peer):
    client = peer.client
    latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    states = peer.collect(NodeState, '/flashrt/state', latched)
    arrays = peer.collect(DiagnosticArray, '/diagnostics', 10)
    parameters = peer.node.create_client(GetParameters, '/flashrt/get_parameters')
    assert parameters.wait_for_service(10)
    stream = prefilling(client)
    arrays.clear()
    futures = {
        'list': client.call_async('list_capsules', srv.ListCapsules.Request()),
        'pin': client.call_async('pin_capsule', srv.PinCapsule.Request(
            capsule='scene', pin=True)),
        'save': client.call_async('save_capsule', srv.SaveCapsule.Request(
            session='other', capsule='again')),
        'restore': client.call_async('restore_capsule', srv.RestoreCapsule.Request(
            session='a', capsule='scene')),
        'fork': client.call_async('fork_capsule', srv.ForkCapsule.Request(
            capsule='scene', sessions=['c']))}
    parameter = parameters.call_async(GetParameters.Request(names=['device']))
    until(lambda: parameter.done() and all(future.done() for future in futures.values()), CALL)
    answers = {name: future.result() for name, future in futures.items()}
    assert not any(answer.error_code for answer in answers.values()), answers
    assert 'scene' in [info.name for info in answers['list'].capsules]
    assert answers['save'].info.tokens == answers['restore'].tokens_reused > 0
    quick(lambda: client.drop('again'))
    until(lambda: arrays, 3.0)
    session = until(lambda: (sessions := {s.name: s for s in states[-1].sessions})
                    and 'c' in sessions and sessions)
    assert session['long'].busy and session['long'].position == 0, 'no half of an append is told'
    assert not stream.done.done() and not stream.tokens, 'the prefill ended before the calls did'
    result = stream.result(30)
    assert result.tokens_prefilled == len(LONG) and result.completion_tokens > 0


def test_what_needs_one_waits_for_the_end_or_its_own(peer):
    client = peer.client
    stream = prefilling(client)
    late = client.call('save_capsule', srv.SaveCapsule.Request(
        session='long', capsule='late', timeout=to_duration(0.3)), check=False)
    assert late.error_code == 42003 and 'nothing was changed' in late.error_msg
    late = client.call('restore_capsule', srv.RestoreCapsule.Request(
        session='long', capsule='scene', on_busy=2, timeout=to_duration(0.3)), check=False)
    assert late.error_code == 42003
    assert code_of(lambda: client.restore('scene', 'long')) == 'BUSY'
    assert code_of(lambda: client.rollback(tokens=1, session='long')) == 'BUSY'
    assert not stream.done.done()
    saved = client.save('after', 'long')
    assert saved.info.tokens >= len(LONG)
    stream.result(30)
    assert sorted(info.name for info in client.list()) == ['after', 'scene'], 'no late save'
    assert client.save('still', 'long').info.tokens > len(LONG), 'no late restore'


def test_a_restore_with_preempt_acts_between_chunks(peer):
    client = peer.client
    stream = prefilling(client)
    restored = quick(lambda: client.restore('scene', 'long', on_busy='preempt'))
    result = stream.result(5, check=False)
    assert result.error_code == 42005 and result.tokens_prefilled == 0
    again = client.generate(session='long', max_tokens=1).result(20)
    assert again.tokens_reused == restored.tokens_reused


def test_a_restore_waits_for_a_rollback_of_its_session(peer):
    client = peer.client
    prefilling(client).result(30)
    rollback = client.call_async('rollback', srv.Rollback.Request(
        session='long', to=srv.Rollback.Request.POSITION, value=3000))  # replays six chunks
    time.sleep(CHUNK)
    restored = client.restore('scene', 'long')
    assert rollback.done() and rollback.result().position == 3000
    assert restored.epoch > rollback.result().epoch


def test_a_cancel_acts_between_chunks(peer):
    client = peer.client
    stream = prefilling(client)
    stream.cancel()
    result = quick(lambda: stream.result(5, check=False))
    assert (result.error_code, result.position) == (42004, 0)


def test_a_goal_that_ends_while_it_waits_says_where_its_session_stands(peer):
    client = peer.client
    restored = client.restore('scene', 'a')
    stream = prefilling(client)
    ended = {
        'canceled': client.generate('x', session='a'),
        'timeout': client.generate('x', session='a', timeout=0.2),
        'preempted': client.generate('x', session='b'),
        'refused': client.generate('x', session='a', temperature=-3.0)}
    until(lambda: all(goal.handle for goal in ended.values()))
    ended['canceled'].cancel()
    rescued = client.restore('scene', 'b', on_busy='preempt')
    for name, goal in ended.items():
        result = goal.result(5, check=False)
        assert result.error_code, name
        if name != 'preempted':
            assert (result.epoch, result.position) == (
                restored.epoch, restored.tokens_reused), name
    # That one was told to end before the restore, in a session that was not there yet.
    assert ended['preempted'].result(5, check=False).epoch in (0, rescued.epoch)
    assert not stream.done.done()
    last = until(lambda: ended['canceled'].tokens)[-1]
    assert (last.epoch, last.position) == (restored.epoch, restored.tokens_reused)
    own = client.generate('x', session='long')
    own.cancel()
    assert own.result(5, check=False).position == 0, 'the boundary before the append'
    stream.result(30)
