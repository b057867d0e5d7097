"""`flashrt-ros demo`: the main job, live, against a node in another process."""

from __future__ import annotations

from dataclasses import asdict
import os
from pathlib import Path
import tempfile
import time
from typing import Annotated

import typer

from flashrt_ros.cli import exits, output
from flashrt_ros.cli.opening import JsonOption, ModelOption
from flashrt_ros.errors import Storage


def demo(
    scene: Annotated[str, typer.Option(
        help='A scene of the embedded planner by (part of its) name, such as kitchen or long, or '
        'the path of a JSON file.')] = 'warehouse_long',
    model: ModelOption = 'embedded',
    domain: Annotated[int | None, typer.Option(
        min=0, max=232, help='ROS domain; by default one of its own.')] = None,
    keep_log: Annotated[str, typer.Option(
        help="File that the node's log is copied to.")] = '',
    start_timeout: Annotated[float, typer.Option(
        min=1.0, help='Seconds that a node may take to become active.')] = 120.0,
    as_json: JsonOption = False,
) -> int:
    """
    Start a node as its own process and drive it over DDS.

    Scene in, save, three instructions from the capsule, an interruption and a rollback, a fork,
    the node killed and restarted, and a table of what it cost. Every claim is tested; exit code 1
    if one does not hold.
    """
    from flashrt_ros.cli.show.process import (
        NodeProcess,
        own_domain,
        private_environment,
        sigterm_unwinds,
    )
    from flashrt_ros.cli.show.scenes import load
    from flashrt_ros.cli.show.screen import open_screen
    chosen = load(scene)
    if keep_log:
        try:
            Path(keep_log).open('ab').close()  # before the run, not after it
        except (OSError, ValueError) as reason:
            raise Storage(f'{keep_log!r} cannot be written ({reason}); name another file with '
                          '--keep-log.') from reason
    number = own_domain() if domain is None else domain
    environment = private_environment(number)
    os.environ.update({key: environment[key] for key in (
        'ROS_DOMAIN_ID', 'ROS_AUTOMATIC_DISCOVERY_RANGE')})
    try:
        import rclpy

        from flashrt_ros.client import FlashrtClient
    except ImportError as missing:
        raise output.MissingError(
            f'the demo needs ROS 2 and the interfaces of this package ({missing}). Source '
            'setup.bash of your workspace, or run `make demo`, which installs what is missing; '
            '`flashrt-ros doctor` tells more.') from missing
    begun = time.monotonic()
    with sigterm_unwinds(), tempfile.TemporaryDirectory(prefix='flashrt-demo-') as folder:
        namespace = f'/demo_{os.getpid()}'
        node = NodeProcess(
            {'autostart': True, 'model.path': model, 'context.max_tokens': 4096,
             'capsules.directory': os.path.join(folder, 'capsules')},
            namespace, environment, Path(folder) / 'node.log')
        screen = open_screen(as_json)
        screen.title('flashrt_ros', 'a mind that can be saved, restored, forked and rolled back, '
                     f'over ROS 2 (domain {number})')
        rclpy.init(domain_id=number)
        client = None
        try:
            client = FlashrtClient(rclpy.create_node('demo', namespace=namespace),
                                   f'{namespace}/flashrt', timeout=20.0)
            story, error = _tell(client, node, screen, chosen, start_timeout)
        finally:
            status = node.stop()
            if client is not None:
                client.destroy()
            rclpy.try_shutdown()
            if keep_log and node.log.exists():
                Path(keep_log).write_bytes(node.log.read_bytes())
        if error is not None and not as_json:
            output.log(f'The last lines of the node:\n{node.tail()}')
        if status != 0:
            story.claim('clean_exit', False, f'the node ended with exit code {status}')
    return _report(story, error, time.monotonic() - begun, as_json)


def _tell(client, node, screen, scene, start_timeout):  # noqa: ANN001, ANN202 - types need ROS
    """Tell the story; return it with the refusal that ended it early, if one did."""
    from flashrt_ros.cli.show.story import Story
    from flashrt_ros.errors import FlashrtError
    story = Story(client, node, screen, scene, start_timeout)
    try:
        story.start_node()
        story.tell()
    except FlashrtError as refusal:
        story.claim('told_to_the_end', False, f'{refusal.code}: {refusal}')
        return story, refusal
    screen.costs(story.cost_rows())
    return story, None


def _report(story, error, elapsed: float, as_json: bool) -> int:  # noqa: ANN001 - see above
    passed = error is None and all(claim['passed'] for claim in story.claims)
    held = sum(claim['passed'] for claim in story.claims)
    if as_json:
        output.emit({
            'passed': passed, 'seconds': round(elapsed, 2), 'scene': story.scene.title,
            'claims': story.claims, 'costs': story.costs,
            'answers': [asdict(answer) for answer in story.answers]})
    else:
        colour = 'green' if passed else 'bold red'
        output.people().print(f'\n[{colour}]{held} of {len(story.claims)} claims hold[/], in '
                              f'{elapsed:.1f} s')
    return exits.OK if passed else exits.FAILED
