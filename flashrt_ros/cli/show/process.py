"""A `capsule_node` as a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import os
from pathlib import Path
import re
import signal
import subprocess
import sys

from flashrt_ros.errors import BY_CODE, FlashrtError, Internal


class NodeProcess:
    """
    Starts, kills and restarts one node; its log goes to a file.

    Where this process is killed, the node ends too (:mod:`flashrt_ros.cli.show.tether`).

    :param parameters: of the node.
    :param namespace: keeps it apart from other nodes of the domain.
    :param environment: of the process, with the domain that it shall live in.
    """

    def __init__(self, parameters: dict[str, object], namespace: str,
                 environment: dict[str, str], log: Path) -> None:
        self.parameters = parameters
        self.namespace = namespace
        self.environment = environment
        self.log = log
        self.process: subprocess.Popen | None = None

    def start(self) -> int:
        """Start it, in the main thread, and return its id; the node may take seconds to come up."""
        command = [sys.executable, '-m', 'flashrt_ros.cli.show.tether', str(os.getpid()),
                   '--ros-args', '-r', f'__ns:={self.namespace}']
        for name, value in self.parameters.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            command += ['-p', f'{name}:={text}']
        # Not in the present directory: -m would put it before the installed package.
        with self.log.open('ab') as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT,
                                            stdin=subprocess.DEVNULL, env=self.environment,
                                            cwd=self.log.parent)
        return self.process.pid

    def kill(self) -> int:
        """End it with SIGKILL, which it cannot notice; return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        return self.process.wait()

    def stop(self) -> int | None:
        """End it politely, then less so; return its exit code, None where it did not run."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                return self.process.wait(timeout=15.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    @property
    def running(self) -> bool:
        """Tell whether the process is there."""
        return self.process is not None and self.process.poll() is None

    def refusal(self) -> FlashrtError | None:
        """Return why the node could not configure itself, which it tells in its log; or None."""
        found = re.search(r'configure failed, ([A-Z_]+): (.+)', self.tail(200))
        return BY_CODE.get(found[1], Internal)(found[2]) if found else None

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of the log."""
        try:
            return '\n'.join(self.log.read_text(errors='replace').splitlines()[-lines:])
        except OSError:
            return ''


def own_domain() -> int:
    """Return a ROS domain for this process: the upper half, since people choose low numbers."""
    return os.getpid() % 50 + 51


def private_environment(domain: int) -> dict[str, str]:
    """Return an environment for a ROS domain that nobody else uses and that stays on this host."""
    from flashrt_ros.cli.checks.process import child_environment
    return {**child_environment(), 'ROS_DOMAIN_ID': str(domain),
            'ROS_AUTOMATIC_DISCOVERY_RANGE': 'LOCALHOST', 'PYTHONUNBUFFERED': '1'}


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """
    Let SIGTERM end the block as Ctrl-C does, by an exception that no ``except Exception`` sees.

    Before `rclpy.init`, whose own handler then calls this one; without it a client that spins gets
    a traceback.
    """
    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
