"""A call through the worker answers once: with what came out, in time, or with why not."""

from concurrent.futures import Future as WorkerFuture
from pathlib import Path
import sys
import threading
import time

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from node_cases import until, WAIT  # noqa: E402

from flashrt_ros.errors import DeviceFault  # noqa: E402
from flashrt_ros.node.alarms import Alarms  # noqa: E402
from flashrt_ros.node.desk import Reply  # noqa: E402
from flashrt_ros.node.jobs import Job  # noqa: E402

GRACE = 0.05  # seconds without a sign of life


class Worker:
    """Runs a call in a thread; tells what the real one tells of its progress."""

    def __init__(self, last_progress):
        self.last_progress = last_progress

    def call(self, function, **_):
        future = WorkerFuture()

        def run():
            future.set_result(function(None))
        threading.Thread(target=run).start()
        return future


@pytest.fixture
def alarms():
    errors = []
    alarms = Alarms(errors.append)
    yield alarms
    alarms.close()
    assert not errors


def late(alarms, work, last_progress):
    """Return a job and its reply, once work began and its deadline passed."""
    reply, began = Reply(), threading.Event()

    def function(_):
        began.set()
        return work()
    job = Job(Worker(last_progress), function, at_boundary=False, session=None,
              deadline=time.monotonic() + 600, grace=GRACE, alarms=alarms, reply=reply)
    assert began.wait(WAIT)
    job._alarm.cancel()
    job._expire()
    return job, reply


def test_a_call_that_makes_progress_is_waited_for(alarms):
    """Such as a rollback with a long replay."""
    go_on = threading.Event()
    job, reply = late(alarms, lambda: go_on.wait(WAIT) and 'done', time.monotonic() + 600)
    for _ in range(3):
        job._hang()
        assert not reply.is_set
    go_on.set()
    until(lambda: reply.is_set)
    assert reply._outcome == ('done', None)


def test_a_call_that_hangs_is_told_as_a_fault_of_the_device(alarms):
    ended = threading.Event()
    _, reply = late(alarms, lambda: ended.wait(WAIT), 0.0)
    until(lambda: reply.is_set)
    ended.set()
    value, error = reply._outcome
    assert value is None and isinstance(error, DeviceFault)
