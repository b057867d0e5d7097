"""The way of a command to a node that runs: options, discovery, messages as plain data, names."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
import re
import time
from typing import Annotated, Any, TYPE_CHECKING

import typer

from flashrt_ros.cli import output
from flashrt_ros.errors import DeadlineExceeded, InvalidName, NotActive

if TYPE_CHECKING:
    from flashrt_ros.client import FlashrtClient

NamespaceOption = Annotated[str, typer.Option(
    '--namespace', '-n', envvar='FLASHRT_NAMESPACE',
    help='Namespace of the node, such as /robot1; the node itself is called flashrt.')]
DiscoveryOption = Annotated[float, typer.Option(
    '--discovery-timeout', min=0.1, help='Seconds until the node has to be found.')]
TimeoutOption = Annotated[float, typer.Option(
    '--timeout', min=0.1, help='Seconds until it has to answer.')]


_NAMESPACE = re.compile(r'[A-Za-z_][A-Za-z0-9_]*(/[A-Za-z_][A-Za-z0-9_]*)*')
_LONGEST = 200  # characters; the name of a topic may have 255


def full_name(namespace: str) -> str:
    """
    Return the full name of the node in a namespace.

    :raises InvalidName: it is no namespace of ROS.
    """
    inner = namespace.strip('/')
    if inner and (_NAMESPACE.fullmatch(inner) is None or len(inner) > _LONGEST):
        raise InvalidName(f'{ascii(namespace)[:80]} is no namespace: that is names of letters, '
                          'digits and _, none beginning with a digit, with / between them, such '
                          f'as /robot1 or /site/robot1, of at most {_LONGEST} characters.')
    return f'/{inner}/flashrt' if inner else '/flashrt'


@contextlib.contextmanager
def ros_node(purpose: str) -> Iterator[Any]:
    """
    Make an rclpy node for the length of a command.

    :raises MissingError: there is no ROS 2 here.
    """
    try:
        import rclpy
        from rclpy.logging import LoggingSeverity, set_logger_level
        from rclpy.signals import SignalHandlerOptions

        import flashrt_ros.msg  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise output.MissingError(
            f'this command needs ROS 2 and the interfaces of this package ({error}). Source '
            'setup.bash of your workspace; `flashrt-ros doctor` tells more.') from error
    # Ctrl-C stays Python's: with rclpy's handlers the context is gone before anything can end.
    # Without the command line: that is ours, and what is no UTF-8 in it would end here.
    rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
    set_logger_level('rcl', LoggingSeverity.ERROR)
    node = rclpy.create_node(f'flashrt_{purpose}_{os.getpid()}', enable_rosout=False,
                             start_parameter_services=False)
    try:
        yield node
    finally:
        node.destroy_node()
        rclpy.try_shutdown()


@contextlib.contextmanager
def connected(namespace: str, discovery: float, timeout: float) -> Iterator[FlashrtClient]:
    """
    Yield a client of the node, once it is found.

    :raises NotActive: it is not found; the message names the nodes that are.
    :raises DeadlineExceeded: it is found and does not answer.
    """
    name = full_name(namespace)
    with ros_node('call') as node:
        from flashrt_ros.client import FlashrtClient
        client = FlashrtClient(node, name, timeout=timeout)
        try:
            try:
                client.wait_for(client.action.server_is_ready, discovery)
            except DeadlineExceeded as error:
                raise NotActive(not_found(node, name, discovery)) from error
            client.wait_until_ready(timeout)
            yield client
        finally:
            client.destroy()


def not_found(node: Any, name: str, seconds: float) -> str:
    """Return a sentence that says which nodes there are instead."""
    kind = 'flashrt_ros/srv/SaveCapsule'
    others = sorted(service.rpartition('/')[0] for service, kinds
                    in node.get_service_names_and_types() if kind in kinds)
    others = [other for other in others if other != name]
    hint = ('There are ' + ', '.join(others) + ': choose one with --namespace.' if others else
            'Is it running, with the same ROS_DOMAIN_ID and discovery range?')
    return f'{name} was not found within {seconds:g} s. {hint}'


def plain(message: Any) -> Any:
    """Return a message as what JSON can hold: durations and times as seconds, ids as hex."""
    kind = type(message).__name__
    if kind == 'Duration' or kind == 'Time':
        return message.sec + message.nanosec / 1e9
    if kind == 'UUID':
        return bytes(message.uuid).hex()
    if hasattr(message, 'get_fields_and_field_types'):
        return {name: plain(getattr(message, name))
                for name in message.get_fields_and_field_types()}
    if isinstance(message, float) and message != message:
        return None
    if isinstance(message, (str, int, float)):
        return message
    return [plain(item) for item in message]


def latched(namespace: str, kind: str, patience: float = 3.0) -> Any:
    """Return the latched ~/capsules or ~/state of a node, None where none comes in time."""
    with ros_node('completion') as node:
        import rclpy
        from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

        from flashrt_ros.msg import CapsuleList, NodeState
        found: list[Any] = []
        node.create_subscription(
            CapsuleList if kind == 'capsules' else NodeState, f'{full_name(namespace)}/{kind}',
            found.append, QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE,
                                     durability=DurabilityPolicy.TRANSIENT_LOCAL))
        until = time.monotonic() + patience
        while not found and time.monotonic() < until:
            rclpy.spin_once(node, timeout_sec=0.05)
        return found[-1] if found else None


def _complete(context: typer.Context, incomplete: str, kind: str) -> list[str]:
    namespace = str(context.params.get('namespace') or os.environ.get('FLASHRT_NAMESPACE', ''))
    try:
        message = latched(namespace, kind)
    except Exception:  # a completion that fails completes nothing, and breaks no command line
        return []
    if message is None:
        return []
    names = [item.name for item in (message.capsules if kind == 'capsules' else message.sessions)]
    return [name for name in names if name.startswith(incomplete)]


def complete_capsule(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a capsule from ~/capsules."""
    return _complete(ctx, incomplete, 'capsules')


def complete_session(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a session from ~/state."""
    return _complete(ctx, incomplete, 'state')
