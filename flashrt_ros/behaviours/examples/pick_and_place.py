"""
A pick-and-place mission that rewinds its planner when a skill fails.

    python -m flashrt_ros.behaviours.examples.pick_and_place --fail pick:mug_5

The blue mug slips from the gripper each time. After every failure the planner's mind is what it was
before it was asked, so the next plan is made as if nothing had been tried: no failed attempt in
the context, no prefill of the scene.
"""

from __future__ import annotations

import py_trees

from flashrt_ros.behaviours import Generate, Rewind
from flashrt_ros.behaviours.examples.skills import CheckPlan, Execute
from flashrt_ros.behaviours.examples.stage import arguments, play, scene_text
from flashrt_ros.behaviours.examples.world import Trouble, World

ASKED = ('could you bring me the blue mug please?', 'could you bring me the red mug please?')
TRIES = 2  # for each thing


def attempt(name: str, prompt: str, world: World, session: str, server: str,
            seconds: float) -> Rewind:
    """Return a subtree that plans and acts, and never happened where it fails."""
    return Rewind(f'{name}, or it never happened', py_trees.composites.Sequence(
        name, memory=True, children=[
            Generate('Plan', prompt=prompt, max_tokens=160, temperature=0.0, timeout=30.0,
                     session=session, server=server),
            CheckPlan('Check the plan'),
            Execute('Execute', world, seconds)]),
        session=session, server=server)


def create_root(world: World, scene: str, *, session: str = '', server: str = '/flashrt',
                seconds: float = 0.1) -> py_trees.behaviour.Behaviour:
    """Return the mission."""
    first, second = (
        attempt(name, prompt, world, session, server, seconds)
        for name, prompt in zip(('Blue mug', 'Red mug'), ASKED, strict=True))
    return py_trees.composites.Sequence('Mission', memory=True, children=[
        Generate('Read the scene', messages=[('system', scene)], max_tokens=0, timeout=60.0,
                 session=session, server=server, key='scene'),
        py_trees.composites.Selector('Bring a mug', memory=True, children=[
            py_trees.decorators.Retry(f'{TRIES} tries', first, TRIES),
            py_trees.decorators.Retry(f'{TRIES} tries', second, TRIES)])])


def main(given: list[str] | None = None) -> int:
    """Play the mission; 0 where a mug was brought."""
    parser = arguments(__doc__)
    parser.add_argument('--fail', default='pick:mug_5', metavar='SKILL[:OBJECT][*TIMES]',
                        help='what fails on purpose, always or so many times; none: nothing')
    options = parser.parse_args(given)
    try:
        trouble = Trouble(options.fail)
    except ValueError as error:
        parser.error(f'--fail: {error}')
    scene = scene_text()
    world = World(scene, trouble)

    def create(server: str, session: str) -> py_trees.behaviour.Behaviour:
        return create_root(world, scene, session=session, server=server,
                           seconds=options.seconds)

    return play(create, options, lambda root: report(world))


def report(world: World) -> str:
    """Return what came of it."""
    get = py_trees.blackboard.Blackboard.get
    mugs = [thing for thing, place in world.things.items() if place in world.people]
    words = f'{mugs[0]} was handed over' if mugs else 'no mug was handed over'
    scene, answer = get('scene'), get('answer')
    rest = answer.tokens_reused - scene.position
    return (f'{words}. The scene is {scene.position} tokens; the plan that worked began with '
            f'{rest} tokens of other attempts in its mind.')


if __name__ == '__main__':
    raise SystemExit(main())
