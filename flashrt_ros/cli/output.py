"""
What a command prints: either for people (rich, on stdout) or one JSON document for programs.

With ``--json`` the file descriptor of stdout is moved aside for the length of the command and
everything else that writes there (a library, a C++ runtime, a child process) lands on stderr; so
"exactly one document and nothing else" holds whatever is loaded. Logs go to stderr in both modes.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import io
import json
import logging
import os
import sys
from typing import Any

from rich.console import Console

WIDTH = 100  # columns that every table fits in

_document: int | None = None  # descriptor of the real stdout while a --json command runs
_documents = 0


class MissingError(Exception):
    """Something that a command needs is not installed; the message says how to get it."""


def wants_json(arguments: list[str]) -> bool:
    """Tell whether a command line asks for JSON, before anything parsed it."""
    return '--json' in (arguments[:arguments.index('--')] if '--' in arguments else arguments)


@contextlib.contextmanager
def stdout_for_json(enabled: bool) -> Iterator[None]:
    """Keep the real stdout for :func:`emit` alone; all other writers get stderr."""
    global _document, _documents
    if not enabled:
        yield
        return
    sys.stdout.flush()
    _document, _documents = os.dup(1), 0
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(_document, 1)
        os.close(_document)
        _document = None


def emit(document: Any) -> None:
    """Print the one JSON document of a command."""
    global _documents
    _documents += 1
    if _documents > 1:
        raise RuntimeError('a command printed two JSON documents')
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + '\n'
    if _document is None:  # called without main(), as tests do
        sys.stdout.write(text)
        return
    data = text.encode(errors='backslashreplace')  # what is no UTF-8, as an escape of JSON
    while data:
        data = data[os.write(_document, data):]


def emitted() -> bool:
    """Tell whether this command has printed its document."""
    return _documents > 0


def people() -> Console:
    """
    Return the console for people, at most :data:`WIDTH` wide.

    Where stdout is no terminal it is plain, and as wide as ``COLUMNS`` says, else :data:`WIDTH`.
    """
    if sys.stdout.isatty():
        console = Console(highlight=False)
        return console if console.width <= WIDTH else Console(highlight=False, width=WIDTH)
    columns = os.environ.get('COLUMNS', '')
    wanted = int(columns) if columns.isascii() and columns.isdigit() else 0
    return Console(highlight=False, width=wanted or WIDTH)


def tolerate_odd_names() -> None:
    """Let stdout show what is no UTF-8, such as a name of a file, as an escape."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors='backslashreplace')


def log(message: str) -> None:
    """Say on stderr what a long command is doing; programs that read stdout never see it."""
    logging.getLogger('flashrt_ros.cli').info('%s', message)


def start_logging() -> None:
    """Send log records to stderr, the package's own from INFO up, of others only warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter('%(message)s'))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger('flashrt_ros').setLevel(logging.INFO)


def megabytes(count: float) -> str:
    """Return a number of bytes for people to read."""
    for unit, size in (('GiB', 1 << 30), ('MiB', 1 << 20), ('KiB', 1 << 10)):
        if count >= size:
            return f'{count / size:.2f} {unit}'
    return f'{int(count)} B'


def duration(seconds: float) -> str:
    """Return a length of time for people to read, three digits or so."""
    if seconds >= 1.0:
        return f'{seconds:.2f} s'
    if seconds >= 1e-3:
        return f'{seconds * 1e3:.2f} ms'
    return f'{seconds * 1e6:.0f} µs'
