"""What the node tests share: a real node in its own process, and a client in this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import os
from pathlib import Path
import signal
import subprocess
import sys
import threading
import time
from typing import Any

os.environ.setdefault('ROS_DOMAIN_ID', str(os.getpid() % 100 + 1))
os.environ.setdefault('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
os.environ.setdefault('ROS_PYTHON_CHECK_FIELDS', '1')

from ament_index_python.packages import get_package_prefix  # noqa: E402
import rclpy  # noqa: E402
from rclpy.executors import MultiThreadedExecutor  # noqa: E402

from flashrt_ros.client import FlashrtClient, Stream  # noqa: E402
from flashrt_ros.errors import FlashrtError  # noqa: E402
from flashrt_ros.msg import Token  # noqa: E402

MODEL = 'random:tiny'
# A session's answer may meet an end token by chance: these are tried until one goes on.
PROMPTS = ('go', 'tell me', 'hello there', 'one two three', 'a b c d e f', 'xyz', 'where', 'cup')


class NodeProcess:
    """
    A node in a process of its own, started as a user starts it.

    :param folder: log and capsules go here.
    :param fault: Python that runs in the process before the node starts: plants a fault.
    :param parameters: of the node, by name with `__` for the dot.
    """

    def __init__(self, folder: Path, autostart: bool = True, namespace: str = '',
                 fault: str = '', **parameters: Any) -> None:
        self.folder = folder
        values = {'model.path': MODEL, 'context.max_tokens': 8192, 'autostart': autostart,
                  'capsules.directory': str(folder / 'capsules'), 'model.threads': 1}
        values.update({name.replace('__', '.'): value for name, value in parameters.items()})
        arguments = []
        for name, value in values.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            arguments += ['-p', f'{name}:={text}' if text else f"{name}:=''"]
        if namespace:
            arguments += ['-r', f'__ns:={namespace}']
        command = [str(Path(get_package_prefix('flashrt_ros'), 'lib/flashrt_ros/capsule_node'))]
        if fault:
            script = folder / 'faulty_node.py'
            script.write_text(f'import sys\nfrom flashrt_ros.node.main import main\n{fault}\n'
                              'sys.exit(main())\n')
            command = [sys.executable, str(script)]
        self.log_file = folder / f'node-{time.monotonic_ns()}.log'
        with self.log_file.open('wb') as log:
            self.process = subprocess.Popen(
                [*command, '--ros-args', *arguments], stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder)

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors='replace')

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 30.0) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f'the node did not end in {timeout} s:\n{self.log}') from None

    def close(self) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f'the node had to be killed:\n{self.log}') from None


class Peer:
    """A node of this process that spins in a thread, with a client of the flashrt node."""

    def __init__(self, name: str = '/flashrt') -> None:
        self.context = rclpy.Context()
        rclpy.init(context=self.context)
        self.node = rclpy.create_node(f'tester_{time.monotonic_ns()}', context=self.context)
        self.client = FlashrtClient(self.node, name, timeout=20.0)
        self.executor = MultiThreadedExecutor(2, context=self.context)
        self.executor.add_node(self.node)
        self._thread = threading.Thread(target=self._spin)
        self._running = True
        self._thread.start()

    def _spin(self) -> None:
        while self._running:
            self.executor.spin_once(timeout_sec=0.1)

    def collect(self, kind: Any, topic: str, qos: Any = 256) -> list[Any]:
        """Subscribe; the returned list grows as messages come."""
        messages: list[Any] = []
        publishers = self.node.count_publishers(topic)
        self.node.create_subscription(kind, topic, messages.append, qos)
        until(lambda: self.node.count_publishers(topic) >= max(1, publishers))
        time.sleep(0.2)  # the publisher has to see the subscription too
        return messages

    def close(self) -> None:
        self._running = False
        self._thread.join()
        self.executor.shutdown()
        self.client.destroy()
        self.node.destroy_node()
        rclpy.shutdown(context=self.context)


def until(condition: Callable[[], Any], timeout: float = 15.0) -> Any:
    """Wait for something to become true and return it."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f'did not come true within {timeout} s')


def ended(tokens: list[Any]) -> bool:
    """Whether the last message of a goal is here: no topic and no result waits for another."""
    return bool(tokens) and tokens[-1].finish_reason != Token.RUNNING


@contextmanager
def running(folder: Path, **parameters: Any) -> Iterator[tuple[NodeProcess, Peer]]:
    """A node and a peer; the node must leave with 0 where it still runs at the end."""
    namespace, fault = parameters.get('namespace', ''), parameters.get('fault', '')
    process = NodeProcess(folder, **parameters)
    peer = Peer(f'{namespace}/flashrt')
    try:
        if parameters.get('autostart', True):
            until(lambda: _is_active(process, peer.client), 60.0)
        else:
            peer.client.lifecycle(timeout=60.0)
        yield process, peer
    except BaseException:
        print(process.log)
        raise
    finally:
        peer.close()
        alive = process.process.poll() is None
        process.close()
    if alive:
        assert process.process.returncode == 0, process.log
    assert fault or 'Traceback' not in process.log, process.log


def _is_active(process: NodeProcess, client: FlashrtClient) -> bool:
    assert process.process.poll() is None and 'configure failed' not in process.log, process.log
    try:
        client.wait_until_active(1.0)
        return True
    except FlashrtError:
        return False


def clean(client: FlashrtClient) -> None:
    """Bring an active node back to how it starts."""
    client.cancel_all()
    for info in client.list():
        client.drop(info.name)
    until(lambda: _reset(client))
    for name in ('a', 'b', 'c', 'long'):
        try:
            client.close_session(name)
        except FlashrtError:
            pass


def _reset(client: FlashrtClient) -> bool:
    try:
        client.reset()
        return True
    except FlashrtError:
        return False


def start_long(client: FlashrtClient, session: str = '', tokens: int = 20,
               **fields: Any) -> Stream:
    """Return a stream that is on its way and far from its end."""
    for prompt in PROMPTS:
        stream = client.generate(prompt, session=session, max_tokens=6000, **fields)
        until(lambda stream=stream: stream.done.done() or len(stream.tokens) >= tokens)
        if not stream.done.done():
            return stream
    raise AssertionError('no prompt led to a long answer')


def code_of(function: Callable[[], Any]) -> str:
    """Return the code that a call ends with."""
    try:
        function()
    except FlashrtError as error:
        assert str(error), 'a refusal without a sentence'
        return error.code
    return 'NONE'
