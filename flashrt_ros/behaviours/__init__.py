"""
Behaviours for py_trees that save, restore, fork and roll back the mind of a flashrt node.

They work under plain py_trees with a node that is given to ``setup``, and under py_trees_ros, which
gives its own. No tick ever waits: whoever owns the node spins it between ticks or in a thread. All
behaviours of a process that name the same node share one client. Importing this package needs
py_trees and rclpy, but neither torch nor a model.

Example::

    root = Rewind(
        'Or never happened', py_trees.composites.Sequence('Bring', memory=True, children=[
            Generate('Plan', prompt='Bring me the cup.', max_tokens=128),
            Execute('Execute', plan=FromBlackboard('answer.text'))]))
    tree = py_trees.trees.BehaviourTree(root)
    tree.setup(node=node)
    while root.status not in (Status.SUCCESS, Status.FAILURE):
        executor.spin_once(timeout_sec=0.05)
        tree.tick()
    tree.shutdown()
"""

from flashrt_ros.behaviours.binding import FromBlackboard
from flashrt_ros.behaviours.connection import disconnect, is_settled
from flashrt_ros.behaviours.fork_capsule import ForkCapsule
from flashrt_ros.behaviours.generate import Generate
from flashrt_ros.behaviours.read_tokens import ReadTokens, Spoken
from flashrt_ros.behaviours.restore_capsule import RestoreCapsule
from flashrt_ros.behaviours.rewind import Rewind
from flashrt_ros.behaviours.rollback import Rollback
from flashrt_ros.behaviours.save_capsule import SaveCapsule
from flashrt_ros.behaviours.speculate import Speculate

__all__ = [
    'disconnect', 'ForkCapsule', 'FromBlackboard', 'Generate', 'is_settled', 'ReadTokens',
    'RestoreCapsule', 'Rewind', 'Rollback', 'SaveCapsule', 'Speculate', 'Spoken']
