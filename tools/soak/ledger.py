"""What a process of the soak saw: counts and violations, on disk before anyone can kill it."""

from __future__ import annotations

from collections import Counter
import json
import os
from pathlib import Path
import time


class Ledger:
    """
    Counts and violations of one process.

    :param folder: shared by all processes of the run.
    :param role: whose ledger it is.
    """

    def __init__(self, folder: Path, role: str) -> None:
        self.role = role
        self.counts: Counter[str] = Counter()
        self._counts = folder / f'{role}.{os.getpid()}.counts'
        self._violations = folder / 'violations'
        self._written = 0.0

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] += number
        if time.monotonic() - self._written > 0.5:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        fresh = self._counts.with_suffix('.new')
        fresh.write_text(json.dumps(self.counts))
        fresh.replace(self._counts)

    def violation(self, what: str, **facts: object) -> None:
        """Write down what must not be; one line is one write, so processes do not mix."""
        line = json.dumps({'at': round(time.time(), 3), 'role': self.role, 'what': what, **facts},
                          default=str) + '\n'
        fd = os.open(self._violations, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)

    def expect(self, holds: bool, what: str, **facts: object) -> bool:
        """Write a violation where something does not hold; return whether it does."""
        self.count('checks')
        if not holds:
            self.violation(what, **facts)
        return holds


def collect(folder: Path) -> tuple[Counter[str], list[dict]]:
    """Return the counts of all processes together, and all violations."""
    counts: Counter[str] = Counter()
    for path in folder.glob('*.counts'):
        counts.update(json.loads(path.read_text()))
    try:
        lines = (folder / 'violations').read_text().splitlines()
    except FileNotFoundError:
        lines = []
    return counts, [json.loads(line) for line in lines]
