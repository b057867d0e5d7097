"""
Exit codes of `flashrt-ros`.

0 is success, 1 a check or a comparison that failed, 2 a command line that makes no sense. Every
typed refusal has its own code, in the order of ``msg/ErrorCode``, so that a script can tell a
corrupt file from an unknown capsule without reading English.
"""

from __future__ import annotations

OK = 0
FAILED = 1
USAGE = 2
#: refusals by ``FlashrtError.code``; the order is that of msg/ErrorCode and only grows
REFUSALS = {code: number for number, code in enumerate((
    'NOT_ACTIVE', 'BUSY', 'TIMEOUT', 'CANCELED', 'PREEMPTED', 'UNKNOWN_SESSION',
    'UNKNOWN_CAPSULE', 'INVALID_NAME', 'INVALID_ARGUMENT', 'NAME_EXISTS', 'CAPACITY',
    'INCOMPATIBLE', 'CORRUPT', 'CONTEXT_FULL', 'STORAGE', 'DEVICE', 'INTERNAL'), start=3)}
MISSING = 69      # EX_UNAVAILABLE: something that this command needs is not installed
BUG = 70          # EX_SOFTWARE: an exception that nobody expected
INTERRUPTED = 130


def for_code(code: str) -> int:
    """Return the exit code of a refusal by the name of its error code."""
    return REFUSALS.get(code, REFUSALS['INTERNAL'])


def interrupted(error: BaseException | None) -> bool:
    """
    Tell whether an exception comes from Ctrl-C.

    Where the signal arrives while compiled code asks Python for something, that code raises an
    error of its own from the KeyboardInterrupt: rclpy's does, with a TypeError.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
