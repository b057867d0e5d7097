"""
The executable ``capsule_node``.

Signals: with rclpy's own handlers the context is gone before any goal can end, and no client ever
gets its result. So a handler only sets an event, and the loop below ends the goals, keeps spinning
until their results are sent, and leaves with 0.
"""

from __future__ import annotations

from collections.abc import Sequence
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

# Torch and rclpy take seconds to import, in which a signal has to find the handler in place: see
# the late imports below.

_GRACE = 0.3  # seconds of spinning after the last result, for a client that is about to ask
_THREADS = 3


def main(args: Sequence[str] | None = None) -> int:
    """Run the node until a signal ends it; return the exit code."""
    # OpenMP threads that spin while they wait starve rclpy's; read when torch is imported, below.
    os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())  # the second signal changes nothing

    import rclpy
    from rclpy.executors import MultiThreadedExecutor
    from rclpy.signals import SignalHandlerOptions

    from flashrt_ros.errors import FlashrtError
    from flashrt_ros.node.node import CapsuleNode

    # Callbacks share the interpreter with the worker: with the default of 5 ms each of them would
    # wait that long beside a busy one.
    sys.setswitchinterval(5e-4)
    try:
        rclpy.init(args=None if args is None else list(args),
                   signal_handler_options=SignalHandlerOptions.NO)
    except (RuntimeError, ValueError) as error:  # a log level or a file of parameters
        print(f'The arguments for ROS cannot be used: {error}', file=sys.stderr, flush=True)
        return 2
    try:
        node = CapsuleNode(stop.is_set)
    except FlashrtError as error:
        rclpy.logging.get_logger('flashrt').fatal(f'{error.code}: {error}')
        rclpy.try_shutdown()
        return 2
    executor = MultiThreadedExecutor(_THREADS)
    executor.add_node(node)
    if node.parameters['autostart']:
        executor.create_task(node.autostart)
    try:
        while not stop.is_set():
            _spin(executor, node, 0.1)
        node.get_logger().info('Told to end: ending the goals')
        _end(executor, node)
    finally:
        _leave(executor, node)
    return 0


def _spin(executor: Any, node: Any, timeout: float) -> None:
    """Spin once; what a callback let out is logged and ends nothing."""
    try:
        executor.spin_once(timeout_sec=timeout)
    except Exception:
        node.get_logger().error('A callback failed:\n' + traceback.format_exc())


def _end(executor: Any, node: Any) -> None:
    """End the goals, let their results out, then go through the shutdown transition."""
    limit = node.parameters['timeouts.cancel']
    ending = executor.create_task(node.end_goals, 'The node is shutting down')
    deadline = time.monotonic() + limit + 1.0
    while time.monotonic() < deadline and not (ending.done() and node.generate.unsent == 0):
        _spin(executor, node, 0.02)
    quiet = time.monotonic() + _GRACE
    while time.monotonic() < quiet:
        _spin(executor, node, 0.02)
    closing = executor.create_task(_shutdown, node)
    deadline = time.monotonic() + limit + 60.0
    while time.monotonic() < deadline and not closing.done():
        _spin(executor, node, 0.05)


def _shutdown(node: Any) -> None:
    while node.transiting():  # a configure that is being abandoned
        time.sleep(0.02)
    if node.finalized():  # somebody shut it down by its service
        return
    try:
        node.trigger_shutdown()
    except Exception as error:
        node.get_logger().error(f'The shutdown transition failed: {error!r}')


def _leave(executor: Any, node: Any) -> None:
    """Free what is left and end; a thread that hangs in the device must not keep the process."""
    import rclpy

    watchdog = threading.Timer(20.0, _give_up)
    watchdog.daemon = True
    watchdog.start()
    for step in (node.finish, executor.shutdown, node.destroy_node, rclpy.try_shutdown):
        try:
            step()
        except Exception:
            traceback.print_exc()
    watchdog.cancel()


def _give_up() -> None:
    print('A thread did not end within 20 s; leaving without it.', file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == '__main__':
    sys.exit(main())
