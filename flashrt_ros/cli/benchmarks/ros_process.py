"""A process of `bench ros`, as the one that measures sees it."""

from __future__ import annotations

import json
from pathlib import Path
import signal
import subprocess
import sys
from typing import Any

from flashrt_ros.errors import BY_CODE, Internal


class Part:
    """One of the processes; it answers each command with one line."""

    def __init__(self, role: str, environment: dict[str, str], folder: Path,
                 *arguments: str, **options: object) -> None:
        command = [sys.executable, '-m', 'flashrt_ros.cli.benchmarks.ros_parts', role]
        for name, value in options.items():
            command += [f'--{name}', str(value)]
        command += arguments
        self.log = folder / f'{role}.log'
        with self.log.open('ab') as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=environment, cwd=folder)

    def tell(self, **command: object) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + '\n')
        self.process.stdin.flush()

    def hear(self) -> Any:
        """Wait for its answer."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('@'):
                heard = json.loads(line[1:])
                if isinstance(heard, dict) and 'refused' in heard:
                    raise BY_CODE.get(heard['refused'], Internal)(heard['why'])
                return heard
        raise RuntimeError(f'{self.log.stem} ended early: '
                           f'{self.log.read_text(errors="replace")[-1500:]}')

    def ask(self, **command: object) -> Any:
        """Send a command and wait for its answer."""
        self.tell(**command)
        return self.hear()

    def close(self) -> None:
        """Close its stdin, at which it ends; the node needs a signal."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.log.stem == 'node':
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
