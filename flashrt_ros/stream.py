"""
A goal as its client sees it: tokens on their way, the result, and the errors that answers carry.

Part of :mod:`flashrt_ros.client`, which is what to import.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
import threading
import time
from typing import Any, TYPE_CHECKING
import uuid

from action_msgs.msg import GoalStatus
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rclpy.task import Future
from std_srvs.srv import Trigger
from unique_identifier_msgs.msg import UUID

from flashrt_ros.action import Generate
from flashrt_ros.errors import BY_CODE, FlashrtError, Internal
from flashrt_ros.msg import ErrorCode, Token

#: Of requests and answers, on both sides. With the usual depth of 10 a burst loses what is beyond.
CALLS_QOS = QoSProfile(
    history=HistoryPolicy.KEEP_LAST, depth=256, reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.VOLATILE)
ACTION_QOS = {f'{name}_service_qos_profile': CALLS_QOS for name in ('goal', 'result', 'cancel')}

if TYPE_CHECKING:
    from flashrt_ros.client import FlashrtClient

_CODES = {getattr(ErrorCode, name): error for name, error in BY_CODE.items()}
_LAST_WORD = 0.5  # seconds after the result that a token on its way is waited for


def error_of(response: Any) -> FlashrtError | None:
    """
    Return the typed error that a response or result carries, None for success.

    The error's attribute ``response`` holds what it was made from: a cancelled goal's text, say.
    """
    if isinstance(response, Trigger.Response):
        if response.success:
            return None
        name, _, words = response.message.partition(': ')
        error = BY_CODE.get(name, Internal)(words or response.message)
    elif response.error_code == ErrorCode.NONE:
        return None
    else:
        error = _CODES.get(response.error_code, Internal)(response.error_msg)
    error.response = response  # type: ignore[attr-defined]
    return error


class Stream:
    """
    A goal on its way: iterate for its tokens, ask for its result.

    :ivar tokens: the Token messages so far; a gap in ``seq`` means that some were lost on the way,
        the result is whole. What has not come half a second after the result, an iteration makes
        up for from the result, as one last message.
    :ivar made_up: whether that was so.
    """

    def __init__(self, client: FlashrtClient, goal: Generate.Goal,
                 on_token: Callable[[Token], None] | None) -> None:
        self._client = client
        self._on_token = on_token
        self._fresh: deque[Token] = deque()
        self._arrived = threading.Event()
        self._taking = threading.Lock()
        self.made_up = False
        self._cancel_wanted = False
        self.tokens: list[Token] = []
        self.handle: Any = None
        self.status = GoalStatus.STATUS_UNKNOWN
        self.done: Future = Future()  # of Generate.Result
        self._done_at = 0.0
        self._id = UUID(uuid=list(uuid.uuid4().bytes))
        client.streams[bytes(self._id.uuid)] = self
        client.action.send_goal_async(goal, goal_uuid=self._id).add_done_callback(self._accepted)

    def __iter__(self) -> Iterator[Token]:
        """
        Yield Token messages as they come, until the goal has ended.

        All of its tokens come, but for those of a gap in ``seq``.

        :raises NotActive: the node went away.
        """
        while True:
            self._client.wait_for(
                lambda: bool(self._fresh) or (self.done.done() and self._complete()), None,
                self._arrived,
                self._client.action.server_is_ready, 'the stream')
            while self._fresh:
                yield self._fresh.popleft()
            if self.done.done() and not self._fresh and self._complete():
                self._make_up()
                while self._fresh:
                    yield self._fresh.popleft()
                return

    def _whole(self) -> bool:
        return bool(self.tokens) and self.tokens[-1].finish_reason != Token.RUNNING

    def _complete(self) -> bool:
        """
        Tell whether the last message is here, or is not worth waiting for any longer.

        Tokens come by a topic and the result by a service, and DDS keeps no order between them.
        """
        return self._whole() or time.monotonic() - self._done_at > _LAST_WORD

    def _make_up(self) -> None:
        """Take what is late from the result; it is ignored when it comes after all."""
        result: Any = self.done.result()
        with self._taking:
            if self._whole() or result.finish_reason == Token.RUNNING:  # or it never was accepted
                return
            self.made_up = True
            last = self.tokens[-1] if self.tokens else Token(session='', seq=0)
            index = last.index + len(last.token_ids)
            heard = sum(len(token.token_ids) for token in self.tokens)
            # Where messages were lost before, nobody can say where in the text the heard one ends.
            text = result.text[len(self.text()):] if heard == index else ''
            token = Token(
                stamp=last.stamp, session=last.session, goal_id=self._id, epoch=result.epoch,
                seq=last.seq + bool(self.tokens), index=index, position=result.position, text=text,
                token_ids=result.token_ids[index:], finish_reason=result.finish_reason)
            self._append(token)

    def result(self, timeout: float | None = None, check: bool = True) -> Generate.Result:
        """
        Wait for the result.

        :param check: raise the typed error of a code; False returns the result as it is.
        :raises FlashrtError: by the code; DeadlineExceeded where the wait ran out.
        """
        self._client.wait_for(self.done.done, timeout, self._arrived,
                              self._client.action.server_is_ready, 'the result')
        result: Generate.Result = self.done.result()  # type: ignore[assignment]
        error = error_of(result)
        if check and error is not None:
            raise error
        return result

    def cancel(self) -> None:
        """Ask for the cancel; `result` tells when it has happened. Also before acceptance."""
        self._cancel_wanted = True
        if self.handle is not None:
            self.handle.cancel_goal_async()

    def text(self) -> str:
        """Return the text of the tokens that arrived."""
        return ''.join(token.text for token in self.tokens)

    def take(self, token: Token) -> None:
        """Take a message of the stream, on the thread that spins."""
        with self._taking:
            if not self.made_up:
                self._append(token)

    def _append(self, token: Token) -> None:
        self.tokens.append(token)
        self._fresh.append(token)
        self._arrived.set()
        if self._on_token is not None:
            self._on_token(token)

    def _accepted(self, future: Future) -> None:
        self.handle = future.result()
        if self.handle is None or not self.handle.accepted:
            self._finish(Generate.Result(
                error_code=ErrorCode.GOAL_REJECTED, error_msg='The node rejected the goal.'))
            return
        if self._cancel_wanted:
            self.handle.cancel_goal_async()
        self.handle.get_result_async().add_done_callback(self._resulted)

    def _resulted(self, future: Future) -> None:
        response: Any = future.result()
        self.status = response.status
        self._finish(response.result)

    def _finish(self, result: Generate.Result) -> None:
        self._done_at = time.monotonic()
        self.done.set_result(result)
        self._arrived.set()
