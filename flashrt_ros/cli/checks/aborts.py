"""
Faults on a device, where no operator of torch stands between two kernels.

Two seams: a launch of a kernel raises what a failing driver would raise, while the plan launches
its kernels one after another; and the replay of a graph raises an exception of the host, before it
is queued or behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TYPE_CHECKING

from flashrt_ros.cli.checks import state
from flashrt_ros.cli.checks.base import InjectedError
from flashrt_ros.errors import DeviceFault, FlashrtError

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine


class HostError(Exception):
    """An exception of the host, not of the device; nothing else raises it."""


class Counter:
    """Counts what passes a seam, and raises in place of number ``number`` or behind it."""

    def __init__(self, number: int = -1, error: type[Exception] = InjectedError,
                 behind: bool = False) -> None:
        self.number, self.error, self.behind, self.count = number, error, behind, 0

    def __call__(self, work: Callable[[], None]) -> None:
        """Do the work, or raise."""
        self.count += 1
        hit = self.count == self.number
        if hit and not self.behind:
            raise self.error(f'injected in place of number {self.number}')
        work()
        if hit:
            raise self.error(f'injected behind number {self.number}')


@contextmanager
def launches(plan: Any, counter: Counter) -> Iterator[Counter]:
    """Let every launch pass the counter; the plan launches its kernels one by one meanwhile."""
    launch: Any = type(plan._sample)
    usual, eager = launch.__call__, plan.eager

    def call(self: Any) -> None:
        counter(lambda: usual(self))

    launch.__call__ = call
    plan.eager = True
    try:
        yield counter
    finally:
        launch.__call__, plan.eager = usual, eager


@contextmanager
def replays(plan: Any, counter: Counter) -> Iterator[Counter]:
    """Let every replay of a graph pass the counter."""
    usual = plan._go
    plan._go = lambda name: counter(lambda: usual(name))
    try:
        yield counter
    finally:
        del plan._go  # the method of the class again


class Outcome:
    """What a row of faults did to the live state."""

    def __init__(self) -> None:
        self.places = self.faults = self.wrong = self.refused = 0

    @property
    def words(self) -> str:
        """What kinds of faults there were."""
        return (f'in place of a launch of a kernel ({self.refused}, after which the state refused '
                'to go on until it was restored) or around the replay of a graph')


def inject(engine: Engine, works: list[Callable[[], Any]], want: state.Snapshot) -> Outcome:
    """
    Fail in ``works`` at many places, from the boundary of capsule ``before`` on.

    After a fault of the host the state is whole and goes on; after one of the device no byte has
    changed, the state refuses to go on, and a restore makes it usable again.
    """
    plan: Any = engine.plan
    outcome = Outcome()

    def fail(seam: Any, work: Callable[[], Any], counter: Counter) -> None:
        outcome.places += 1
        try:
            with seam(plan, counter):
                work()
        except FlashrtError:
            outcome.faults += 1
        changed = state.differing(want, state.snapshot(engine.arena))
        outcome.wrong += changed
        if counter.error is HostError:
            outcome.wrong += not engine.arena.valid
            if changed:
                engine.restore(capsule='before')  # the next fault has a finding of its own
            return
        try:
            engine.append(token_ids=[1])
            outcome.wrong += 1  # the device is lost, and it went on
        except DeviceFault:
            outcome.refused += 1
        engine.restore(capsule='before')
        outcome.wrong += state.differing(want, state.snapshot(engine.arena))

    for work in works:
        with launches(plan, Counter()) as counted:
            work()
        engine.restore(capsule='before')
        for number in (1, *(counted.count * part // 8 for part in range(1, 8))):
            fail(launches, work, Counter(number))
        with replays(plan, Counter()) as counted:
            work()
        engine.restore(capsule='before')
        for number in {1, counted.count}:
            for behind in (False, True):
                fail(replays, work, Counter(number, HostError, behind))
        work()  # the plan is not out of step with its device
        engine.restore(capsule='before')
        outcome.wrong += state.differing(want, state.snapshot(engine.arena))
    return outcome
