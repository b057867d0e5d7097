"""Generate and ReadTokens: success, failure, rejection, cancel, timeout."""

from pathlib import Path
import sys
import time

import pytest

pytest.importorskip('rclpy')
py_trees = pytest.importorskip('py_trees')
sys.path.insert(0, str(Path(__file__).parent))

from behaviours_cases import board, code, fresh, planted, position, run, ticked  # noqa: E402
from lifecycle_msgs.srv import GetState  # noqa: E402
from node_cases import Peer, PROMPTS, running, start_long, until, WAIT  # noqa: E402
from py_trees.common import ClearingPolicy, ParallelPolicy, Status  # noqa: E402
import rclpy  # noqa: E402
from rclpy.action import ActionServer, GoalResponse  # noqa: E402
from rclpy.executors import SingleThreadedExecutor  # noqa: E402

from flashrt_ros.action import Generate as Action  # noqa: E402
from flashrt_ros.behaviours import (  # noqa: E402
    disconnect,
    FromBlackboard,
    Generate,
    is_settled,
    ReadTokens,
)
from flashrt_ros.msg import Token  # noqa: E402


@pytest.fixture(scope='module')
def node(tmp_path_factory):
    with running(tmp_path_factory.mktemp('generate')) as (_, peer):
        yield peer


@pytest.fixture
def peer(node):
    fresh(node)
    yield node


@pytest.fixture(scope='module')
def talkative(node):
    """A prompt with a long answer."""
    stream = start_long(node.client, session='a')
    stream.cancel()
    stream.result(WAIT, check=False)
    for prompt in PROMPTS:
        result = node.client.generate(prompt, session='b', max_tokens=600).result(
            WAIT, check=False)
        node.client.close_session('b')
        if result.completion_tokens == 600:
            return prompt
    raise AssertionError('no prompt leads to a long answer')


def test_answer_on_the_blackboard(peer):
    want = peer.client.generate('tell me', session='a', max_tokens=8, temperature=0.0).result(WAIT)
    root = Generate('Answer', prompt='tell me', max_tokens=8, temperature=0.0)
    assert run(peer, root) == Status.SUCCESS
    answer = board('answer')
    assert list(answer.token_ids) == list(want.token_ids) and answer.text == want.text
    assert board('answer.error_code') == 0 and answer.position == want.position
    assert root.feedback_message.strip('…') in answer.text.replace('\n', ' ')


def test_goal_fields(peer):
    py_trees.blackboard.Blackboard.set('mission', 'tell me')
    root = Generate('Ask', prompt=FromBlackboard('mission'), max_tokens=2, save_as='end', seed=3,
                    session='a')
    assert run(peer, root) == Status.SUCCESS
    assert board('answer').info.name == 'end' and len(board('answer').token_ids) == 2
    root = Generate('Only read', messages=[('system', 'A kitchen.')], max_tokens=0)
    assert run(peer, root) == Status.SUCCESS
    assert root.feedback_message == f'at {position(peer)}'


def test_refusals(peer):
    for fields, expected in (({'temperature': float('nan')}, 'INVALID_ARGUMENT'),
                             ({'capsule': 'nothing'}, 'UNKNOWN_CAPSULE'),
                             ({'prompt': FromBlackboard('nowhere')}, 'INVALID_ARGUMENT'),
                             ({'on_busy': 'perhaps'}, 'INVALID_ARGUMENT'),
                             ({'max_tokens': 'many'}, 'INVALID_ARGUMENT')):
        root = Generate('No', **{'prompt': 'x', **fields})
        assert run(peer, root) == Status.FAILURE, fields
        assert code('answer') == expected, (fields, board('answer'))
    assert position(peer) == 0


def test_rejected_by_a_server():
    # The node accepts every goal; another server need not.
    other = Peer('/mock')
    other.node.create_service(GetState, '/mock/get_state', lambda _, response: response)
    server = ActionServer(
        other.node, Action, '/mock/generate', execute_callback=lambda handle: Action.Result(),
        goal_callback=lambda request: GoalResponse.REJECT)
    try:
        assert run(other, Generate('No', prompt='x', server='/mock')) == Status.FAILURE
        assert code('answer') == 'GOAL_REJECTED'
    finally:
        other.close()
        server.destroy()


def test_timeout_is_the_nodes(peer, talkative):
    root = Generate('Long', prompt=talkative, max_tokens=6000, timeout=1.0)
    assert run(peer, root) == Status.FAILURE and code('answer') == 'TIMEOUT'
    assert board('answer').token_ids  # what was said until then


def test_no_node():
    other = Peer('/nobody')
    try:
        root = Generate('No', prompt='x', server='/nobody', discovery=0.2)
        assert run(other, root) == Status.FAILURE and code('answer') == 'TIMEOUT'
        root = ReadTokens('No', server='/nobody', timeout=0.2)
        assert run(other, root) == Status.FAILURE
    finally:
        other.close()


def test_canceled_by_someone_else(peer, talkative):
    root = Generate('Long', prompt=talkative, max_tokens=6000)
    with planted(peer, root) as tree:
        ticked(tree, lambda: root.stream and root.stream.tokens)
        assert root.feedback_message and root.status == Status.RUNNING
        peer.client.cancel_all()
        assert ticked(tree) == Status.FAILURE and code('answer') == 'CANCELED'


def test_interruption_cancels(peer, talkative):
    before = position(peer)
    root = Generate('Long', prompt=talkative, max_tokens=6000,
                    on_cancel=Action.Goal.ROLLBACK)
    with planted(peer, root) as tree:
        ticked(tree, lambda: root.stream and root.stream.tokens)
        stream = root.stream
        with peer.paused():
            root.stop(Status.INVALID)
            assert root.status == Status.INVALID and root.connection.settling('default')
        until(lambda: not root.connection.settling(''))
        result = stream.result(WAIT, check=False)
        assert result.finish_reason == Token.CANCELED and position(peer) == before
        # At once again: it waits for what was interrupted, then runs as if nothing had been.
        root.fields.update(max_tokens=5, on_busy='reject')
        tree.tick()
        root.stop(Status.INVALID)
        assert ticked(tree) == Status.SUCCESS and board('answer').completion_tokens == 5


def test_interruption_before_the_acknowledgement(peer, talkative):
    # This node is spun by nobody from when the other one knows it until the goal was sent and the
    # behaviour interrupted.
    before = position(peer)
    node = rclpy.create_node('late', context=peer.context)
    executor = SingleThreadedExecutor(context=peer.context)
    root = Generate('Long', prompt=talkative, max_tokens=6000, on_cancel=Action.Goal.ROLLBACK)
    tree = py_trees.trees.BehaviourTree(root)
    tree.setup(node=node)
    try:
        executor.add_node(node)
        until(lambda: executor.spin_once(timeout_sec=0.05) or root.connection.client.is_ready())
        executor.remove_node(node)
        ticked(tree, lambda: root.stream)
        stream = root.stream
        time.sleep(0.1)  # the node has the goal and acknowledged it; nobody here looks
        assert stream.handle is None and root.status == Status.RUNNING
        root.stop(Status.INVALID)
        executor.add_node(node)
        until(lambda: executor.spin_once(timeout_sec=0.05) or is_settled(node))
        assert stream.done.done() and stream.done.result().finish_reason == Token.CANCELED
        assert position(peer) == before
    finally:
        executor.shutdown()
        disconnect(node)
        node.destroy_node()


def test_several_at_one_server(peer):
    children = [Generate(f'G{number}', prompt='tell me', session=session, max_tokens=6,
                         temperature=0.0, key=f'g{number}')
                for number, session in enumerate(('a', 'b', 'c'))]
    root = py_trees.composites.Parallel('All', ParallelPolicy.SuccessOnAll(), children)
    assert run(peer, root) == Status.SUCCESS
    answers = [list(board(f'g{number}').token_ids) for number in range(3)]
    assert answers[0] and answers == [answers[0]] * 3


def test_read_tokens_hears_what_is_said(peer):
    root = py_trees.composites.Parallel('Talk', ParallelPolicy.SuccessOnAll(), [
        ReadTokens('Hear', session='a', timeout=WAIT),
        Generate('Other', prompt='where', session='b', max_tokens=4, key='other'),
        Generate('Say', prompt='tell me', session='a', max_tokens=12)])
    with planted(peer, root) as tree:
        peer.known()
        assert ticked(tree) == Status.SUCCESS
    spoken = board('spoken')
    assert spoken.complete and spoken.token_ids == list(board('answer').token_ids)
    assert spoken.text == board('answer').text and spoken.position == board('answer').position
    assert spoken.finish_reason in (Token.STOP, Token.LENGTH)


def test_read_tokens_until_and_failure(peer, talkative):
    root = py_trees.composites.Sequence('Listen', memory=True, children=[
        ReadTokens('A little', until=lambda text: len(text) > 3, timeout=WAIT),
        ReadTokens('The rest', timeout=WAIT, clearing_policy=ClearingPolicy.NEVER, key='rest')])
    with planted(peer, root) as tree:
        peer.known()
        tree.tick()
        stream = peer.client.generate(talkative, max_tokens=6000)
        ticked(tree, lambda: root.children[0].status == Status.SUCCESS)
        assert len(board('spoken').text) > 3 and not stream.done.done()
        stream.cancel()
        assert ticked(tree) == Status.FAILURE
        assert board('rest').finish_reason == Token.CANCELED


def test_the_node_is_killed(talkative, tmp_path):
    # DDS believes in a killed process for some 20 s more: a time limit is what helps.
    with running(tmp_path, namespace='/mortal') as (process, peer):
        root = Generate('Long', prompt=talkative, max_tokens=6000, timeout=WAIT,
                        server='/mortal/flashrt')
        tree = py_trees.trees.BehaviourTree(root)
        tree.setup(node=peer.node)
        ticked(tree, lambda: root.stream and root.stream.text())
        process.process.kill()
        process.process.wait()
        root._deadline = time.monotonic()  # the limit has passed
        assert ticked(tree) == Status.FAILURE and code('answer') == 'TIMEOUT'
        assert board('answer').text and 'look at its log' in board('answer').error_msg
