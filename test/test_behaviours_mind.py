"""Rewind and Speculate, proven by position, epoch, and by answers like undisturbed ones."""

from pathlib import Path
import sys

import pytest

pytest.importorskip('rclpy')
py_trees = pytest.importorskip('py_trees')
sys.path.insert(0, str(Path(__file__).parent))

from behaviours_cases import (  # noqa: E402
    board,
    code,
    fresh,
    names,
    planted,
    position,
    run,
    ticked,
)
from node_cases import LATCHED, running, start_long, until, WAIT  # noqa: E402
from py_trees.common import ParallelPolicy, Status  # noqa: E402

from flashrt_ros import srv  # noqa: E402
from flashrt_ros.behaviours import Generate, is_settled, Rewind, Speculate  # noqa: E402
from flashrt_ros.errors import FlashrtError  # noqa: E402
from flashrt_ros.msg import ErrorCode, NodeState  # noqa: E402


@pytest.fixture(scope='module')
def node(tmp_path_factory):
    with running(tmp_path_factory.mktemp('mind')) as (process, peer):
        peer.states = peer.collect(NodeState, '/flashrt/state', LATCHED)
        yield peer


@pytest.fixture
def peer(node):
    fresh(node)
    node.client.generate('a kitchen', max_tokens=5, temperature=0.0).result(WAIT)
    yield node


def say(name, prompt, tokens=8, **fields):
    return Generate(name, prompt=prompt, max_tokens=tokens, temperature=0.0, key=name, **fields)


def sequence(*children):
    return py_trees.composites.Sequence('Sequence', memory=True, children=list(children))


def fails():
    return py_trees.behaviours.Failure('Fails')


def undisturbed(peer, prompt, tokens=8):
    """The answer, given on a fork that is closed again."""
    peer.client.fork(['c'])
    ids = peer.client.generate(prompt, session='c', max_tokens=tokens,
                               temperature=0.0).result(WAIT).token_ids
    peer.client.close_session('c')
    return list(ids)


def told(peer):
    """Name, epoch and position of each session, as ~/state told them last."""
    return [(s.name, s.epoch, s.position) for s in peer.states[-1].sessions]


def stands(peer):
    """Epoch and position, as of now: ~/state tells them a moment later."""
    refused = peer.client.call('rollback', srv.Rollback.Request(expected_epoch=1), check=False)
    return refused.epoch, refused.position


def epoch(peer):
    return stands(peer)[0]


def clear_of_remains(peer):
    until(lambda: is_settled(peer.node))
    until(lambda: told(peer) == [('default', *stands(peer))])
    assert names(peer) == []


def test_rewind_makes_a_failure_unhappen(peer):
    here, want, old = position(peer), undisturbed(peer, 'two'), epoch(peer)
    root = Rewind('Undo', sequence(say('one', 'one'), fails()))
    assert run(peer, root) == Status.FAILURE
    assert board('one').position > here and position(peer) == here
    assert board('rewound').info.tokens == here and board('rewound').epoch > old
    assert root.feedback_message == f'rewound to {here}'
    assert epoch(peer) == board('rewound').epoch
    assert run(peer, say('two', 'two')) == Status.SUCCESS
    assert list(board('two').token_ids) == want
    clear_of_remains(peer)


def test_rewind_keeps_a_success(peer):
    here = position(peer)
    root = Rewind('Keep', say('one', 'one'))
    assert run(peer, root) == Status.SUCCESS and board('rewound') is None
    assert position(peer) == board('one').position > here
    clear_of_remains(peer)


def test_rewind_and_retry(peer):
    attempts = []

    def attempt():
        attempts.append(list(board('one').token_ids))
        return Status.SUCCESS if len(attempts) == 3 else Status.FAILURE

    want = undisturbed(peer, 'one')
    child = sequence(say('one', 'one'), py_trees.behaviours.Running('Act'))
    child.children[1].update = attempt
    root = py_trees.decorators.Retry('Three times', Rewind('Undo', child), 3)
    assert run(peer, root) == Status.SUCCESS
    assert attempts == [want] * 3
    clear_of_remains(peer)


def test_rewind_waits_for_what_it_interrupts(peer):
    # The failure comes in mid-speech: the goal below is cancelled, and ends before the restore.
    here, want = position(peer), undisturbed(peer, 'two')
    talk = say('long', 'one', 6000)
    root = Rewind('Undo', py_trees.composites.Parallel('Both', ParallelPolicy.SuccessOnAll(), [
        talk, py_trees.timers.Timer('A moment', 0.05)]))
    root.decorated.children[1] = py_trees.decorators.SuccessIsFailure(
        'Fails', py_trees.timers.Timer('A moment', 0.05))
    assert run(peer, root) == Status.FAILURE
    assert position(peer) == here and board('rewound').error_code == 0
    assert run(peer, say('two', 'two')) == Status.SUCCESS
    assert list(board('two').token_ids) == want
    clear_of_remains(peer)


def test_rewind_without_a_snapshot_does_not_run(peer):
    child = say('one', 'one')
    root = Rewind('Undo', child, session='no/such')
    assert run(peer, root) == Status.FAILURE and child.status == Status.INVALID
    assert code('rewound') == 'INVALID_NAME' and 'not run' in root.feedback_message


def test_rewind_that_cannot_says_so(peer):
    stuck = start_long(peer.client)
    root = Rewind('Undo', fails(), on_busy='reject')
    assert run(peer, root) == Status.FAILURE and code('rewound') == 'BUSY'
    [left] = names(peer)
    assert left in root.feedback_message and 'NOT rewound' in root.feedback_message
    stuck.cancel()
    stuck.result(WAIT, check=False)


@pytest.mark.parametrize('rewind', [False, True])
def test_rewind_interrupted(peer, rewind):
    here = position(peer)
    root = Rewind('Undo', sequence(say('one', 'one'), say('two', 'two', 6000)),
                  rewind_on_interrupt=rewind)
    with planted(peer, root) as tree:
        ticked(tree, lambda: board('one') and root.decorated.children[1].stream)
        root.stop(Status.INVALID)
        until(lambda: is_settled(peer.node))
    assert (position(peer) == here) == rewind
    clear_of_remains(peer)


@pytest.mark.parametrize('ticks', range(1, 8))
def test_interrupted_after_any_number_of_ticks(peer, ticks):
    here = position(peer)
    for root in (Rewind('Undo', sequence(say('one', 'one', 3), fails()),
                        rewind_on_interrupt=True),
                 Speculate('Think', sequence(say('one', 'one', 3), fails()))):
        with planted(peer, root) as tree:
            for _ in range(ticks):
                tree.tick()
            root.stop(Status.INVALID)
    assert position(peer) == here
    clear_of_remains(peer)


def test_speculate_commits(peer):
    want, here = undisturbed(peer, 'one'), position(peer)
    old = epoch(peer)
    root = Speculate('Think', say('one', 'one'))
    assert run(peer, root) == Status.SUCCESS
    assert list(board('one').token_ids) == want
    assert position(peer) == board('one').position == board('speculated').info.tokens > here
    assert board('speculated').epoch > old
    # The session goes on as if the branch had always been it.
    assert run(peer, say('two', 'two')) == Status.SUCCESS
    spoken = list(board('two').token_ids)
    peer.client.rollback(position=here)
    peer.client.generate('one', max_tokens=8, temperature=0.0).result(WAIT)
    assert run(peer, say('two', 'two')) == Status.SUCCESS and list(
        board('two').token_ids) == spoken
    clear_of_remains(peer)


@pytest.mark.parametrize('commit', [False, lambda: False])
def test_speculate_discards(peer, commit):
    here, want = position(peer), undisturbed(peer, 'two')
    old = epoch(peer)
    root = Speculate('Think', say('one', 'one'), commit=commit)
    assert run(peer, root) == Status.SUCCESS and board('one').token_ids
    root = Speculate('Think', sequence(say('one', 'one'), fails()), seed=5)
    assert run(peer, root) == Status.FAILURE
    clear_of_remains(peer)
    assert position(peer) == here and epoch(peer) == old
    assert run(peer, say('two', 'two')) == Status.SUCCESS
    assert list(board('two').token_ids) == want


def test_speculate_beside_a_session_that_goes_on(peer):
    # Main and branch talk at the same time, each as if alone; the commit would forget main's part.
    ahead, beside, here = undisturbed(peer, 'one'), undisturbed(peer, 'two'), position(peer)
    root = py_trees.composites.Parallel('Both', ParallelPolicy.SuccessOnAll(), [
        Speculate('Think', say('one', 'one')), say('two', 'two')])
    think = root.children[0]
    with planted(peer, root) as tree:
        ticked(tree, lambda: think.status == Status.FAILURE)
        assert code('speculated') == 'INVALID_ARGUMENT'
        assert 'since the fork' in think.feedback_message
    clear_of_remains(peer)
    assert list(board('one').token_ids) == ahead and position(peer) > here
    peer.client.rollback(position=here)
    assert undisturbed(peer, 'two') == beside


@pytest.mark.parametrize('move', ['restore', 'roll back and grow again'])
def test_speculate_sees_a_session_that_was_moved_to_where_it_stood(peer, move):
    # The same position, and another mind: only the epoch tells.
    here = position(peer)
    peer.client.save('same-place')
    child = sequence(say('one', 'one'), py_trees.timers.Timer('Meanwhile', 0.3))
    with planted(peer, Speculate('Think', child)) as tree:
        ticked(tree, lambda: board('one'))
        if move == 'restore':
            peer.client.restore('same-place', seed=3)
        else:
            back = peer.client.rollback(tokens=1)
            peer.client.generate(max_tokens=1, temperature=3.0).result(WAIT)
            assert back.position == here - 1
        moved = stands(peer)
        assert moved[1] == here
        assert ticked(tree) == Status.FAILURE
        assert code('speculated') == 'INVALID_ARGUMENT'
        assert 'restored, reset or rolled back' in board('speculated').error_msg
        assert 'not committed' in tree.root.feedback_message
    assert stands(peer) == moved
    peer.client.drop('same-place')
    clear_of_remains(peer)


def test_a_refused_rollback_says_where_the_session_stands(peer):
    back = peer.client.rollback(tokens=1)
    for wrong in (srv.Rollback.Request(expected_epoch=1), srv.Rollback.Request(value=9999)):
        refused = peer.client.call('rollback', wrong, check=False)
        assert refused.error_code == ErrorCode.INVALID_ARGUMENT
        assert (refused.epoch, refused.position) == (back.epoch, back.position)
    unknown = peer.client.call('rollback', srv.Rollback.Request(session='nobody'), check=False)
    assert (unknown.epoch, unknown.position) == (0, 0)


def test_speculate_overwrites_where_told(peer):
    here = position(peer)
    child = sequence(say('one', 'one'), py_trees.timers.Timer('Meanwhile', 0.3))
    root = Speculate('Think', child, overwrite=True)
    with planted(peer, root) as tree:
        ticked(tree, lambda: board('one'))
        peer.client.generate('two', max_tokens=20).result(WAIT)
        assert ticked(tree) == Status.SUCCESS
    assert position(peer) == board('one').position > here
    clear_of_remains(peer)


def test_nested(peer):
    # The inner branch is discarded, the rewind takes back its part of the outer one, which counts.
    want, here = undisturbed(peer, 'one'), position(peer)
    root = Speculate('Outer', sequence(
        py_trees.decorators.FailureIsSuccess('Try', Rewind('Undo', sequence(
            say('lost', 'two'), fails()))),
        Speculate('Inner', say('idea', 'where'), commit=False, key='inner'),
        say('one', 'one')))
    assert run(peer, root) == Status.SUCCESS
    assert list(board('one').token_ids) == want and board('idea').token_ids
    assert position(peer) == board('one').position
    assert board('speculated').info.tokens - here == board('one').position - here
    clear_of_remains(peer)


def test_no_branch_no_run(peer):
    peer.client.fork(['b'])
    child = say('one', 'one')
    root = Speculate('Think', child, branch='b')
    assert run(peer, root) == Status.FAILURE and code('speculated') == 'NAME_EXISTS'
    assert child.status == Status.INVALID
    peer.client.close_session('b')
    assert run(peer, Speculate('Think', say('one', 'one'), branch='b')) == Status.SUCCESS
    with pytest.raises(FlashrtError):
        until(lambda: is_settled(peer.node))
        peer.client.close_session('b')


def test_speculate_interrupted_and_at_once_again(peer):
    root = Speculate('Think', say('one', 'one', 6000), branch='b')
    here = position(peer)
    with planted(peer, root) as tree:
        for _ in range(3):
            ticked(tree, lambda: root.decorated.stream and root.decorated.stream.tokens)
            root.stop(Status.INVALID)
        root.decorated.fields['max_tokens'] = 4
        assert ticked(tree) == Status.SUCCESS
    assert position(peer) > here
    clear_of_remains(peer)
