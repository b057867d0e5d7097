"""Deadlines on the steady clock: one thread that calls functions at their time."""

from __future__ import annotations

from collections.abc import Callable
import heapq
import itertools
import threading
import time


class Alarm:
    """One planned call; `cancel` makes it never happen, unless it is just happening."""

    __slots__ = ('when', 'function')

    def __init__(self, when: float, function: Callable[[], None] | None) -> None:
        self.when = when
        self.function = function

    def cancel(self) -> None:
        """Drop the call. Idempotent, from any thread."""
        self.function = None


class Alarms:
    """
    Calls functions at moments of ``time.monotonic()``, in one thread that sleeps in between.

    A paused simulation must not stop a timeout, so this is not a ROS timer; and a goal that waits
    costs no thread and no polling.

    :param on_error: told of an exception that a function let out.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._heap: list[tuple[float, int, Alarm]] = []
        self._count = itertools.count()
        self._condition = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name='flashrt-alarms')
        self._thread.start()

    def at(self, when: float, function: Callable[[], None]) -> Alarm:
        """Plan a call; the function must be quick and must not wait."""
        alarm = Alarm(when, function)
        with self._condition:
            heapq.heappush(self._heap, (when, next(self._count), alarm))
            if self._heap[0][2] is alarm:
                self._condition.notify()
        return alarm

    def every(self, period: float, function: Callable[[], None]) -> None:
        """Call again and again, until `close`."""
        def call() -> None:
            try:
                function()
            finally:
                if not self._closing:
                    self.at(time.monotonic() + period, call)
        self.at(time.monotonic() + period, call)

    def close(self) -> None:
        """Drop everything that is planned and end the thread."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._closing:
                    if not self._heap:
                        self._condition.wait()
                        continue
                    wait = self._heap[0][0] - time.monotonic()
                    if wait <= 0:
                        break
                    self._condition.wait(wait)
                if self._closing:
                    self._heap.clear()
                    return
                alarm = heapq.heappop(self._heap)[2]
            function, alarm.function = alarm.function, None
            if function is not None:
                try:
                    function()
                except Exception as error:
                    self._on_error(error)
