"""Let the model continue a session."""

from __future__ import annotations

from collections.abc import Sequence
import time
from typing import Any

from py_trees.common import Status

from flashrt_ros.action import Generate as Action
from flashrt_ros.behaviours.binding import Bound, FromBlackboard
from flashrt_ros.behaviours.call import describe
from flashrt_ros.client import Stream
from flashrt_ros.errors import InvalidArgument
from flashrt_ros.msg import ErrorCode

_GONE = 2.0       # seconds without the action server before it is believed to be gone
_GRACE = 2.0      # seconds after the goal's own time limit
_SHOWN = 48       # characters of the answer in the feedback message


def end_of(text: str) -> str:
    """Return the end of a text, in one line, for a feedback message."""
    line = text.strip().replace('\n', ' ')
    return line if len(line) <= _SHOWN else '…' + line[1 - _SHOWN:]


class Generate(Bound):
    """
    Send a goal, be RUNNING while the model speaks.

    * :data:`~py_trees.common.Status.RUNNING`: the action is being discovered, the goal waits in the
      node's queue or generates; the feedback message is the end of the answer so far
    * :data:`~py_trees.common.Status.SUCCESS`: the answer is whole (``finish_reason`` STOP,
      LENGTH)
    * :data:`~py_trees.common.Status.FAILURE`: every other end: a refusal, a cancel or preemption by
      someone else, TIMEOUT, a fault, a rejected goal, or the node went away. DDS takes some 20 s to
      miss a killed process: `timeout` bounds that

    The Generate.Result is the blackboard variable ``key`` then, None before: ``answer.text``,
    ``answer.error_code``, ``answer.error_msg``, ``answer.position`` and so on. After a failure it
    holds what was generated until then.

    An interruption (``terminate(INVALID)``) cancels the goal, also where the node has not
    acknowledged it yet. It does not wait for the end, but every behaviour here that comes next in
    the same session does. Where the session then stands is the field ``on_cancel``.

    Example::

        Generate('Plan', prompt=FromBlackboard('mission/instruction'), max_tokens=128,
                 temperature=0.0, on_cancel=Action.Goal.ROLLBACK, timeout=20.0)

    Args:
        name: the behaviour's name
        prompt: one user turn
        messages: or several messages, as pairs of role and content
        session: to continue, '' for the default one
        seed: give the sampler this seed; None continues its stream
        on_busy: 'wait' (the default), 'reject' or 'preempt', where the session is generating
        timeout: seconds that the node gives the goal, queue included; 0 is the node's parameter
        discovery: seconds that the action may take to be there
        key: blackboard variable for the Generate.Result
        server: full name of the flashrt node
        **fields: others of Generate.Goal: capsule, save_as, max_tokens, temperature, stop, ...
    """

    def __init__(self, name: str, *, prompt: str | FromBlackboard = '',
                 messages: Sequence[tuple[str, str]] | FromBlackboard = (), session: str = '',
                 seed: int | None = None, on_busy: str = 'default', timeout: float = 0.0,
                 discovery: float = 10.0, key: str = 'answer', server: str = '/flashrt',
                 **fields: Any) -> None:
        super().__init__(name)
        self.fields = {'prompt': prompt, 'messages': messages, 'seed': seed, 'on_busy': on_busy,
                       **fields}
        self.bind(server, session, key, self.fields.values())
        self.timeout = timeout
        self.discovery = discovery
        self.stream: Stream | None = None
        self._seen = 0.0
        self._deadline: float | None = None

    def initialise(self) -> None:
        """Forget the last answer."""
        self.stream = None
        self._seen = time.monotonic()
        self.write(None)

    def update(self) -> Status:
        """Send the goal, or look how far it is."""
        if self.stream is None:
            return self._send()
        if self.stream.done.done():
            result: Any = self.stream.done.result()
            return self._end(result)
        self.feedback_message = end_of(self.stream.text()) or 'queued'
        now = time.monotonic()
        if self.connection.client.action.server_is_ready():
            self._seen = now
        elif now - self._seen > _GONE:
            return self._give_up(ErrorCode.NOT_ACTIVE, f'{self.server} went away before the '
                                 'answer: start it again.')
        if self._deadline is not None and now > self._deadline:
            return self._give_up(ErrorCode.TIMEOUT, f'{self.server} did not end the goal within '
                                 f'{self.timeout:g} s: look at its log.')
        return Status.RUNNING

    def terminate(self, new_status: Status) -> None:
        """Cancel the goal where the behaviour is interrupted."""
        stream, self.stream = self.stream, None
        if stream is not None and new_status == Status.INVALID:
            self.connection.abandon(stream)

    def _send(self) -> Status:
        session = self.present_session()
        if self.connection.settling(session):
            self.feedback_message = 'waits for what was interrupted'
            self._seen = time.monotonic()
            return Status.RUNNING
        if not self.connection.client.is_ready():
            self.feedback_message = f'looks for {self.server}'
            if time.monotonic() - self._seen > self.discovery:
                return self._end(Action.Result(
                    error_code=ErrorCode.TIMEOUT, error_msg=f'{self.server} shows no sign of '
                    'generate: is it running, and in the same ROS domain?'))
            return Status.RUNNING
        try:
            fields = {name: self.value(value) for name, value in self.fields.items()}
            self.stream = self.connection.generate(session, timeout=self.timeout, **fields)
        except (KeyError, TypeError, ValueError, AttributeError, InvalidArgument) as error:
            why = str(error).rstrip('.')
            return self._end(Action.Result(
                error_code=ErrorCode.INVALID_ARGUMENT,
                error_msg=f'The goal of {self.name!r} cannot be filled: {why}.'))
        self._seen = time.monotonic()
        self._deadline = self._seen + self.timeout + _GRACE if self.timeout else None
        self.feedback_message = 'sent'
        return Status.RUNNING

    def _give_up(self, code: int, sentence: str) -> Status:
        assert self.stream is not None
        self.connection.abandon(self.stream)
        return self._end(Action.Result(
            error_code=code, error_msg=sentence, text=self.stream.text()))

    def _end(self, result: Action.Result) -> Status:
        self.write(result)
        if result.error_code != ErrorCode.NONE:
            self.feedback_message = describe(result)
            return Status.FAILURE
        self.feedback_message = end_of(result.text) or f'at {result.position}'
        return Status.SUCCESS
