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

os.environ.setdefault('ROS_DOMAIN_ID', str(os.getpid() % 50 + 1))
os.environ.setdefault('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
os.environ.setdefault('ROS_PYTHON_CHECK_FIELDS', '1')

from ament_index_python.packages import get_package_prefix  # noqa: E402
from lifecycle_msgs.srv import GetState  # noqa: E402
import rclpy  # noqa: E402
from rclpy.executors import MultiThreadedExecutor  # noqa: E402
from rclpy.qos import DurabilityPolicy, QoSProfile  # noqa: E402

from flashrt_ros.client import FlashrtClient, Stream  # noqa: E402
from flashrt_ros.errors import FlashrtError  # noqa: E402
from flashrt_ros.msg import Token  # noqa: E402

MODEL = 'random:tiny'
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
WAIT = 60.0  # seconds; a bound against hanging on a slow machine, not an expectation
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
        """What has been logged by now: of a node that runs, `until` tells when a line is there."""
        return self.log_file.read_text(errors='replace')

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = WAIT) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f'the node did not end in {timeout} s:\n{self.log}') from None

    def close(self) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGINT)
            try:
                self.process.wait(WAIT)
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
        self.client = FlashrtClient(self.node, name, timeout=WAIT)
        self.executor = MultiThreadedExecutor(2, context=self.context)
        self.executor.add_node(self.node)
        self._thread = threading.Thread(target=self._spin)
        self._running = True
        self._go_on, self._rests = threading.Event(), threading.Event()
        self._go_on.set()
        self._thread.start()

    def _spin(self) -> None:
        while self._running:
            if not self._go_on.is_set():
                self._rests.set()
                self._go_on.wait()
                self._rests.clear()
            self.executor.spin_once(timeout_sec=0.1)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing that arrives is taken in here."""
        self._go_on.clear()
        assert self._rests.wait(WAIT)
        try:
            yield
        finally:
            self._go_on.set()

    def collect(self, kind: Any, topic: str, qos: Any = 256, first: bool = False) -> list[Any]:
        """
        Subscribe; the returned list grows as messages come.

        From here on nothing that is published is missed. The list begins with a message where the
        topic is latched or `first` is true: there is a last one to look at.
        """
        messages: list[Any] = []
        self.node.create_subscription(kind, topic, messages.append, qos)
        self.known()
        if first or getattr(qos, 'durability', None) == DurabilityPolicy.TRANSIENT_LOCAL:
            until(lambda: messages)
        return messages

    def service(self, kind: Any, name: str) -> Any:
        """Return a client of a service of the flashrt node; even its first answer gets here."""
        client = self.node.create_client(kind, f'{self.client.name}/{name}')
        until(client.service_is_ready)
        self.known()
        return client

    def known(self) -> None:
        """
        Wait until the flashrt node has found all that was made here before.

        A publisher that has not found a subscription yet sends it nothing, and only its process
        knows. Discovery tells of endpoints in the order they were made in: a node whose answer
        reaches a new client has found what is older than that client.
        """
        client = self.node.create_client(GetState, f'{self.client.name}/get_state')
        until(client.service_is_ready)
        until(lambda: _answers(client))
        self.node.destroy_client(client)

    def close(self) -> None:
        self._running = False
        self._thread.join()
        self.executor.shutdown()
        self.client.destroy()
        self.node.destroy_node()
        rclpy.shutdown(context=self.context)


def until(condition: Callable[[], Any], timeout: float = WAIT) -> Any:
    """Wait for something to become true and return it."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f'did not come true within {timeout} s')


def _answers(client: Any) -> bool:
    """Whether a service answers now; a server that has not found its client answers nobody."""
    future = client.call_async(GetState.Request())
    deadline = time.monotonic() + 0.5
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.002)
    if not future.done():
        client.remove_pending_request(future)
    return future.done()


def ended(tokens: list[Any]) -> bool:
    """Whether the last message of a goal is here: no topic and no result waits for another."""
    return bool(tokens) and tokens[-1].finish_reason != Token.RUNNING


def last(tokens: list[Any]) -> Any:
    """Return the last message of a goal, as soon as it is here."""
    until(lambda: ended(tokens))
    return tokens[-1]


@contextmanager
def running(folder: Path, **parameters: Any) -> Iterator[tuple[NodeProcess, Peer]]:
    """A node and a peer; the node must leave with 0 where it still runs at the end."""
    namespace, fault = parameters.get('namespace', ''), parameters.get('fault', '')
    process = NodeProcess(folder, **parameters)
    peer = Peer(f'{namespace}/flashrt')
    try:
        if parameters.get('autostart', True):
            until(lambda: _is_active(process, peer.client), 2 * WAIT)
        else:
            peer.client.lifecycle(timeout=2 * WAIT)
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
        client.wait_until_active(3.0)
        return True
    except FlashrtError:
        return False


def clean(client: FlashrtClient, *sessions: str) -> None:
    """Bring an active node back to how it starts; `sessions`: others than the usual names."""
    client.cancel_all()
    for info in client.list():
        client.drop(info.name)
    until(lambda: _reset(client))
    for name in ('a', 'b', 'c', 'long', *sessions):
        try:
            client.close_session(name)
        except FlashrtError:
            pass
    # What goals have still to say is said before what came after them: here a refusal.
    client.generate('x', session='-').result(WAIT, check=False)


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
        # One that was ended, by its timeout, say, was on its way as well.
        if not stream.done.done() or stream.done.result().finish_reason != Token.STOP:
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
