"""Follow what a session says, whoever asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
import time
from typing import Any

from py_trees.common import ClearingPolicy, Status
from rclpy.qos import QoSProfile, ReliabilityPolicy

from flashrt_ros.behaviours.binding import Bound
from flashrt_ros.behaviours.connection import DEFAULT_SESSION
from flashrt_ros.behaviours.generate import end_of
from flashrt_ros.msg import Token

_KEPT = 4096  # messages between two ticks; beyond that the oldest are lost


@dataclass
class Spoken:
    """
    What was heard of one goal.

    Attributes:
        text: so far; only whole characters
        token_ids: so far
        position: of the session after the last token
        epoch: of the session
        goal_id: the goal that is answered
        finish_reason: a constant of Token; RUNNING while more follows
        complete: no message of the goal was missed
    """

    text: str = ''
    token_ids: list[int] = field(default_factory=list)
    position: int = 0
    epoch: int = 0
    goal_id: bytes = b''
    finish_reason: int = Token.RUNNING
    complete: bool = True
    seq: int = 0

    def add(self, token: Token) -> None:
        """Take the next message."""
        self.complete = self.complete and token.seq == self.seq
        self.seq = token.seq + 1
        self.text += token.text
        self.token_ids.extend(token.token_ids)
        self.position, self.epoch = token.position, token.epoch
        self.goal_id = bytes(token.goal_id.uuid)
        self.finish_reason = token.finish_reason


class ReadTokens(Bound):
    r"""
    Read the stream of a session from ``~/tokens``: of a goal of this tree or of anyone's.

    * :data:`~py_trees.common.Status.RUNNING`: nothing was said yet, or more follows
    * :data:`~py_trees.common.Status.SUCCESS`: the goal that was heard first has ended with STOP or
      LENGTH, or `until` is content with the text so far
    * :data:`~py_trees.common.Status.FAILURE`: it ended otherwise, or nothing came for `timeout`
      seconds

    A :class:`Spoken` is the blackboard variable ``key``, renewed each tick. Topics may lose
    messages (``complete`` tells); the result of :class:`~flashrt_ros.behaviours.Generate` is whole.
    An interruption changes nothing in the node.

    Example::

        ReadTokens('First skill call', until=lambda text: '\n' in text, timeout=5.0)

    Args:
        name: the behaviour's name
        session: to listen to, '' for the default one
        until: SUCCESS as soon as this is true of the text
        timeout: seconds without a message; 0 waits forever
        clearing_policy: ON_INITIALISE hears only what is said from the start of the behaviour on;
            NEVER also what was said between two runs of it
        key: blackboard variable for the :class:`Spoken`
        server: full name of the flashrt node
    """

    def __init__(self, name: str, *, session: str = '',
                 until: Callable[[str], bool] | None = None, timeout: float = 0.0,
                 clearing_policy: ClearingPolicy = ClearingPolicy.ON_INITIALISE,
                 key: str = 'spoken', server: str = '/flashrt') -> None:
        super().__init__(name)
        self.bind(server, session, key)
        self.until = until
        self.timeout = timeout
        self.clearing_policy = clearing_policy
        self._fresh: deque[Token] = deque(maxlen=_KEPT)
        self._subscription: Any = None
        self._spoken = Spoken()
        self._last = 0.0

    def setup(self, **kwargs: Any) -> None:
        """Connect and subscribe."""
        self.shutdown()
        super().setup(**kwargs)
        self._subscription = self.connection.node.create_subscription(
            Token, f'{self.server.rstrip("/")}/tokens', self._take,
            QoSProfile(depth=256, reliability=ReliabilityPolicy.RELIABLE))

    def shutdown(self) -> None:
        """Unsubscribe."""
        if self._subscription is not None:
            self.connection.node.destroy_subscription(self._subscription)
            self._subscription = None

    def _take(self, token: Token) -> None:
        self._fresh.append(token)

    def initialise(self) -> None:
        """Begin to listen."""
        if self.clearing_policy != ClearingPolicy.NEVER:
            self._fresh.clear()
        self._spoken = Spoken()
        self._last = time.monotonic()
        self.write(None)

    def update(self) -> Status:
        """Take what has come."""
        session = self.present_session() or DEFAULT_SESSION
        while self._fresh and self._spoken.finish_reason == Token.RUNNING:
            token = self._fresh.popleft()
            mine = not self._spoken.goal_id or self._spoken.goal_id == bytes(token.goal_id.uuid)
            if token.session == session and mine:
                self._spoken.add(token)
                self._last = time.monotonic()
                if self.until is not None and self.until(self._spoken.text):
                    break
        self.write(self._spoken)
        self.feedback_message = end_of(self._spoken.text)
        if self.until is not None and self.until(self._spoken.text):
            return Status.SUCCESS
        if self._spoken.finish_reason in (Token.STOP, Token.LENGTH):
            return Status.SUCCESS
        if self._spoken.finish_reason != Token.RUNNING:
            return Status.FAILURE
        if self.timeout and time.monotonic() - self._last > self.timeout:
            self.feedback_message = f'nothing came for {self.timeout:g} s'
            return Status.FAILURE
        return Status.RUNNING
