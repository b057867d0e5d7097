"""
A seam for injected faults: named points that do nothing until a test arms one.

Points stand only at steps that touch a file (open, write, fsync, rename), never on a path that a
token takes. The seam is global, not per thread, because disk writes run on a background thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import errno
import os

_observer: Callable[[str], None] | None = None


def point(name: str) -> None:
    """Pass the point ``name``; raises what a test armed there."""
    if _observer is not None:
        _observer(name)


@contextmanager
def observe(observer: Callable[[str], None]) -> Iterator[None]:
    """Call ``observer(name)`` at every point passed inside the block; nesting replaces."""
    global _observer
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous


@contextmanager
def fail_at(name: str, fault: BaseException | int = errno.EIO, nth: int = 1) -> Iterator[list[str]]:
    """
    Raise ``fault`` (an exception, or an errno) the ``nth`` time that ``name`` is passed.

    :return: the growing list of points passed, to check that the fault was reached.
    """
    if isinstance(fault, int):
        fault = OSError(fault, os.strerror(fault))
    passed: list[str] = []

    def observer(here: str) -> None:
        passed.append(here)
        if here == name and passed.count(name) == nth:
            raise fault

    with observe(observer):
        yield passed
