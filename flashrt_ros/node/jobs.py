"""Calls of the engine on behalf of a service: they answer once, and by their deadline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures import Future as WorkerFuture
import threading
import time
import traceback
from typing import Any, Generic, TYPE_CHECKING, TypeVar

from flashrt_ros.errors import DeadlineExceeded, DeviceFault, FlashrtError, NotActive
from flashrt_ros.node.alarms import Alarms
from flashrt_ros.node.desk import Reply

if TYPE_CHECKING:
    from flashrt_ros.control import Control
    from flashrt_ros.engine import Engine
    from flashrt_ros.worker import Worker

T = TypeVar('T')


class Job(Generic[T]):
    """
    One function on its way through the worker.

    Until its deadline it either begins or is refused with TIMEOUT, never both: what was refused
    has no effect later. What has begun is waited for: mostly a copy, sometimes a replay. Where
    the worker gives no sign of life for `grace` seconds, the caller is told DEVICE.
    """

    def __init__(self, worker: Worker, function: Callable[[Engine], T], *, at_boundary: bool,
                 session: str | None, deadline: float, grace: float, alarms: Alarms,
                 reply: Reply[T], control: Control | None = None) -> None:
        self._function = function
        self._worker = worker
        self._grace = grace
        self._alarms = alarms
        self._reply = reply
        self._lock = threading.Lock()
        self._began = False
        self._expired = self._done = False
        self._alarm = alarms.at(deadline, self._expire)
        try:
            future = worker.call(self._run, at_boundary=at_boundary, session=session,
                                 control=control)
        except Exception:
            self._alarm.cancel()
            raise
        future.add_done_callback(self._finish)

    def _run(self, engine: Engine) -> T:
        with self._lock:
            if self._expired:
                raise DeadlineExceeded('The time limit passed before the request had its turn.')
            self._began = True
        return self._function(engine)

    def _finish(self, future: WorkerFuture) -> None:
        with self._lock:
            self._done = True
            self._alarm.cancel()
        try:
            error = future.exception()
        except CancelledError:
            error = NotActive('The node stopped serving before the request had its turn.')
        if error is None:
            self._reply.set(future.result())
        else:
            self._reply.set(error=error)

    def _expire(self) -> None:
        with self._lock:
            if self._began:
                if not self._done:
                    self._alarm = self._alarms.at(time.monotonic() + self._grace, self._hang)
                return
            self._expired = True
        self._reply.set(error=DeadlineExceeded(
            'The time limit passed before the request had its turn, and nothing was changed: try '
            'again later, with a longer timeout, or cancel the running goals first.'))

    def _hang(self) -> None:
        since = self._worker.last_progress
        if time.monotonic() - since < self._grace:
            with self._lock:
                if not self._done:
                    self._alarm = self._alarms.at(since + self._grace, self._hang)
            return
        self._reply.set(error=DeviceFault(
            'The request began and does not end: the compute device hangs. Look at /diagnostics '
            'and restart the node; it may still take effect.'))


def describe(error: BaseException) -> str:
    """Return a line for the log."""
    if isinstance(error, FlashrtError):
        return f'{error.code}: {error}'
    return f'{type(error).__name__}: {error}'


def is_fault(error: BaseException | Any) -> bool:
    """Tell whether an error is ours, not the caller's: it belongs in the log as an error."""
    return not isinstance(error, FlashrtError) or error.code in ('INTERNAL', 'DEVICE')


def report(error: BaseException) -> str:
    """
    Return what the log says of an error: its line, and a trace where nobody expected it.

    A typed error says itself what is wrong and what to do. One that only wraps an exception of a
    library or of this package's bugs does not tell where: that one's trace is what helps.
    """
    unexpected = error
    while isinstance(unexpected, FlashrtError) and unexpected.code in ('INTERNAL', 'DEVICE'):
        if unexpected.__cause__ is None:
            break
        unexpected = unexpected.__cause__
    if isinstance(unexpected, FlashrtError):
        return describe(error)
    return f'{describe(error)}\n' + ''.join(traceback.format_exception(error)).rstrip()
