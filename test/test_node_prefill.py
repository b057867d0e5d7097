"""What is answered while a long prefill runs, over DDS (acceptance 33)."""

import contextlib
from pathlib import Path
import sys

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from diagnostic_msgs.msg import DiagnosticArray  # noqa: E402
from node_cases import clean, code_of, last, LATCHED, running, until, WAIT  # noqa: E402
from rcl_interfaces.srv import GetParameters  # noqa: E402

from flashrt_ros import srv  # noqa: E402
from flashrt_ros.client import to_duration  # noqa: E402
from flashrt_ros.msg import NodeState  # noqa: E402

LONG = list(range(60, 90)) * 400  # 12000 tokens, 24 chunks
# Each chunk waits for leave, in which nothing is served, as one of a larger model that takes long.
HELD = """
import pathlib, time
from flashrt_ros import plan
append = plan.EagerPlan.append
def held(self, ids):
    if len(ids) >= 64:
        pathlib.Path('began').touch()
        while not pathlib.Path('hurry').exists():
            try:
                pathlib.Path('leave').unlink()
                break
            except FileNotFoundError:
                time.sleep(0.002)
    return append(self, ids)
plan.EagerPlan.append = held
"""


class Chunks:
    """Those of the node whose working folder this is: what they do is told by files."""

    def __init__(self, folder):
        self._began, self._leave, self._hurry = (
            folder / name for name in ('began', 'leave', 'hurry'))

    def hold(self):
        for file in (self._hurry, self._leave, self._began):
            file.unlink(missing_ok=True)

    def begin(self):
        """Wait until one is held."""
        until(self._began.exists)

    def end(self):
        self._hurry.touch()

    def until(self, condition):
        """Let one after the other end until something is true: it has to come within five."""
        for patience in (0.5, 2.0, 10.0, 20.0, 20.0):
            self._leave.touch()
            with contextlib.suppress(AssertionError):
                return until(condition, patience)
        raise AssertionError('not within five chunks')

    def answer(self, *futures):
        """Return what futures hold, once all are done."""
        self.until(lambda: all(future.done() for future in futures))
        return [future.result() for future in futures]


@pytest.fixture(scope='module')
def system(tmp_path_factory):
    folder = tmp_path_factory.mktemp('node')
    with running(folder, fault=HELD, context__max_tokens=16384, timeouts__service=WAIT,
                 timeouts__stall=0.0) as (_, peer):
        yield peer, Chunks(folder)


@pytest.fixture
def chunks(system):
    chunks = system[1]
    yield chunks
    chunks.end()


@pytest.fixture
def peer(system, chunks):
    peer, _ = system
    chunks.end()
    clean(peer.client)
    peer.client.generate('a scene', max_tokens=3, session='other').result(WAIT)
    peer.client.save('scene', 'other')
    return peer


def prefilling(client, chunks, **fields):
    """Return the stream of a goal whose prefill has begun, and is held in its first chunk."""
    chunks.hold()
    stream = client.generate(token_ids=LONG, session='long', max_tokens=4, **fields)
    chunks.begin()
    until(lambda: stream.handle)
    return stream


def test_what_needs_no_boundary_of_the_session_is_answered(peer, chunks):
    client = peer.client
    states = peer.collect(NodeState, '/flashrt/state', LATCHED)
    arrays = peer.collect(DiagnosticArray, '/diagnostics', 10)
    parameters = peer.service(GetParameters, 'get_parameters')
    stream = prefilling(client, chunks)
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
    answers = dict(zip(futures, chunks.answer(*futures.values()), strict=True))
    until(parameter.done)
    assert not any(answer.error_code for answer in answers.values()), answers
    assert 'scene' in [info.name for info in answers['list'].capsules]
    assert answers['save'].info.tokens == answers['restore'].tokens_reused > 0
    [dropped] = chunks.answer(client.call_async(
        'drop_capsule', srv.DropCapsule.Request(capsule='again')))
    assert dropped.error_code == 0
    until(lambda: arrays)
    session = chunks.until(lambda: (sessions := {s.name: s for s in states[-1].sessions})
                           and 'c' in sessions and sessions)
    assert session['long'].busy and session['long'].position == 0, 'no half of an append is told'
    assert not stream.done.done() and not stream.tokens, 'the prefill ended before the calls did'
    chunks.end()
    result = stream.result(WAIT)
    assert result.tokens_prefilled == len(LONG) and result.completion_tokens > 0


def test_what_needs_one_waits_for_the_end_or_its_own(peer, chunks):
    client = peer.client
    stream = prefilling(client, chunks)
    late = client.call('save_capsule', srv.SaveCapsule.Request(
        session='long', capsule='late', timeout=to_duration(0.3)), check=False)
    assert late.error_code == 42003 and 'nothing was changed' in late.error_msg
    late = client.call('restore_capsule', srv.RestoreCapsule.Request(
        session='long', capsule='scene', on_busy=2, timeout=to_duration(0.3)), check=False)
    assert late.error_code == 42003
    assert code_of(lambda: client.restore('scene', 'long')) == 'BUSY'
    assert code_of(lambda: client.rollback(tokens=1, session='long')) == 'BUSY'
    saving = client.call_async('save_capsule', srv.SaveCapsule.Request(
        session='long', capsule='after'))
    chunks.answer(client.call_async('list_capsules', srv.ListCapsules.Request()))
    assert not stream.done.done() and not saving.done()
    chunks.end()
    until(saving.done)
    assert saving.result().info.tokens >= len(LONG)
    stream.result(WAIT)
    assert sorted(info.name for info in client.list()) == ['after', 'scene'], 'no late save'
    assert client.save('still', 'long').info.tokens > len(LONG), 'no late restore'


def test_a_restore_with_preempt_acts_between_chunks(peer, chunks):
    client = peer.client
    stream = prefilling(client, chunks)
    [restored] = chunks.answer(client.call_async('restore_capsule', srv.RestoreCapsule.Request(
        session='long', capsule='scene', on_busy=srv.RestoreCapsule.Request.PREEMPT)))
    assert restored.error_code == 0
    result = stream.result(WAIT, check=False)
    assert result.error_code == 42005 and result.tokens_prefilled == 0
    again = client.generate(session='long', max_tokens=1).result(WAIT)
    assert again.tokens_reused == restored.tokens_reused


def test_a_restore_waits_for_a_rollback_of_its_session(peer, chunks):
    client = peer.client
    stream = prefilling(client, chunks)
    chunks.end()
    stream.result(WAIT)
    chunks.hold()
    rollback = client.call_async('rollback', srv.Rollback.Request(
        session='long', to=srv.Rollback.Request.POSITION, value=3000))
    chunks.begin()  # the first of the six that it replays
    waiting = client.call_async('restore_capsule', srv.RestoreCapsule.Request(
        session='long', capsule='scene'))
    chunks.answer(client.call_async('list_capsules', srv.ListCapsules.Request()))
    assert not waiting.done()
    chunks.end()
    until(lambda: rollback.done() and waiting.done())
    assert rollback.result().position == 3000
    assert waiting.result().error_code == 0 and waiting.result().epoch > rollback.result().epoch


def test_a_cancel_acts_between_chunks(peer, chunks):
    stream = prefilling(peer.client, chunks)
    stream.cancel()
    [result] = chunks.answer(stream.done)
    assert (result.error_code, result.position) == (42004, 0)


def test_a_goal_that_ends_while_it_waits_says_where_its_session_stands(peer, chunks):
    client = peer.client
    restored = client.restore('scene', 'a')
    stream = prefilling(client, chunks)
    ended = {
        'canceled': client.generate('x', session='a'),
        'timeout': client.generate('x', session='a', timeout=0.2),
        'preempted': client.generate('x', session='b'),
        'refused': client.generate('x', session='a', temperature=-3.0)}
    until(lambda: all(goal.handle for goal in ended.values()))
    ended['canceled'].cancel()
    [rescued] = chunks.answer(client.call_async('restore_capsule', srv.RestoreCapsule.Request(
        session='b', capsule='scene', on_busy=srv.RestoreCapsule.Request.PREEMPT)))
    assert rescued.error_code == 0
    for name, goal in ended.items():
        result = goal.result(WAIT, check=False)
        assert result.error_code, name
        if name != 'preempted':
            assert (result.epoch, result.position) == (
                restored.epoch, restored.tokens_reused), name
    # That one was told to end before the restore, in a session that was not there yet.
    assert ended['preempted'].result(WAIT, check=False).epoch in (0, rescued.epoch)
    assert not stream.done.done()
    told = last(ended['canceled'].tokens)
    assert (told.epoch, told.position) == (restored.epoch, restored.tokens_reused)
    own = client.generate('x', session='long')
    own.cancel()
    assert own.result(WAIT, check=False).position == 0, 'the boundary before the append'
    assert not stream.done.done()
    chunks.end()
    stream.result(WAIT)
