"""A call through the worker answers once: with what came out, in time, or with why not."""

from concurrent.futures import Future as WorkerFuture
import threading
import time

import pytest

pytest.importorskip('rclpy')

from flashrt_ros.errors import DeviceFault  # noqa: E402
from flashrt_ros.node.alarms import Alarms  # noqa: E402
from flashrt_ros.node.desk import Reply  # noqa: E402
from flashrt_ros.node.jobs import Job  # noqa: E402

GRACE = 0.2  # seconds without a sign of life


class Worker:
    """Runs a call in a thread; tells what the real one tells of its progress."""

    def __init__(self):
        self.last_progress = 0.0

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


def outcome(alarms, work):
    """Run work whose deadline passes as it begins; return what was answered."""
    worker, reply, answered = Worker(), Reply(), threading.Event()
    reply.then(answered.set)

    def function(_):
        time.sleep(0.05)
        return work(worker)
    Job(worker, function, at_boundary=False, session=None, deadline=time.monotonic() + 0.02,
        grace=GRACE, alarms=alarms, reply=reply)
    assert answered.wait(20)
    return reply._outcome


def test_a_call_that_makes_progress_is_waited_for(alarms):
    """Such as a rollback with a long replay."""
    def work(worker):
        for _ in range(12):
            worker.last_progress = time.monotonic()
            time.sleep(GRACE / 4)
        return 'done'
    assert outcome(alarms, work) == ('done', None)


def test_a_call_that_hangs_is_told_as_a_fault_of_the_device(alarms):
    ended = threading.Event()
    value, error = outcome(alarms, lambda worker: ended.wait(20))
    ended.set()
    assert value is None and isinstance(error, DeviceFault)
