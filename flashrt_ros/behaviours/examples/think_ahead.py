"""
A robot that thinks ahead on a fork of its mind while it drives.

    python -m flashrt_ros.behaviours.examples.think_ahead
    python -m flashrt_ros.behaviours.examples.think_ahead --asked 'where is the pan?'

On its way to a person it guesses what it will be asked, and plans that on a branch. Guessed right:
the branch becomes the mind, and the plan is there on arrival. Guessed wrong: the branch is
forgotten, and the mind never had the wrong thought.
"""

from __future__ import annotations

from typing import Any

import py_trees
from py_trees.common import ParallelPolicy

from flashrt_ros.behaviours import FromBlackboard, Generate, Speculate
from flashrt_ros.behaviours.examples.skills import AsGuessed, CheckPlan, Drive, Execute
from flashrt_ros.behaviours.examples.stage import arguments, play, scene_text
from flashrt_ros.behaviours.examples.world import World

GUESS = 'could you bring me the blue mug please?'


def create_root(world: World, scene: str, *, asked: str = GUESS, session: str = '',
                server: str = '/flashrt', seconds: float = 0.1, way: float = 2.0
                ) -> py_trees.behaviour.Behaviour:
    """
    Return the tree.

    Both planning behaviours name the same session: the first works on a branch because of the
    Speculate above it.
    """
    fields: dict[str, Any] = {'max_tokens': 160, 'temperature': 0.0, 'timeout': 30.0,
                              'session': session, 'server': server}
    on_the_way = py_trees.composites.Parallel(
        'On the way', ParallelPolicy.SuccessOnAll(), [
            Drive('Drive to Zoë', world, 'Zoë', asked, way),
            Speculate('Think ahead', py_trees.composites.Sequence('Guess', memory=True, children=[
                Generate('Plan the guess', prompt=GUESS, **fields),
                AsGuessed('As guessed?', GUESS)]), session=session, server=server)])
    return py_trees.composites.Sequence('Serve', memory=True, children=[
        Generate('Read the scene', messages=[('system', scene)], max_tokens=0, timeout=60.0,
                 session=session, server=server, key='scene'),
        py_trees.composites.Selector('Have a plan', memory=True, children=[
            on_the_way, Generate('Plan what was asked', prompt=FromBlackboard('asked'), **fields)]),
        CheckPlan('Check the plan'),
        Execute('Execute', world, seconds)])


def main(given: list[str] | None = None) -> int:
    """Play it; 0 where the wish was granted."""
    parser = arguments(__doc__)
    parser.add_argument('--asked', default=GUESS, help='what the robot is asked on arrival')
    parser.add_argument('--way', type=float, default=2.0, help='seconds that the drive takes')
    options = parser.parse_args(given)
    scene = scene_text()
    world = World(scene)

    def create(server: str, session: str) -> py_trees.behaviour.Behaviour:
        return create_root(world, scene, asked=options.asked, session=session, server=server,
                           seconds=options.seconds, way=options.way)

    return play(create, options, report)


def report(root: py_trees.behaviour.Behaviour) -> str:
    """Return what came of it."""
    get = py_trees.blackboard.Blackboard.get
    wait = (get('plan_ready_at') - get('arrived_at')) * 1000.0
    [think] = [node for node in root.iterate() if isinstance(node, Speculate)]
    outcome = 'the branch became the mind' if get('speculated') else 'the branch was forgotten'
    return (f'{outcome} ({think.feedback_message}); the checked plan was there {wait:.0f} ms after '
            f'the arrival.')


if __name__ == '__main__':
    raise SystemExit(main())
