"""SaveCapsule, RestoreCapsule, ForkCapsule, Rollback: success, refusal, interruption, timeout."""

from pathlib import Path
import subprocess
import sys

import pytest

pytest.importorskip('rclpy')
py_trees = pytest.importorskip('py_trees')
sys.path.insert(0, str(Path(__file__).parent))

from behaviours_cases import board, code, fresh, names, planted, position, run, ticked  # noqa: E402
from node_cases import Peer, running, start_long, until, WAIT  # noqa: E402
from py_trees.common import Status  # noqa: E402
import rclpy  # noqa: E402
from rclpy.executors import SingleThreadedExecutor  # noqa: E402

from flashrt_ros import behaviours  # noqa: E402
from flashrt_ros.behaviours import (  # noqa: E402
    ForkCapsule,
    FromBlackboard,
    Generate,
    RestoreCapsule,
    Rewind,
    Rollback,
    SaveCapsule,
)
from flashrt_ros.behaviours.connection import connect  # noqa: E402


@pytest.fixture(scope='module')
def node(tmp_path_factory):
    with running(tmp_path_factory.mktemp('behaviours')) as (process, peer):
        yield peer


@pytest.fixture
def peer(node):
    fresh(node)
    yield node


def test_import_needs_no_torch(tmp_path):
    script = 'import sys, flashrt_ros.behaviours; sys.exit("torch" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', script], cwd=tmp_path).returncode == 0


def test_every_status_is_documented():
    for name in behaviours.__all__:
        kind = getattr(behaviours, name)
        if isinstance(kind, type) and issubclass(kind, py_trees.behaviour.Behaviour):
            words = kind.__doc__
            assert all(f'Status.{status.name}`: ' in words for status in (
                Status.RUNNING, Status.SUCCESS, Status.FAILURE)), name
            assert 'Example::' in words and 'Args:' in words and 'nterruption' in words, name


def test_save_and_restore(peer):
    peer.client.generate('go', max_tokens=4, temperature=0.0).result(WAIT)
    here = position(peer)
    assert run(peer, SaveCapsule('Save', capsule='k', note='by a tree')) == Status.SUCCESS
    assert board('saved').info.tokens == here and board('saved').info.note == 'by a tree'
    peer.client.generate('go on', max_tokens=4).result(WAIT)
    assert run(peer, RestoreCapsule('Restore', capsule='k')) == Status.SUCCESS
    assert board('restored').epoch and position(peer) == here


def test_refusals_are_failures_with_a_code(peer):
    peer.client.save('taken')
    root = SaveCapsule('Save', capsule='taken')
    assert run(peer, root) == Status.FAILURE and code('saved') == 'NAME_EXISTS'
    assert root.feedback_message.startswith('NAME_EXISTS: ')
    for root, key, expected in (
            (SaveCapsule('Bad', capsule='../k'), 'saved', 'INVALID_NAME'),
            (RestoreCapsule('No', capsule='nothing'), 'restored', 'UNKNOWN_CAPSULE'),
            (ForkCapsule('No', sessions=['x'], capsule='nothing'), 'forked', 'UNKNOWN_CAPSULE'),
            (Rollback('Far', tokens=5000), 'rolled_back', 'INVALID_ARGUMENT'),
            (Rollback('Old', tokens=0, expected_epoch=7), 'rolled_back', 'INVALID_ARGUMENT'),
            (Rollback('What', position=FromBlackboard('nowhere')), 'rolled_back',
             'INVALID_ARGUMENT'),
            (Rollback('What', position=-1), 'rolled_back', 'INVALID_ARGUMENT')):
        assert run(peer, root) == Status.FAILURE, root.name
        assert code(key) == expected, (root.name, board(key))


def test_fork(peer):
    peer.client.generate('go', max_tokens=3).result(WAIT)
    here = position(peer)
    assert run(peer, ForkCapsule('Fork', sessions=['a', 'b'], seeds=[1, 2])) == Status.SUCCESS
    assert board('forked').sessions == ['a', 'b'] and board('forked').info.tokens == here
    assert run(peer, ForkCapsule('Again', sessions=['a'])) == Status.FAILURE
    assert code('forked') == 'NAME_EXISTS'


def test_rollback_to_what_the_blackboard_says(peer):
    root = py_trees.composites.Sequence('Talk', memory=True, children=[
        Generate('One', prompt='one', max_tokens=4, temperature=0.0, key='one'),
        Generate('Two', prompt='two', max_tokens=4, temperature=0.0, key='two'),
        Rollback('Back', position=FromBlackboard('one.position')),
        Generate('Two', prompt='two', max_tokens=4, temperature=0.0, key='again')])
    assert run(peer, root) == Status.SUCCESS
    assert board('rolled_back').position == board('one').position
    assert list(board('again').token_ids) == list(board('two').token_ids)
    assert run(peer, Rollback('Turn', turns=1)) == Status.SUCCESS
    assert position(peer) == board('one').position


def test_busy_and_preempt(peer):
    peer.client.save('empty')
    stream = start_long(peer.client)
    assert run(peer, RestoreCapsule('Polite', capsule='empty')) == Status.FAILURE
    assert code('restored') == 'BUSY' and not stream.done.done()
    assert run(peer, Rollback('Polite', tokens=1)) == Status.FAILURE
    assert code('rolled_back') == 'BUSY'
    root = RestoreCapsule('Waits', capsule='empty', on_busy='wait', timeout=0.3)
    assert run(peer, root) == Status.FAILURE and code('restored') == 'TIMEOUT'
    root = RestoreCapsule('Firm', capsule='empty', on_busy='preempt')
    assert run(peer, root) == Status.SUCCESS and position(peer) == 0
    assert stream.result(WAIT, check=False).error_msg


def test_an_interruption_forgets_the_response(peer):
    root = SaveCapsule('Save', capsule='k')
    with planted(peer, root) as tree:
        tree.tick()
        root.stop(Status.INVALID)
        assert root.status == Status.INVALID and board('saved') is None
        # What was asked for may have happened: the same behaviour says so when it runs again.
        assert ticked(tree) in (Status.SUCCESS, Status.FAILURE)
        assert code('saved') in ('NONE', 'NAME_EXISTS') and names(peer) == ['k']


def test_without_a_node_calls_fail_in_time():
    peer = Peer('/nobody')
    try:
        for root, key in ((SaveCapsule('S', capsule='k', server='/nobody', timeout=0.2), 'saved'),
                          (Rollback('R', turns=1, server='/nobody', timeout=0.2), 'rolled_back'),
                          (ForkCapsule('F', sessions=['a'], server='/nobody', timeout=0.2),
                           'forked')):
            assert run(peer, root) == Status.FAILURE
            assert code(key) == 'TIMEOUT' and '/nobody' in board(key).error_msg
    finally:
        peer.close()


def test_setup_says_what_is_missing():
    with pytest.raises(KeyError, match='Save it .SaveCapsule. found no .node.'):
        SaveCapsule('Save it', capsule='k').setup()
    with pytest.raises(RuntimeError, match='before setup'):
        SaveCapsule('Save it', capsule='k').tick_once()
    with pytest.raises(ValueError, match='exactly one'):
        Rollback('R', turns=1, tokens=1)


def test_spun_between_ticks_by_the_same_thread(peer):
    context = rclpy.Context()
    rclpy.init(context=context)
    node = rclpy.create_node('one_thread', context=context)
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)
    root = py_trees.decorators.Inverter('Not', Rewind('Undo', py_trees.composites.Sequence(
        'Try', memory=True, children=[
            Generate('Say', prompt='tell me', max_tokens=6), py_trees.behaviours.Failure('No')])))
    tree = py_trees.trees.BehaviourTree(root)
    tree.setup(node=node)
    try:
        until(lambda: executor.spin_once(timeout_sec=0.02) or tree.tick()
              or root.status == Status.SUCCESS)
        until(lambda: executor.spin_once(timeout_sec=0.02) or behaviours.is_settled(node))
        assert position(peer) == 0 and names(peer) == []
        assert board('answer').completion_tokens
    finally:
        tree.shutdown()
        executor.shutdown()
        behaviours.disconnect(node)
        node.destroy_node()
        rclpy.shutdown(context=context)


def test_behaviours_share_one_client(peer):
    root = py_trees.composites.Parallel('All', py_trees.common.ParallelPolicy.SuccessOnAll(), [
        SaveCapsule(f'S{number}', capsule=f'c{number}', key=f'k{number}') for number in range(6)])
    with planted(peer, root) as tree:
        assert len({id(child.connection) for child in root.children}) == 1
        assert ticked(tree) == Status.SUCCESS
        assert names(peer) == [f'c{number}' for number in range(6)]
        held = root.children[0].connection
        assert connect('/flashrt/', 'test', node=peer.node) is held
    other = connect('/flashrt', 'test', client=peer.client)
    assert other is not held and other.client is peer.client
    with pytest.raises(KeyError):
        connect('/elsewhere', 'test', client=peer.client)
