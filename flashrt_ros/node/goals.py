"""Goals that were accepted and have not ended: who runs, who waits, and how each one ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future as WorkerFuture
from functools import partial
import threading
import time
from typing import TYPE_CHECKING

from unique_identifier_msgs.msg import UUID

from flashrt_ros.action import Generate
from flashrt_ros.control import Control, FinishReason
from flashrt_ros.errors import (
    Busy,
    Canceled,
    Capacity,
    DeadlineExceeded,
    DeviceFault,
    FlashrtError,
    NotActive,
    Preempted,
)
from flashrt_ros.msg import Token
from flashrt_ros.node import convert
from flashrt_ros.node.alarms import Alarm, Alarms
from flashrt_ros.node.desk import Reply

if TYPE_CHECKING:
    from flashrt_ros.node.publishers import Outbox
    from flashrt_ros.node.statistics import Statistics
    from flashrt_ros.results import GenerateRequest, Generation
    from flashrt_ros.session import Piece
    from flashrt_ros.worker import Worker

# Accepted goals beyond this end with CAPACITY: a queue that only grows answers nobody in time.
MAX_GOALS = 128
_REASONS = {'CANCELED': Token.CANCELED, 'PREEMPTED': Token.PREEMPTED, 'TIMEOUT': Token.TIMEOUT}
_ALL_CANCELED = 'All goals were canceled by a client.'


class WatchedControl(Control):
    """A stop switch that remembers when the engine last read it: a sign of life in a prefill."""

    read = 0.0

    @property
    def cancelled(self) -> FinishReason | None:
        """The reason to stop, or None."""
        self.read = time.monotonic()
        return super().cancelled


class Goal:
    """
    One request to generate, from acceptance to its result.

    :param id: unique id, that of the action's goal where there is one.
    :param feedback: gets each Token message, on the publishing thread; None for none.
    :param on_end: called once, on the publishing thread, when the last message is out.
    :param accepted: when it arrived, on the steady clock.
    """

    def __init__(self, id: UUID, feedback: Callable[[Token], None] | None,
                 on_end: Callable[[Goal], None], accepted: float) -> None:
        self.id = id
        self.feedback = feedback
        self.on_end = on_end
        self.accepted = accepted
        self.session = ''
        self.worker: Worker | None = None
        self.control: WatchedControl | None = None
        self.future: WorkerFuture | None = None
        self.deadline = Alarm(0.0, None)
        self.canceled_by_client = False
        # The end: why the node ended it, and what came out.
        self.why: FlashrtError | None = None
        self.ended = False
        self.error: BaseException | None = None
        self.reason = Token.RUNNING
        self.generation: Generation | None = None
        self.place = (0, 0)  # epoch and position of the session, where there is no generation
        # The stream, used by the publishing thread.
        self.epoch = 0
        self.seq = 0
        self.dropped = 0
        self.index = 0
        self.position = 0
        self.characters = 0
        self.last_sent = 0.0
        self.message: Token | None = None

    def result(self) -> Generate.Result:
        """Return the action's result, once the goal has ended."""
        return convert.generate_result(self.error, self.reason, self.generation, self.place)


class Goals:
    """
    The open goals, in the order of acceptance; the worker runs them in that order.

    :param outbox: publishes pieces and ends.
    :param alarms: keeps the deadlines.
    :param statistics: is told of pieces and ends.
    :param changed: called when a goal was queued or ended, on any thread.
    """

    def __init__(self, outbox: Outbox, alarms: Alarms, statistics: Statistics,
                 changed: Callable[[], None]) -> None:
        self._outbox = outbox
        self._alarms = alarms
        self._statistics = statistics
        self._changed = changed
        self._lock = threading.RLock()
        self._open: dict[bytes, Goal] = {}
        self._idle = threading.Condition(self._lock)
        self._waiters: list[tuple[str, Reply[None]]] = []
        self._refusal: FlashrtError | None = None
        self._canceled_at = 0.0

    def submit(self, goal: Goal, worker: Worker, request: GenerateRequest, *, timeout: float,
               on_busy: int) -> None:
        """
        Queue a goal on the worker.

        :raises FlashrtError: it cannot run; the caller ends it with `refuse`.
        """
        goal.session, goal.worker = request.session, worker
        goal.control = WatchedControl(goal.accepted + timeout if timeout > 0 else None)
        if on_busy == Generate.Goal.PREEMPT:
            self.preempt(request.session)
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            if goal.accepted <= self._canceled_at:
                raise Canceled(_ALL_CANCELED)  # it was on its way in when all were canceled
            if on_busy == Generate.Goal.REJECT and self._open:
                other = next(iter(self._open.values())).session
                raise Busy(f'A goal in session {other!r} is generating: cancel it, or send this '
                           'goal with on_busy WAIT or PREEMPT.')
            if len(self._open) >= MAX_GOALS:
                raise Capacity(f'{MAX_GOALS} goals wait already: wait for some to end, or cancel '
                               'them all with ~/cancel_all.')
            # Queued under the lock, so that the order here is the worker's.
            goal.future = worker.generate(
                request, on_piece=partial(self._piece, goal, worker), control=goal.control)
            self._open[bytes(goal.id.uuid)] = goal
        if timeout > 0:
            goal.deadline = self._alarms.at(goal.accepted + timeout, partial(
                self.end, goal, FinishReason.TIMEOUT, DeadlineExceeded(
                    f'The goal did not end within its {timeout:g} s, queue included: give it a '
                    'longer timeout or fewer max_tokens.')))
        # Outside the lock: a future that is done already calls back at once.
        goal.future.add_done_callback(partial(self._finished, goal))
        self._changed()

    def refuse(self, goal: Goal, error: BaseException) -> None:
        """End a goal that never got to the worker."""
        with self._lock:
            if goal.ended:
                return
            goal.ended = True
        self._close(goal, error, _REASONS.get(getattr(error, 'code', ''), Token.ERROR), None)

    def end(self, goal: Goal, reason: FinishReason, why: FlashrtError) -> None:
        """
        Let a goal end: at once where it waits, at its next boundary where it runs. Idempotent.

        :param reason: CANCELED, PREEMPTED or TIMEOUT.
        :param why: the code and sentence of its result.
        """
        with self._lock:
            if goal.ended or goal.why is not None:
                return
            goal.why = why
            control, future = goal.control, goal.future
        if control is not None:
            control.cancel(reason)
        if future is not None:
            future.cancel()  # only what still waits; its callback ends the goal

    def cancel(self, goal: Goal) -> None:
        """Let a goal end because a client of the action asked for it."""
        goal.canceled_by_client = True
        self.end(goal, FinishReason.CANCELED, Canceled('The goal was canceled by a client.'))

    def open(self) -> None:
        """Take goals."""
        with self._lock:
            self._refusal = None

    def close(self, why: FlashrtError) -> None:
        """Let all open goals end and refuse those that come, until `open`."""
        with self._lock:
            self._refusal = why
        self.cancel_all(why)

    def cancel_all(self, why: FlashrtError | None = None) -> int:
        """Let all open goals end; return how many were told to."""
        with self._lock:
            self._canceled_at = time.monotonic()
            goals = [goal for goal in self._open.values() if goal.why is None]
        # Backwards, so that no waiting goal gets its turn while its elders end.
        for goal in reversed(goals):
            self.end(goal, FinishReason.CANCELED,
                     why or Canceled(_ALL_CANCELED))
        return len(goals)

    def preempt(self, session: str) -> None:
        """Let the goals of a session end because another request takes it over."""
        with self._lock:
            goals = [goal for goal in self._open.values() if goal.session == session]
        for goal in reversed(goals):
            self.end(goal, FinishReason.PREEMPTED, Preempted(
                f'Another request took session {session!r} over.'))

    def fail_running(self, error: DeviceFault) -> Goal | None:
        """End the goal that runs without waiting for the worker, which hangs; return it."""
        with self._lock:
            running = next((g for g in self._open.values()
                            if g.future is not None and g.future.running() and not g.ended), None)
            if running is None:
                return None
            running.why = running.why or error
            running.ended = True
            if running.control is not None:
                running.control.cancel()
        self._close(running, error, Token.ERROR, None)
        return running

    def last_sign(self) -> float:
        """Return the steady time at which the running goal last looked whether to stop."""
        with self._lock:
            return max((goal.control.read for goal in self._open.values()
                        if goal.control is not None), default=0.0)

    def is_busy(self, session: str) -> bool:
        """Tell whether a session has a goal that was not told to end."""
        with self._lock:
            return any(goal.session == session and goal.why is None
                       for goal in self._open.values())

    def busy_sessions(self) -> set[str]:
        """Return the sessions that have open goals."""
        with self._lock:
            return {goal.session for goal in self._open.values()}

    def waiting(self) -> int:
        """Return how many goals wait for their turn."""
        with self._lock:
            return sum(1 for goal in self._open.values()
                       if goal.future is not None and not goal.future.running()
                       and not goal.future.done())

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def when_idle(self, session: str, reply: Reply[None]) -> None:
        """Answer `reply` as soon as a session has no open goal."""
        with self._lock:
            if any(goal.session == session for goal in self._open.values()):
                self._waiters.append((session, reply))
                return
        reply.set()

    def wait_empty(self, timeout: float) -> bool:
        """Block until no goal is open; return whether that came in time."""
        deadline = time.monotonic() + timeout
        with self._lock:
            while self._open:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
        return True

    def _piece(self, goal: Goal, worker: Worker, piece: Piece) -> None:
        """Take tokens from the worker, on its thread: count and queue, nothing else."""
        if goal.ended:
            return
        if not goal.epoch:
            goal.epoch = worker.engine.session(goal.session).epoch  # after the restore it asked for
        self._statistics.piece(goal.id, len(piece.token_ids))
        self._outbox.put_piece(goal, piece)

    def _finished(self, goal: Goal, future: WorkerFuture) -> None:
        """Take the outcome, on the worker thread or on that of whoever canceled a waiting goal."""
        with self._lock:
            if goal.ended:
                return
            goal.ended = True
        if future.cancelled():
            why = goal.why or NotActive('The node stopped serving before the goal had its turn.')
            self._close(goal, why, _REASONS.get(why.code, Token.CANCELED), None)
            return
        error = future.exception()
        if error is not None:
            self._close(goal, error, Token.ERROR, None)
            return
        generation = future.result()
        reason = convert.finish_reason(generation.finish_reason)
        if reason in (Token.STOP, Token.LENGTH):
            self._close(goal, None, reason, generation)
        elif goal.why is not None:
            self._close(goal, goal.why, reason, generation)
        else:
            why = {
                Token.TIMEOUT: DeadlineExceeded(
                    'The goal did not end within its timeout, queue included.'),
                Token.PREEMPTED: Preempted('Another request took the session over.'),
            }.get(reason) or NotActive('The node stopped serving.')
            self._close(goal, why, reason, generation)

    def _close(self, goal: Goal, error: BaseException | None, reason: int,
               generation: Generation | None) -> None:
        goal.deadline.cancel()
        goal.error, goal.reason, goal.generation = error, reason, generation
        if generation is None and goal.worker is not None:
            goal.place = goal.worker.place(goal.session)
        self._statistics.end(error, generation)
        # The session is free now; the result follows its last message.
        with self._lock:
            self._open.pop(bytes(goal.id.uuid), None)
            busy = {other.session for other in self._open.values()}
            ready = [reply for session, reply in self._waiters if session not in busy]
            self._waiters = [w for w in self._waiters if w[0] in busy]
            if not self._open:
                self._idle.notify_all()
        for reply in ready:
            reply.set()
        self._outbox.put_end(goal, partial(goal.on_end, goal))
        self._changed()
