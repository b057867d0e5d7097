"""A client of the action hears every token once, in order, by however many threads it is spun."""

from collections import deque
import threading
import time

import pytest

pytest.importorskip('rclpy')

from rclpy.task import Future  # noqa: E402

from flashrt_ros.goal_client import GoalClient  # noqa: E402


def run(coroutine):
    """Run what awaits nothing that is not there, as an executor does."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


@pytest.fixture
def client():
    """Return one without a node: what it took is put in by hand."""
    client = GoalClient.__new__(GoalClient)
    client._heard, client._hearing = deque(), threading.Lock()
    return client


def test_who_is_at_it_takes_along_what_others_took(client):
    heard, at_it, go_on = [], threading.Event(), threading.Event()

    def hear(message):
        heard.append(message)
        at_it.set()
        assert go_on.wait(20.0)
    client._hear = hear
    client._heard.append('first')
    thread = threading.Thread(target=lambda: run(client.execute({})))
    thread.start()
    assert at_it.wait(20.0)
    client._heard.append('second')
    began = time.monotonic()
    run(client.execute({}))  # does not wait for the first, and does not overtake it
    assert heard == ['first'] and time.monotonic() - began < 10.0
    go_on.set()
    thread.join(20.0)
    assert heard == ['first', 'second']


def test_a_listener_that_fails_stops_nobody(client):
    heard = []

    def hear(message):
        if not heard:
            heard.append('failed')
            raise KeyError(message)
        heard.append(message)
    client._hear = hear
    client._heard.extend(['first', 'second'])
    with pytest.raises(KeyError):
        client.execute({}).send(None)
    run(client.execute({}))
    assert heard == ['failed', 'second']


def test_a_listener_that_fails_loses_no_answer(client):
    """A result that was taken together with the token would be waited for in vain."""
    answer = Future()

    def hear(message):
        raise KeyError(message)
    client._hear = hear
    client._heard.append('last')
    client._pending_result_requests = {7: answer}
    with pytest.raises(KeyError):
        client.execute({'result': (7, 'the result')}).send(None)
    assert answer.result() == 'the result'
