"""Topics, and the thread that publishes: never the one that steps the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
import threading
import time
from typing import Any, TYPE_CHECKING

from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions
from std_msgs.msg import String

from flashrt_ros.msg import CapsuleList, NodeState, Token
from flashrt_ros.node import convert

if TYPE_CHECKING:
    from rclpy.node import Node

    from flashrt_ros.node.goals import Goal
    from flashrt_ros.session import Piece

TOKENS_QOS = QoSProfile(
    history=HistoryPolicy.KEEP_LAST, depth=256, reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.VOLATILE)
TEXT_QOS = QoSProfile(
    history=HistoryPolicy.KEEP_LAST, depth=10, reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.VOLATILE)
LATCHED_QOS = QoSProfile(
    history=HistoryPolicy.KEEP_LAST, depth=1, reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.TRANSIENT_LOCAL)


class _Piece:
    """Tokens of a goal on their way to the topic."""

    __slots__ = ('goal', 'piece')

    def __init__(self, goal: Goal, piece: Piece) -> None:
        self.goal = goal
        self.piece = piece


class _End:
    """The last word of a goal."""

    __slots__ = ('goal', 'then')

    def __init__(self, goal: Goal, then: Callable[[], None]) -> None:
        self.goal = goal
        self.then = then


class Outbox:
    """
    The node's publishers and the one thread that uses them.

    Pieces wait in a bounded queue; past the bound the oldest is dropped, counted as an overrun,
    and leaves a gap in `seq`. Pieces that arrive faster than the rate limit share a message, the
    end of a goal never waits for the limit.

    :param node: creates the publishers.
    :param parameters: maps parameter names to values.
    :param on_error: told of an exception while publishing.
    """

    def __init__(self, node: Node, parameters: Any,
                 on_error: Callable[[BaseException], None]) -> None:
        self._node = node
        self._parameters = parameters
        self._on_error = on_error
        overrides = QoSOverridingOptions.with_default_policies

        def publisher(kind: Any, topic: str, qos: QoSProfile) -> Any:
            return node.create_publisher(kind, topic, qos, qos_overriding_options=overrides())

        self._tokens = publisher(Token, '~/tokens', TOKENS_QOS)
        self._text = publisher(String, '~/text', TEXT_QOS)
        self._state = publisher(NodeState, '~/state', LATCHED_QOS)
        self._capsules = publisher(CapsuleList, '~/capsules', LATCHED_QOS)
        self._last: dict[Any, Any] = {}
        self.overruns = 0
        self.published = 0
        self._queue: deque[Any] = deque()
        self._pieces = 0
        self._condition = threading.Condition()
        self._closing = False
        self.reload()
        self._thread = threading.Thread(target=self._run, name='flashrt-outbox')
        self._thread.start()

    def reload(self) -> None:
        """Take over the stream parameters, so that no piece has to look them up."""
        rate = self._parameters['stream.max_rate_hz']
        self._period = 1.0 / rate if rate > 0 else 0.0
        self._depth = self._parameters['stream.depth']

    def put_piece(self, goal: Goal, piece: Piece) -> None:
        """Queue tokens of a goal. Called on the worker thread: it only appends."""
        with self._condition:
            if self._pieces >= self._depth:
                self._drop_oldest()
            goal.characters += len(piece.text)
            self._queue.append(_Piece(goal, piece))
            self._pieces += 1
            if len(self._queue) == 1:
                # Behind another one it changes nothing: the thread publishes, or waits for the
                # rate limit. Woken for each token it would take the interpreter from the worker.
                self._condition.notify()

    def put_end(self, goal: Goal, then: Callable[[], None]) -> None:
        """Queue the last word of a goal; `then` runs after it was published."""
        self._put(_End(goal, then))

    def put(self, function: Callable[[], None]) -> None:
        """Queue any other publishing."""
        self._put(function)

    def put_state(self, state: NodeState) -> None:
        """Publish the latched state, where it has changed."""
        self._put(lambda: self._publish_changed(self._state, state))

    def put_capsules(self, capsules: CapsuleList) -> None:
        """Publish the latched list, where it has changed."""
        self._put(lambda: self._publish_changed(self._capsules, capsules))

    def close(self, timeout: float = 5.0) -> bool:
        """Publish what waits, then end the thread; return whether it ended in time."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _put(self, item: Any) -> None:
        with self._condition:
            self._queue.append(item)
            self._condition.notify()

    def _drop_oldest(self) -> None:
        for index, item in enumerate(self._queue):
            if isinstance(item, _Piece):
                del self._queue[index]
                self._pieces -= 1
                self.overruns += 1
                item.goal.dropped += 1  # the gap that subscribers see
                return

    def _publish_changed(self, publisher: Any, message: Any) -> None:
        if self._last.get(publisher) != message:
            self._last[publisher] = message
            publisher.publish(message)

    def _run(self) -> None:
        while True:
            batch = self._take()
            if not batch:
                return
            try:
                if callable(batch[0]):
                    batch[0]()
                else:
                    self._publish(batch)
            except Exception as error:
                self._on_error(error)
            finally:
                if isinstance(batch[-1], _End):
                    # Whatever became of the message: the goal has to end.
                    try:
                        batch[-1].then()
                    except Exception as error:
                        self._on_error(error)

    def _take(self) -> list[Any]:
        """Return one function, or the pieces of one goal and its end where it is there already."""
        with self._condition:
            while True:
                if not self._queue:
                    if self._closing:
                        return []
                    self._condition.wait()
                    continue
                first = self._queue[0]
                if isinstance(first, _Piece):
                    wait = first.goal.last_sent + self._period - time.monotonic()
                    hurry = self._closing or self._pieces < len(self._queue)
                    if wait > 0 and not hurry:
                        self._condition.wait(wait)
                        continue
                batch = [self._queue.popleft()]
                if isinstance(first, _Piece):
                    self._pieces -= 1
                    while self._queue and getattr(self._queue[0], 'goal', None) is first.goal:
                        item = self._queue.popleft()
                        batch.append(item)
                        if isinstance(item, _End):
                            break
                        self._pieces -= 1
                return batch

    def _publish(self, batch: list[Any]) -> None:
        goal: Goal = batch[0].goal
        pieces = [item.piece for item in batch if isinstance(item, _Piece)]
        words = ''.join(piece.text for piece in pieces)
        generation = goal.generation if isinstance(batch[-1], _End) else None
        with self._condition:
            goal.seq += goal.dropped
            goal.dropped = 0
        if pieces:
            goal.position = pieces[-1].position
            goal.index = pieces[0].index
        if generation is not None:
            goal.epoch = generation.epoch
            goal.position = generation.position
            words += generation.text[goal.characters:]  # what was held back for a stop string
        elif isinstance(batch[-1], _End):
            goal.epoch, goal.position = goal.place
        # One message a goal, filled anew: rclpy copies what it publishes, and to make one takes as
        # long as to send it.
        message = goal.message = convert.token(
            self._node.get_clock().now().to_msg(), goal.session, goal.id, epoch=goal.epoch,
            seq=goal.seq, index=goal.index, position=goal.position, words=words,
            ids=[token for piece in pieces for token in piece.token_ids],
            finish=goal.reason if isinstance(batch[-1], _End) else Token.RUNNING,
            into=goal.message)
        goal.seq += 1
        goal.index += len(message.token_ids)
        goal.last_sent = time.monotonic()
        self.published += 1
        if goal.feedback is not None:
            goal.feedback(message)
        self._tokens.publish(message)
        if generation is not None and goal.error is None:
            self._text.publish(String(data=convert.text(generation.text)))
