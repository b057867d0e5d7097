"""The thread that publishes takes the interpreter from the worker as seldom as it can."""

from pathlib import Path
import sys
import threading
import time
import types

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from builtin_interfaces.msg import Time  # noqa: E402
from node_cases import Peer, until  # noqa: E402
from unique_identifier_msgs.msg import UUID  # noqa: E402

from flashrt_ros.msg import Token  # noqa: E402
from flashrt_ros.node import convert  # noqa: E402
from flashrt_ros.node.goals import Goal  # noqa: E402
from flashrt_ros.node.publishers import Outbox  # noqa: E402
from flashrt_ros.session import Piece  # noqa: E402


def piece(index):
    return Piece(text='a', token_ids=(index,), index=index, position=index + 1, epoch=1)


@pytest.fixture
def outbox():
    peer = Peer()
    rate = {'stream.max_rate_hz': 2.0, 'stream.depth': 256}
    failures = []
    box = Outbox(peer.node, rate, failures.append)
    heard = []
    peer.node.create_subscription(Token, f'/{peer.node.get_name()}/tokens', heard.append, 256)
    until(lambda: box._tokens.get_subscription_count())
    yield types.SimpleNamespace(box=box, heard=heard)
    box.close()
    peer.close()
    assert not failures


def wakes(name):
    """Return how often a thread of this process went to sleep, and so was woken."""
    thread = next(one for one in threading.enumerate() if one.name == name).native_id
    status = Path(f'/proc/self/task/{thread}/status').read_text()
    return int(status.split('voluntary_ctxt_switches:')[1].split()[0])


def test_a_token_within_the_rate_limit_wakes_nobody(outbox):
    heard = outbox.heard
    goal = Goal(UUID(), None, lambda _: None, time.monotonic())
    outbox.box.put_piece(goal, piece(0))
    until(lambda: heard)  # the next message may go half a second later
    outbox.box.put_piece(goal, piece(1))
    time.sleep(0.02)  # it waits for the limit now
    before = wakes('flashrt-outbox')
    for index in range(2, 100):
        outbox.box.put_piece(goal, piece(index))
        time.sleep(0.001)
    if len(heard) == 1:  # else the machine was so slow that the next message was due
        assert wakes('flashrt-outbox') - before < 30
    until(lambda: len(heard) > 1)
    until(lambda: sum(len(message.token_ids) for message in heard) == 100)
    assert [token for message in heard for token in message.token_ids] == list(range(100))
    assert ''.join(message.text for message in heard) == 'a' * 100


def test_what_is_no_token_does_not_wait_for_the_rate_limit(outbox):
    heard = outbox.heard
    goal = Goal(UUID(), None, lambda _: None, time.monotonic())
    outbox.box.put_piece(goal, piece(0))
    until(lambda: heard)
    goal.last_sent = time.monotonic() + 60.0
    outbox.box.put_piece(goal, piece(1))
    time.sleep(0.02)
    ended = threading.Event()
    outbox.box.put_end(goal, ended.set)
    assert ended.wait(10.0)
    until(lambda: len(heard) == 2)
    assert list(heard[1].token_ids) == [1]


def test_a_message_that_is_filled_anew_holds_nothing_old():
    def fill(into, **fields):
        return convert.token(Time(sec=fields['epoch']), fields['session'], fields['goal'],
                             epoch=fields['epoch'], seq=fields['epoch'], index=fields['epoch'],
                             position=fields['epoch'], words=fields['words'], ids=fields['ids'],
                             finish=fields['finish'], into=into)
    one = {'epoch': 7, 'session': 'a', 'goal': UUID(uuid=[1] * 16), 'words': 'long words',
           'ids': [1, 2, 3], 'finish': Token.STOP}
    two = {'epoch': 1, 'session': 'b', 'goal': UUID(uuid=[2] * 16), 'words': '', 'ids': [],
           'finish': Token.RUNNING}
    message = fill(None, **one)
    fresh = fill(None, **two)
    for field in Token.get_fields_and_field_types():
        assert getattr(message, field) != getattr(fresh, field), field
    assert fill(message, **two) is message and message == fresh
