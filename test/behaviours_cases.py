"""What the behaviour tests share: trees that are ticked while a thread spins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import time
from typing import Any

from node_cases import clean, Peer, until, WAIT
import py_trees
from py_trees.common import Status

from flashrt_ros.behaviours import is_settled
from flashrt_ros.behaviours.call import describe

OVER = (Status.SUCCESS, Status.FAILURE)


def board(variable: str) -> Any:
    """Return a variable of the blackboard, None where it is not there yet."""
    try:
        return py_trees.blackboard.Blackboard.get(variable)
    except KeyError:
        return None


def code(variable: str) -> str:
    """Return the name of the code in a response on the blackboard."""
    return describe(board(variable)).partition(':')[0] or 'NONE'


@contextmanager
def planted(peer: Peer, root: py_trees.behaviour.Behaviour
            ) -> Iterator[py_trees.trees.BehaviourTree]:
    """A tree that is set up; at the end nothing is left of it."""
    tree = py_trees.trees.BehaviourTree(root)
    tree.setup(node=peer.node)
    try:
        yield tree
    finally:
        tree.interrupt()
        tree.root.stop(Status.INVALID)
        until(lambda: is_settled(peer.node))
        tree.shutdown()


def ticked(tree: py_trees.trees.BehaviourTree, done: Callable[[], Any] | None = None,
           timeout: float = WAIT) -> Status:
    """Tick until the root has ended or something is true; each tick has to be short."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        begun = time.monotonic()
        tree.tick()
        # generous for a busy machine; one that waits for an answer here would wait for a minute
        assert time.monotonic() - begun < 10.0, 'a tick that waits'
        if done is not None and done() or done is None and tree.root.status in OVER:
            return tree.root.status
        time.sleep(0.01)
    raise AssertionError('not within the time\n' + py_trees.display.unicode_tree(
        tree.root, show_status=True))


def run(peer: Peer, root: py_trees.behaviour.Behaviour, timeout: float = WAIT) -> Status:
    """Set up, tick to the end, shut down."""
    with planted(peer, root) as tree:
        return ticked(tree, timeout=timeout)


def fresh(peer: Peer) -> None:
    """Empty node and blackboard."""
    py_trees.blackboard.Blackboard.clear()
    clean(peer.client)


def names(peer: Peer) -> list[str]:
    """Return the names of all capsules."""
    return [info.name for info in peer.client.list()]


def position(peer: Peer, session: str = '') -> int:
    """Return where a session stands."""
    tokens = peer.client.save('where', session, overwrite=True).info.tokens
    peer.client.drop('where')
    return tokens
