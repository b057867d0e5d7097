"""
The worker: the one thread that touches an engine.

Callers on any thread queue work and get futures. Generations and exclusive calls run in order;
calls marked ``at_boundary`` also run between two steps of a running generation, so that a save or
a listing is answered while tokens stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
import threading
import time
from typing import Any, TypeVar

from flashrt_ros.control import Control, FinishReason
from flashrt_ros.engine import Engine
from flashrt_ros.errors import Internal, NotActive
from flashrt_ros.results import GenerateRequest, Generation
from flashrt_ros.session import Piece

T = TypeVar('T')


class _Job:
    """A queued piece of work and its future."""

    def __init__(self, work: Callable[[], Any], control: Control | None = None,
                 session: str | None = None) -> None:
        self.future: Future = Future()
        self.control = control
        self.session = session
        self._work = work

    def run(self) -> None:
        """Run, unless the future was cancelled while it waited."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._work())
        except BaseException as error:  # everything belongs to whoever asked
            self.future.set_exception(error)


class Worker:
    """
    Owner of the engine's thread.

    ``last_progress`` is the monotonic time (seconds) of the last job start, piece or chunk, for a
    stall watchdog.
    """

    def __init__(self, engine: Engine, name: str = 'flashrt-worker') -> None:
        self.engine = engine
        self.last_progress = time.monotonic()
        self._queue: deque[_Job] = deque()
        self._at_boundary: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._current: _Job | None = None
        self._thread = threading.Thread(target=self._loop, name=name)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """
        Cancel what runs and waits, end at a boundary, join; True if the thread has ended.

        A running generation ends as cancelled; waiting work is refused with NotActive.
        """
        with self._wake:
            self._stopping = True
            waiting = [*self._queue, *self._at_boundary]
            self._queue.clear()
            self._at_boundary.clear()
            if self._current is not None and self._current.control is not None:
                self._current.control.cancel(FinishReason.CANCELED)
            self._wake.notify_all()
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(NotActive(
                    'the engine is shutting down; ask again when it is active.'))
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """True while a job runs."""
        return self._current is not None

    @property
    def current_session(self) -> str | None:
        """Session of the running generation, or None."""
        job = self._current
        return job.session if job else None

    @property
    def queue_length(self) -> int:
        """Jobs that wait."""
        return len(self._queue) + len(self._at_boundary)

    def generate(self, request: GenerateRequest, on_piece: Callable[[Piece], None] | None = None,
                 control: Control | None = None) -> Future[Generation]:
        """Queue a generation; ``on_piece`` runs on the worker's thread and must only enqueue."""
        switch = control or Control()

        def listen(piece: Piece) -> None:
            self.last_progress = time.monotonic()
            if on_piece is not None:
                on_piece(piece)

        def work() -> Generation:
            return self.engine.generate(request, listen, switch, self._serve_boundary)

        return self._put(self._queue, _Job(work, switch, request.session))

    def call(self, function: Callable[[Engine], T], *, at_boundary: bool = False) -> Future[T]:
        """
        Queue a call of the engine.

        :param at_boundary: may run between two steps of a running generation. The engine refuses
            with Busy what would need the arena of the generating session.
        """
        queue = self._at_boundary if at_boundary else self._queue
        return self._put(queue, _Job(lambda: function(self.engine)))

    def _put(self, queue: deque[_Job], job: _Job) -> Future:
        with self._wake:
            if self._stopping:
                raise NotActive('the engine is shutting down; ask again when it is active.')
            queue.append(job)
            self._wake.notify()
        return job.future

    def _serve_boundary(self) -> None:
        self.last_progress = time.monotonic()
        while self._at_boundary:
            try:
                job = self._at_boundary.popleft()
            except IndexError:  # stop() emptied it
                return
            job.run()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._queue or self._at_boundary or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    return
                queue = self._at_boundary or self._queue
                job = self._current = queue.popleft()
                self.last_progress = time.monotonic()
            try:
                job.run()
            except BaseException as error:  # a fault of ours: the thread must live on
                if not job.future.done():
                    job.future.set_exception(Internal(f'the worker failed: {error!r}.'))
            self._current = None
