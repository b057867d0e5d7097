"""The demo against a real node over DDS, and its parts that need none."""

import importlib.util
import io
import json
from pathlib import Path
import re
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from flashrt_ros.cli import exits
from flashrt_ros.cli.show.scenes import load
from flashrt_ros.cli.show.screen import Screen
from flashrt_ros.errors import InvalidArgument, Storage

ROS = importlib.util.find_spec('rclpy') is not None
needs_ros = pytest.mark.skipif(not ROS, reason='rclpy does not import here, and the demo is ROS')
needs_none = pytest.mark.skipif(ROS, reason='rclpy imports here')
CLAIMS = {'scene', 'reused', 'streamed', 'same_as_cold', 'interrupted', 'rolled_back',
          'undisturbed', 'forked', 'listed', 'same_after_restart'}


@pytest.fixture
def scene(tmp_path):
    """Return the path of a scene in the planner's format."""
    path = tmp_path / 'scene.json'
    path.write_text(json.dumps({
        'title': 'kitchen', 'scene': (
            'scene: kitchen\nrobot: at counter, gripper empty, battery 76 %\nsurfaces: counter, '
            'shelf, dining_table\ncontainers: fridge (closed)\nspots: door\npeople: Zoë at '
            'dining_table (speaking)\nobjects:\n- mug_2: red ceramic mug on shelf, empty\n- '
            'mug_5: blue mug in fridge, full of milk\n- lamp_4: white lamp on shelf, off'),
        'instructions': [{'user': text, 'answer': ''} for text in (
            'could you bring me the blue mug please?', 'put the red mug on the dining table',
            'switch the lamp on', 'go to the door')]}))
    return str(path)


def demo(*arguments):
    """Run the demo in a new process."""
    return subprocess.run([sys.executable, '-m', 'flashrt_ros.cli.main', 'demo', *arguments],
                          capture_output=True, text=True, timeout=280, check=False)


@needs_ros
def test_the_whole_story_holds(tmp_path):
    log = tmp_path / 'node.log'
    process = demo('--json', '--keep-log', str(log))
    found = json.loads(process.stdout)
    assert process.returncode == exits.OK and found['passed'], (found['claims'], log.read_text())
    assert {claim['name'] for claim in found['claims']} == CLAIMS
    costs = found['costs']
    assert 0 < costs['restored_first_token_s'] < costs['cold_first_token_s']
    assert costs['capsule_bytes'] > costs['restore_bytes_copied'] > 0
    assert costs['restore_s'] <= costs['round_trip_s']
    assert all(answer['token_ids'] for answer in found['answers'])


@needs_ros
def test_the_screen_without_a_terminal_shows_the_same():
    process = demo('--scene', 'workshop')
    assert process.returncode == exits.OK, process.stdout + process.stderr
    for words in ('workshop', 'cancelled after', 'rolled back', 'killed', 'claims hold'):
        assert words in process.stdout
    assert '\x1b[' not in process.stdout


@needs_ros
def test_a_node_that_cannot_start_is_a_failure_that_says_why():
    process = demo('--model', '/nonexistent/model', '--start-timeout', '60')
    assert process.returncode == exits.FAILED
    assert 'model' in process.stderr and 'Traceback' not in process.stderr


@needs_ros
@pytest.mark.skipif(sys.platform != 'linux', reason='only Linux tells of a dead parent')
@pytest.mark.parametrize(('number', 'status'), [(signal.SIGTERM, 128 + signal.SIGTERM),
                                                (signal.SIGKILL, -signal.SIGKILL)])
def test_its_node_ends_with_it(tmp_path, monkeypatch, number, status):
    monkeypatch.setenv('TMPDIR', str(tmp_path))  # what a killed process leaves there
    errors = tmp_path / 'errors'
    with errors.open('w') as file, subprocess.Popen(
            [sys.executable, '-m', 'flashrt_ros.cli.main', 'demo', '--scene', 'workshop'],
            stdout=subprocess.PIPE, stderr=file, text=True) as process:
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, errors.read_text()
            found = re.search(r'capsule_node as process (\d+)', line)
        assert exists(int(found[1]))
        process.send_signal(number)
        assert process.wait(60) == status
    assert 'Traceback' not in errors.read_text()
    deadline = time.monotonic() + 60
    while exists(int(found[1])):
        assert time.monotonic() < deadline, 'the node was left behind'
        time.sleep(0.05)


def exists(pid):
    """Tell whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except (FileNotFoundError, ProcessLookupError):
        return False


@needs_none
def test_without_ros_it_says_what_to_do(scene):
    process = demo('--scene', scene, '--json')
    assert process.returncode == exits.MISSING
    assert 'make demo' in json.loads(process.stdout)['error']['message']


def test_scenes_are_found_by_part_of_a_name_or_refused(tmp_path, monkeypatch, scene):
    folder = tmp_path / 'scenes'
    folder.mkdir()
    for name in ('kitchen', 'warehouse_long'):
        (folder / f'{name}.json').write_text(Path(scene).read_text())
    monkeypatch.setattr('flashrt_ros.cli.show.scenes.directory', lambda: folder)
    assert load('long').title == load('kitchen').title == 'kitchen'
    for bad in ('nonsense', 'e'):
        with pytest.raises(InvalidArgument, match='kitchen, warehouse_long'):
            load(bad)
    for text in ('{', '{}', '{"title": 1, "scene": "", "instructions": []}'):
        (tmp_path / 'bad.json').write_text(text)
        with pytest.raises(Storage):
            load(str(tmp_path / 'bad.json'))


def test_a_stream_is_indented_and_holds_no_blank_lines():
    file = io.StringIO()
    screen = Screen(Console(file=file, width=100, highlight=False))
    for piece in ('{"a": [', '1]}\n', '\n', '{"b', '"}'):
        screen.stream(piece)
    screen.end('done')
    assert file.getvalue() == '      {"a": [1]}\n      {"b"}\n    done\n'


def test_a_quiet_screen_says_nothing(capsys):
    screen = Screen(None)
    screen.title('a', 'b')
    screen.stream('c\n')
    screen.end('d')
    screen.claim(False, 'e')
    screen.costs([('f', 'g', 'h')])
    with screen.waiting('i'):
        pass
    assert capsys.readouterr() == ('', '')
