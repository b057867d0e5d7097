"""
The worker: the one thread that touches an engine.

Callers on any thread queue work and get futures. Generations and exclusive calls run in order;
calls marked ``at_boundary`` also run between two steps of a running generation, so that a save or
a listing is answered while tokens stream. Those that need no boundary of the session that runs are
served within its prefill and its steps too: between two chunks, on a CPU between two layers, on a
device while a token is waited for. However much is called, what runs keeps half of the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
import threading
import time
from typing import Any, TypeVar

import torch

from flashrt_ros.control import Control, FinishReason
from flashrt_ros.engine import Engine
from flashrt_ros.errors import Internal, NotActive
from flashrt_ros.results import GenerateRequest, Generation
from flashrt_ros.session import Piece

T = TypeVar('T')
ANY = '*'  # no name of a session: whichever runs
_TURN = 0.1  # seconds after which a job goes ahead of calls that came after it


class _Job:
    """
    A queued piece of work and its future.

    ``session`` is the one it runs in, ``needs`` the one whose boundary it needs (ANY for the one
    that runs); None for none.
    """

    def __init__(self, work: Callable[[], Any], control: Control | None = None,
                 session: str | None = None, needs: str | None = None) -> None:
        self.future: Future = Future()
        self.control = control
        self.session = session
        self.needs = needs
        self._work = work
        self.since = time.monotonic()

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
        self._places: dict[str, tuple[int, int]] = {}
        self._fresh = False  # a job began, and nothing was noted since
        self._resume = 0.0  # until then no calls are served within a job: it has its half
        self._note()
        self._thread = threading.Thread(target=self._loop, name=name)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """
        Cancel what runs and waits, end at a boundary, join; True if the thread has ended.

        A running generation or replay ends as cancelled; waiting work is refused with NotActive.
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
    def thread_id(self) -> int:
        """Id that the system gave the thread; 0 before :meth:`start`."""
        return self._thread.native_id or 0

    @property
    def busy(self) -> bool:
        """True while a job runs."""
        return self._current is not None

    @property
    def current_session(self) -> str | None:
        """Session of the running generation or rollback, or None."""
        job = self._current
        return job.session if job else None

    @property
    def queue_length(self) -> int:
        """Jobs that wait."""
        return len(self._queue) + len(self._at_boundary)

    def place(self, session: str) -> tuple[int, int]:
        """
        Return epoch and position of a session at its last boundary; zeros where there is none.

        From any thread, at once: who was refused or gave up does not wait for the worker.
        """
        return self._places.get(session, (0, 0))

    def generate(self, request: GenerateRequest, on_piece: Callable[[Piece], None] | None = None,
                 control: Control | None = None) -> Future[Generation]:
        """Queue a generation; ``on_piece`` runs on the worker's thread and must only enqueue."""
        switch = control or Control()

        def listen(piece: Piece) -> None:
            self.last_progress = time.monotonic()
            self._places[request.session] = piece.epoch, piece.position
            if on_piece is not None:
                on_piece(piece)

        def work() -> Generation:
            try:
                return self.engine.generate(request, listen, switch, self._serve_boundary,
                                            self.aside)
            finally:
                self._note()

        return self._put(self._queue, _Job(work, switch, request.session))

    def call(self, function: Callable[[Engine], T], *, at_boundary: bool = False,
             session: str | None = ANY, control: Control | None = None) -> Future[T]:
        """
        Queue a call of the engine.

        :param at_boundary: may run within a running generation. The engine refuses with Busy what
            would need the arena of the generating session.
        :param session: whose boundary the call needs, None for none, ANY for whichever session
            runs: it waits for the end of a step, of a prefill and of a replay of that one. Of a
            call that is not `at_boundary`: the session that it changes.
        :param control: is cancelled by :meth:`stop` while the call runs.
        """
        def work() -> T:
            try:
                return function(self.engine)
            finally:
                self._note()  # before the answer: who has it may ask for the place

        if at_boundary:
            return self._put(self._at_boundary, _Job(work, needs=session))
        return self._put(self._queue, _Job(work, control, None if session == ANY else session))

    def aside(self) -> None:
        """Serve, inside a fold, an append or a replay, what leaves that session alone."""
        if self._fresh:
            self._fresh = False
            self._note()  # the goal may have begun with a restore
        if not self._at_boundary:
            self.last_progress = time.monotonic()
            return
        # A fold runs in inference mode, and what is made in there could not be written later.
        with torch.inference_mode(False):
            self._serve(self.current_session)

    def _put(self, queue: deque[_Job], job: _Job) -> Future:
        with self._wake:
            if self._stopping:
                raise NotActive('the engine is shutting down; ask again when it is active.')
            queue.append(job)
            self._wake.notify()
        return job.future

    def _serve_boundary(self) -> None:
        self._serve(None)

    def _serve(self, without: str | None) -> None:
        """
        Run the jobs that wait for a boundary by now, but for those that need one session's.

        Clients that call without pause get half of the time, what runs has the other half. A
        boundary is no place to skip: who needs it is served at each one.
        """
        self.last_progress = begun = time.monotonic()
        if not self._at_boundary:
            return
        paused = begun < self._resume
        if paused and without is not None:
            return
        for _ in range(len(self._at_boundary)):
            job = self._next(without, needing=paused)
            if job is None:
                break
            job.run()
        self.last_progress = now = time.monotonic()
        self._resume = max(self._resume, now + (now - begun))

    def _next(self, without: str | None, needing: bool) -> _Job | None:
        """Take the oldest of those that may run; `needing`: only where it needs a boundary."""
        if not self._at_boundary:  # nearly always, and asked once a token
            return None
        with self._wake:
            for job in self._at_boundary:
                if (without is None or job.needs not in (without, ANY)) and (
                        not needing or job.needs is not None):
                    self._at_boundary.remove(job)
                    return job
        return None

    def _choose(self) -> deque[_Job]:
        """Return the queue whose turn it is: the calls', unless a job has waited for long."""
        if self._queue and self._at_boundary:
            first, call = self._queue[0].since, self._at_boundary[0].since
            if first < call and time.monotonic() - first > _TURN:
                return self._queue
        return self._at_boundary or self._queue

    def _note(self) -> None:
        """Note where the sessions stand. On the worker's thread. Never raises."""
        with suppress(Exception):  # a device that fell off the bus: the job itself tells that
            self._places = {info.name: (info.epoch, info.position)
                            for info in self.engine.sessions()}

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._queue or self._at_boundary or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    return
                job = self._current = self._choose().popleft()
                self._fresh = True
                self.last_progress = time.monotonic()
            try:
                job.run()
            except BaseException as error:  # a fault of ours: the thread must live on
                if not job.future.done():
                    job.future.set_exception(Internal(f'the worker failed: {error!r}.'))
            self._current = None
