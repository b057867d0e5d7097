"""How a caller stops a running request, and how a request ends."""

from __future__ import annotations

import enum
import threading
import time

from flashrt_ros.errors import Canceled, DeadlineExceeded, FlashrtError, Preempted


class FinishReason(str, enum.Enum):
    """Why a generation ended."""

    STOP = 'stop'
    LENGTH = 'length'
    CANCELED = 'canceled'
    PREEMPTED = 'preempted'
    TIMEOUT = 'timeout'
    ERROR = 'error'


_ERRORS: dict[FinishReason, tuple[type[FlashrtError], str]] = {
    FinishReason.CANCELED: (Canceled, 'was cancelled'),
    FinishReason.PREEMPTED: (Preempted, 'was preempted by another request'),
    FinishReason.TIMEOUT: (DeadlineExceeded, 'ran into its deadline'),
}


class Control:
    """
    A thread-safe stop switch, read between grid chunks and between steps.

    :param deadline: value of ``time.monotonic()`` (seconds) after which the request stops.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
        self._reason: FinishReason | None = None
        self._lock = threading.Lock()

    def cancel(self, reason: FinishReason = FinishReason.CANCELED) -> None:
        """Ask the request to stop; the first reason stays."""
        with self._lock:
            self._reason = self._reason or reason

    @property
    def cancelled(self) -> FinishReason | None:
        """The reason to stop, or None."""
        if self._reason is None and self._deadline is not None:
            if time.monotonic() >= self._deadline:
                self.cancel(FinishReason.TIMEOUT)
        return self._reason

    def check(self, what: str) -> None:
        """
        Raise if the request is to stop.

        :raises Canceled, Preempted, DeadlineExceeded: by the reason.
        """
        reason = self.cancelled
        if reason is not None:
            error, words = _ERRORS.get(reason, (Canceled, 'was stopped'))
            raise error(f'{what} {words}; the state is the boundary before it. Send it again '
                        'when it is still wanted.')
