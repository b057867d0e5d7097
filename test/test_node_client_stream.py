"""The client against a server that is slow to tell: late tokens, first calls."""

from pathlib import Path
import sys
import threading
import time

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from lifecycle_msgs.srv import GetState  # noqa: E402
from node_cases import code_of, Peer, running, until, WAIT  # noqa: E402
from rclpy.action import ActionServer  # noqa: E402
from rclpy.callback_groups import ReentrantCallbackGroup  # noqa: E402

from flashrt_ros import srv  # noqa: E402
from flashrt_ros.action import Generate  # noqa: E402
from flashrt_ros.client import FlashrtClient  # noqa: E402
from flashrt_ros.msg import NodeState, Token  # noqa: E402

WORDS = ('the ', 'red ', 'cup')


class SlowServer:
    """
    An action of the same type that sends the tail of a stream long after the result.

    What a node on a busy machine does now and then by itself, done each time.
    """

    def __init__(self, peer: Peer, name: str, early: int, skipped: int = -1) -> None:
        self.late, self.calls, self.heard = [], [], threading.Semaphore(0)
        self.answers = threading.Event()
        self.answers.set()
        self._early, self._skipped = early, skipped
        node, group = peer.node, ReentrantCallbackGroup()
        self._node = node
        node.create_service(GetState, f'{name}/get_state', self._state, callback_group=group)
        node.create_service(srv.ListCapsules, f'{name}/list_capsules', self._list,
                            callback_group=group)
        self.action = ActionServer(node, Generate, f'{name}/generate',
                                   execute_callback=self._execute, callback_group=group)

    def _state(self, _, response):
        self.calls.append('get_state')
        self.answers.wait(WAIT)
        return response

    def _list(self, _, response):
        self.calls.append('list_capsules')
        return response

    def _execute(self, handle):
        for number in range(len(WORDS)):
            token = Token(session='s', goal_id=handle.goal_id, epoch=9, seq=number, index=number,
                          position=11 + number, text=WORDS[number], token_ids=[70 + number],
                          finish_reason=number == len(WORDS) - 1)
            if number == self._skipped:
                continue
            if number < self._early:
                handle.publish_feedback(Generate.Feedback(token=token))
                assert self.heard.acquire(timeout=WAIT)  # before the result, which may overtake it
            else:
                self.late.append(lambda t=token: handle.publish_feedback(
                    Generate.Feedback(token=t)))
        handle.succeed()
        return Generate.Result(
            finish_reason=Token.STOP, text=''.join(WORDS), token_ids=[70, 71, 72], epoch=9,
            position=13)


@pytest.fixture
def peer():
    peer = Peer('/slow')
    yield peer
    peer.close()


def listen(peer, early, skipped=-1):
    server = SlowServer(peer, '/slow', early, skipped)
    stream = peer.client.generate('x', on_token=lambda _: server.heard.release())
    heard = []
    for token in stream:
        heard.append(token)
    return server, stream, heard


@pytest.mark.parametrize('early', [0, 1, 2])
def test_a_late_tail_comes_from_the_result(peer, early):
    server, stream, heard = listen(peer, early)
    assert stream.made_up and heard == stream.tokens and len(heard) == early + 1
    assert [i for token in heard for i in token.token_ids] == [70, 71, 72]
    assert ''.join(token.text for token in heard) == stream.text() == 'the red cup'
    assert [token.seq for token in heard] == list(range(early + 1))
    last = heard[-1]
    assert (last.finish_reason, last.index, last.position, last.epoch) == (
        Token.STOP, early, 13, 9)
    for send in server.late:  # when they come after all, nothing comes twice
        send()
    time.sleep(0.5)
    assert stream.tokens == heard
    server.action.destroy()


def test_a_stream_that_is_whole_is_not_made_up(peer):
    server, stream, heard = listen(peer, len(WORDS))
    assert not stream.made_up and len(heard) == len(WORDS)
    server.action.destroy()


def test_a_gap_before_a_late_tail_leaves_the_ids_right(peer):
    server, stream, heard = listen(peer, 2, skipped=0)
    assert [(token.index, list(token.token_ids)) for token in heard] == [(1, [71]), (2, [72])]
    assert heard[-1].text == '', 'where the text goes on nobody can say'
    assert stream.result().text == 'the red cup'
    server.action.destroy()


def test_nothing_is_asked_before_the_node_knows_the_client():
    other = Peer('/elsewhere')
    server = SlowServer(other, '/slow', 0)
    server.answers.clear()
    peer = Peer('/slow')
    try:
        client = peer.client
        until(lambda: client.is_ready('list_capsules') or server.calls)
        assert not client.is_ready('list_capsules'), 'it asks, and does not wait'
        server.answers.set()
        assert client.list() == []
        assert server.calls[0] == 'get_state' and 'list_capsules' in server.calls
        assert client.is_ready('list_capsules') and client.is_ready()
        asked = []
        client._clients['get_state'].call_async = asked.append
        client.list()
        assert not asked, 'it asks once'
        del client._clients['get_state'].call_async
        assert not client.is_ready('save_capsule'), 'there is none'
        future = client.call_async('list_capsules', srv.ListCapsules.Request())
        client.forget('list_capsules', future)
        assert code_of(lambda: client.wait_until_ready(0.2, 'save_capsule')) == 'TIMEOUT'
    finally:
        peer.close()
        server.action.destroy()
        other.close()


def test_a_server_that_comes_back_is_greeted_again():
    peer = Peer('/slow')
    try:
        for _ in range(2):
            other = Peer('/elsewhere')
            other.node.create_publisher(NodeState, '/slow/state', 1)
            server = SlowServer(other, '/slow', 0)
            until(lambda: peer.client.is_ready())
            assert peer.client.list() == []
            assert server.calls[0] == 'get_state' and 'list_capsules' in server.calls
            server.action.destroy()
            other.close()
            until(lambda: not peer.client.is_ready())
    finally:
        peer.close()


def test_the_first_call_of_each_client_is_answered(tmp_path):
    with running(tmp_path) as (_, peer):
        for number in range(12):
            client = FlashrtClient(peer.node, timeout=WAIT)
            if number % 2:
                assert client.generate('go', max_tokens=1).result(WAIT).completion_tokens <= 1
            else:
                assert client.save(f'c{number}').error_code == 0
            client.destroy()
