"""The example trees with the embedded planner, as trees and as commands."""

from pathlib import Path
import signal
import subprocess
import sys

import pytest

pytest.importorskip('rclpy')
py_trees = pytest.importorskip('py_trees')
sys.path.insert(0, str(Path(__file__).parent))

from behaviours_cases import board, fresh, names, planted, position, run, ticked  # noqa: E402
from node_cases import LATCHED, running, until, WAIT  # noqa: E402
from py_trees.common import Status  # noqa: E402

from flashrt_ros.behaviours.examples import pick_and_place, think_ahead  # noqa: E402
from flashrt_ros.behaviours.examples.stage import scene_text  # noqa: E402
from flashrt_ros.behaviours.examples.world import parse, Trouble, World  # noqa: E402
from flashrt_ros.msg import NodeState  # noqa: E402

QUICK = {'seconds': 0.02}
EXAMPLES = Path(__file__).parents[1] / 'examples'


@pytest.fixture(scope='module')
def node(tmp_path_factory):
    with running(tmp_path_factory.mktemp('trees'), model__path='embedded',
                 context__max_tokens=2048) as (process, peer):
        yield peer


@pytest.fixture
def peer(node):
    fresh(node)
    yield node


def undisturbed(peer, prompt):
    """The answer of a mind that has read the scene and was asked nothing else."""
    scene = [('system', scene_text())]
    peer.client.generate(messages=scene, session='c', max_tokens=0).result(WAIT)
    answer = peer.client.generate(prompt, session='c', max_tokens=160, temperature=0.0).result(WAIT)
    peer.client.close_session('c')
    return answer


def test_a_skill_fails_and_the_planner_is_rewound(peer):
    blue, red = (undisturbed(peer, prompt) for prompt in pick_and_place.ASKED)
    scene = scene_text()
    world = World(scene, Trouble('pick:mug_5'))
    root = pick_and_place.create_root(world, scene, **QUICK)
    plans = []

    def watch(_):
        plan = board('answer')
        if plan and (not plans or plans[-1] is not plan):
            plans.append(plan)

    with planted(peer, root) as tree:
        tree.add_post_tick_handler(watch)
        assert ticked(tree) == Status.SUCCESS
    scene_end = board('scene').position
    # Two plans for the blue mug, both as if the first had not been; then the red one, as if the
    # blue one had never been spoken of.
    assert [list(plan.token_ids) for plan in plans] == [
        list(answer.token_ids) for answer in (blue, blue, red)]
    assert all(plan.tokens_reused == scene_end for plan in plans)
    assert len({plan.epoch for plan in plans}) == 3  # each rewind began another one
    assert world.things['mug_2'] == 'Zoë' and world.things['mug_5'] == 'fridge'
    assert position(peer) == red.position and names(peer) == []


def test_a_skill_fails_once(peer):
    scene = scene_text()
    world = World(scene, Trouble('pick:mug_5*1'))
    assert run(peer, pick_and_place.create_root(world, scene, **QUICK)) == Status.SUCCESS
    assert world.things['mug_5'] == 'Zoë' and world.things['mug_2'] == 'shelf'


def test_all_fails(peer):
    scene = scene_text()
    world = World(scene, Trouble('navigate'))
    assert run(peer, pick_and_place.create_root(world, scene, **QUICK)) == Status.FAILURE
    assert position(peer) == board('scene').position and not world.done


@pytest.mark.parametrize('asked, kept', [(think_ahead.GUESS, True), ('where is the pan?', False)])
def test_think_ahead(peer, asked, kept):
    want, scene = undisturbed(peer, asked), scene_text()
    states = peer.collect(NodeState, '/flashrt/state', LATCHED)
    world = World(scene)
    root = think_ahead.create_root(world, scene, asked=asked, way=0.5, **QUICK)
    assert run(peer, root) == Status.SUCCESS
    assert list(board('answer').token_ids) == list(want.token_ids)
    assert position(peer) == want.position and (board('speculated') is not None) == kept
    assert world.done[1:] == parse(want.text)
    # It thought on the branch, and of that nothing is left.
    until(lambda: any(session.name.startswith('speculate-') for state in list(states)
                      for session in state.sessions))
    until(lambda: [session.name for session in states[-1].sessions] == ['default'])
    assert names(peer) == []


def command(name, *arguments):
    return [sys.executable, str(EXAMPLES / f'{name}.py'), '--seconds', '0.02', *arguments]


def test_what_may_fail_is_checked(capsys):
    with pytest.raises(SystemExit):
        pick_and_place.main(['--fail', 'dance'])
    assert 'SKILL' in capsys.readouterr().err


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason='the folder examples is not installed')
def test_one_command_starts_its_own_node(tmp_path):
    done = subprocess.run(command('pick_and_place', '--fail', 'pick'), capture_output=True,
                          text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert '{-} Mission [✕]' in done.stdout and 'failed on purpose' in done.stdout
    assert 'rewound to' in done.stdout and not done.stderr


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason='the folder examples is not installed')
def test_a_command_that_is_interrupted_tidies_up(peer, tmp_path):
    process = subprocess.Popen(command('think_ahead', '--server', '/flashrt', '--way', '60'),
                               stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    for line in process.stdout:
        if 'Plan the guess [*]' in line:
            break
    states = peer.collect(NodeState, '/flashrt/state', LATCHED)
    until(lambda: [s for s in states[-1].sessions if s.name != 'default'])
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT)
    assert process.returncode == 130
    until(lambda: not [s for s in states[-1].sessions if s.name != 'default'])
    assert names(peer) == []


def test_world():
    world = World(scene_text())
    assert world.at == 'counter' and world.things['mug_5'] == 'fridge' and not world.open['fridge']
    assert world.do({'skill': 'pick', 'object': 'mug_5'}).endswith('not within reach')
    world.do({'skill': 'navigate', 'to': 'fridge'})
    assert world.do({'skill': 'pick', 'object': 'mug_5'}).endswith('not within reach')
    for call in ({'skill': 'open', 'place': 'fridge'}, {'skill': 'pick', 'object': 'mug_5'}):
        assert world.do(call) == ''
    assert world.do({'skill': 'navigate', 'to': 'moon'}) == 'no way to moon'
    for text in ('', 'hello', '{"skill": "fly"}', '{"skill": "open", "object": "x"}', '[1]',
                 '{"skill": "open", "place": 3}'):
        with pytest.raises(ValueError):
            parse(text)
