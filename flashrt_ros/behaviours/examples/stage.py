"""What the examples share: a node, a thread that spins, and the tree on the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
import json
import os
from pathlib import Path
import signal
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING

import py_trees
from py_trees.common import Status

import flashrt_ros

if TYPE_CHECKING:
    from flashrt_ros.client import FlashrtClient

_OVER = (Status.SUCCESS, Status.FAILURE)
Create = Callable[[str, str], py_trees.behaviour.Behaviour]


def scene_text(name: str = 'kitchen') -> str:
    """Return the text of a scene of the embedded planner."""
    folder = Path(flashrt_ros.__file__).parent / 'assets' / 'planner' / 'scenes'
    return str(json.loads((folder / f'{name}.json').read_text(encoding='utf-8'))['scene'])


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with what all examples take."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--server', default='', metavar='/flashrt',
                        help='a node that runs already; without, the example starts its own')
    parser.add_argument('--model', default='embedded', help='model of its own node')
    parser.add_argument('--period', type=float, default=0.05, help='seconds between two ticks')
    parser.add_argument('--seconds', type=float, default=0.2, help='that a skill takes')
    parser.add_argument('--limit', type=float, default=120.0, help='seconds until it gives up')
    return parser


def play(create: Create, options: argparse.Namespace,
         report: Callable[[py_trees.behaviour.Behaviour], str]) -> int:
    """
    Tick a tree to its end and show it.

    :param create: makes the tree, for a server and a session.
    :param options: of `arguments`.
    :param report: returns the last line for a tree that succeeded.
    :returns: the exit code: 0 for SUCCESS, 1 for FAILURE, 2 where it took too long, 130 where a
        signal ended it.
    """
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(errors='replace')  # a tree has signs that not every terminal has
    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    with _server(options) as server:
        import rclpy
        from rclpy.executors import SingleThreadedExecutor
        from rclpy.signals import SignalHandlerOptions

        from flashrt_ros.client import FlashrtClient
        from flashrt_ros.errors import FlashrtError

        # With the handlers of rclpy a signal would end the context, and nothing could be tidied.
        rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
        node = rclpy.create_node(f'tree_{os.getpid()}')
        client = FlashrtClient(node, server)
        executor = SingleThreadedExecutor()
        executor.add_node(node)
        thread = threading.Thread(target=executor.spin)
        thread.start()
        try:
            client.wait_until_active(min(60.0, options.limit))
            return _perform(create, options, report, client)
        except KeyboardInterrupt:
            return 130
        except FlashrtError as error:
            print(f'{error.code}: {error}', file=sys.stderr)
            return 2
        finally:
            executor.shutdown()
            thread.join()
            client.destroy()
            node.destroy_node()
            rclpy.try_shutdown()


def _perform(create: Create, options: argparse.Namespace,
             report: Callable[[py_trees.behaviour.Behaviour], str], client: FlashrtClient) -> int:
    """Tick in a session of its own, and leave the node as it was."""
    from flashrt_ros.behaviours import is_settled
    from flashrt_ros.errors import FlashrtError
    session = f'tree-{os.getpid()}'
    tree = py_trees.trees.BehaviourTree(create(client.name, session))
    tree.setup(node=client.node, client=client)
    try:
        code = _tick(tree, options.period, options.limit)
        if code == 0:
            print(report(tree.root), flush=True)
        return code
    finally:
        tree.root.stop(Status.INVALID)
        until = time.monotonic() + 5.0
        while not is_settled(client.node) and time.monotonic() < until:
            time.sleep(0.01)
        tree.shutdown()
        try:
            client.close_session(session, timeout=2.0)
        except FlashrtError as error:
            print(f'session {session} was not closed: {error}', file=sys.stderr)


def _tick(tree: py_trees.trees.BehaviourTree, period: float, limit: float) -> int:
    begun, shown, redraw = time.monotonic(), '', sys.stdout.isatty()
    while True:
        tree.tick()
        elapsed = time.monotonic() - begun
        # On a terminal one picture that moves; elsewhere a picture for each change of a status.
        state = ' '.join(f'{node.status}' for node in tree.root.iterate())
        if redraw or state != shown:
            text = py_trees.display.unicode_tree(tree.root, show_status=True)
            head = '\x1b[H\x1b[2J' if redraw else ''
            print(f'{head}tick {tree.count}, {elapsed:.2f} s\n{text}', flush=True)
            shown = state
        if tree.root.status in _OVER:
            return 0 if tree.root.status == Status.SUCCESS else 1
        if elapsed > limit:
            print(f'not over after {limit:g} s', flush=True)
            return 2
        time.sleep(period)


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[str]:
    """Yield the name of a node: one that runs, or one that is started and ended here."""
    if options.server:
        yield options.server
        return
    from flashrt_ros.cli.show.process import NodeProcess, own_domain, private_environment
    domain = int(os.environ.get('ROS_DOMAIN_ID') or own_domain())
    environment = private_environment(domain)
    os.environ.update({key: environment[key] for key in (
        'ROS_DOMAIN_ID', 'ROS_AUTOMATIC_DISCOVERY_RANGE')})
    namespace = f'/example_{os.getpid()}'
    with tempfile.TemporaryDirectory(prefix='flashrt-example-') as folder:
        process = NodeProcess(
            {'autostart': True, 'model.path': options.model, 'context.max_tokens': 4096,
             'capsules.directory': os.path.join(folder, 'capsules')},
            namespace, environment, Path(folder) / 'node.log')
        print(f'starting a node with the model {options.model}', flush=True)
        process.start()
        try:
            yield f'{namespace}/flashrt'
        finally:
            if process.stop():
                print(process.tail(), file=sys.stderr)
