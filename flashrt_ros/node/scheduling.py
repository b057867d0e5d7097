"""
How the system schedules the threads of this process, from `configure` to `cleanup`.

The names are those of ros2_control's controller_manager. There one thread in C++ is preferred;
here all threads share the interpreter with the one that computes, and one that holds it and is
kept from its core by other programs keeps the computing one waiting. So all are preferred, and
those that only take and send go first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
import os
import resource
import threading

from flashrt_ros.errors import InvalidArgument

HIGHEST = 98  # of thread_priority: the other threads have one more, and 99 is the system's most
_HOW = ('allow it with `rtprio` in /etc/security/limits.conf (and log in again), LimitRTPRIO= in a '
        'systemd unit, or `--cap-add SYS_NICE` and `--ulimit rtprio=99` of a container')


class Scheduling:
    """
    Priority and cores of the threads of this process.

    :param priority: of the thread that computes, SCHED_FIFO; the others get one more. 0 leaves
        all as they are.
    :param cores: that the threads may use; none leaves it as it is.
    :raises InvalidArgument: this machine lets the process have none of them, or not all.
    """

    def __init__(self, priority: int = 0, cores: Iterable[int] = ()) -> None:
        self._priority = priority
        self._cores = frozenset(cores)
        self._before: list[Callable[[int], None]] = []  # how to put a thread back
        self.refused = ''  # a sentence, where the system did not grant the priority
        if self._cores:
            self._check_cores()

    def apply(self, computing: int) -> None:
        """
        Schedule all threads of the process; what they start later inherits it.

        A priority that the system does not grant is told in `refused` and leaves the threads as
        they are: a node that answers late is better than none, as ros2_control has it too.

        :param computing: id that the system gave the thread that computes.
        """
        if self._cores:
            mask = os.sched_getaffinity(os.getpid())
            self._before.append(lambda thread: os.sched_setaffinity(thread, mask))
            _everywhere(lambda thread: os.sched_setaffinity(thread, self._cores))
        if not self._priority:
            return
        policy, param = os.sched_getscheduler(os.getpid()), os.sched_getparam(os.getpid())
        self._before.append(lambda thread: os.sched_setscheduler(thread, policy, param))
        try:
            _everywhere(lambda thread: os.sched_setscheduler(
                thread, os.SCHED_FIFO,
                os.sched_param(self._priority + (thread != computing))))
        except OSError as error:
            _everywhere(self._before.pop())
            self.refused = (
                f'thread_priority {self._priority} was not granted, which needs {self._priority} '
                f'and {self._priority + 1} ({error.strerror}), and the threads stay as they were: '
                f'{_HOW}; or set thread_priority to 0. `flashrt-ros doctor` tells the limit.')

    def undo(self) -> None:
        """Put the threads back to where they were. Never raises."""
        while self._before:
            with suppress(OSError):
                _everywhere(self._before.pop())

    def _check_cores(self) -> None:
        """See that the system grants all of the cores, by asking it; on the calling thread."""
        before = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, self._cores)
            granted = os.sched_getaffinity(0)
        except (OSError, ValueError, OverflowError):
            granted = set()
        finally:
            os.sched_setaffinity(0, before)
        if granted != self._cores:
            names = ', '.join(map(str, sorted(self._cores - granted)))
            there = ', '.join(map(str, sorted(available_cores())))
            raise InvalidArgument(f'cpu_affinity names core {names}, which this process cannot '
                                  f'have: name some of {there}, or -1 to leave it to the system.')


def available_cores() -> set[int]:
    """Return the cores that this process may ask for, which a container may have limited."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, range(os.sysconf('SC_NPROCESSORS_CONF')))
        return os.sched_getaffinity(0)
    except OSError:
        return before
    finally:
        os.sched_setaffinity(0, before)


def granted_priority() -> int:
    """Return the highest priority of SCHED_FIFO that the system grants, by asking it; 0: none."""
    found: list[int] = []

    def ask() -> None:
        limit = resource.getrlimit(resource.RLIMIT_RTPRIO)[0]
        for priority in (99, limit):
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
                found.append(priority)
                return
    thread = threading.Thread(target=ask)  # what it is granted ends with it
    thread.start()
    thread.join()
    return found[0] if found else 0


def describe(thread: int) -> str:
    """Say how a thread is scheduled, as the system tells it."""
    try:
        policy = {os.SCHED_FIFO: 'SCHED_FIFO', os.SCHED_RR: 'SCHED_RR'}.get(
            os.sched_getscheduler(thread), 'SCHED_OTHER')
        priority = os.sched_getparam(thread).sched_priority
        cores = ','.join(map(str, sorted(os.sched_getaffinity(thread))))
        nice = os.getpriority(os.PRIO_PROCESS, thread)
    except OSError:
        return 'gone'
    return f'{policy} {priority or f"nice {nice}"}, cores {cores}'


def _everywhere(change: Callable[[int], None]) -> None:
    """Change all threads of this process, those too that are started meanwhile."""
    done: set[int] = set()
    while new := [thread for thread in _threads() if thread not in done]:
        for thread in new:
            done.add(thread)
            with suppress(ProcessLookupError):  # it has ended
                change(thread)


def _threads() -> Iterator[int]:
    return (int(name) for name in os.listdir('/proc/self/task'))
