"""The action ~/generate and the topic ~/prompt: two doors to the same goals."""

from __future__ import annotations

from functools import partial
import time
from typing import Any, TYPE_CHECKING
import uuid

from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.qos_overriding_options import QoSOverridingOptions
from std_msgs.msg import String
from unique_identifier_msgs.msg import UUID

from flashrt_ros.action import Generate
from flashrt_ros.errors import FlashrtError
from flashrt_ros.msg import Token
from flashrt_ros.node.desk import Desk, run
from flashrt_ros.node.goals import Goal, Goals
from flashrt_ros.node.jobs import describe, is_fault, report
from flashrt_ros.node.publishers import TEXT_QOS, TOKENS_QOS
from flashrt_ros.node.requests import choice, generate_request, seconds
from flashrt_ros.stream import ACTION_QOS

if TYPE_CHECKING:
    from flashrt_ros.node.node import CapsuleNode

RESULT_KEPT = 60  # seconds that a client has to ask for a result
_ON_BUSY = ('DEFAULT', 'REJECT', 'WAIT', 'PREEMPT')


class _Server(ActionServer):
    """
    An action server whose goals execute at acceptance and come back when they have ended.

    A goal in the state EXECUTING with a coroutine that awaits its end would do the same, but
    rclpy polls each such coroutine at every wake-up of the executor and keeps an entry for every
    poll: a long goal beside a busy topic slows the whole node down. So what ends a goal hands it
    back, and its thread sends the result.
    """

    def notify_execute(self, goal_handle: ServerGoalHandle, execute_callback: Any) -> None:
        """Do nothing yet; `finish` hands the goal over."""

    def tell(self, parcel: Any) -> None:
        """
        Publish feedback, as `ServerGoalHandle.publish_feedback`, which makes a message each time.

        A message of feedback holds three others, and the interpreter that fills them with their
        defaults is the worker's.
        """
        self._handle.publish_feedback(parcel)

    def finish(self, goal_handle: ServerGoalHandle, execute_callback: Any) -> None:
        """Run `execute_callback`, which sets the terminal state, and send the result."""
        run(self._execute_goal(execute_callback, goal_handle))


class GenerateServer:
    """
    Accepts every goal and ends each one with a code.

    :param node: says whether it is active, and gives the worker.
    :param goals: the open goals.
    :param desk: takes goals, cancels and requests for results, one after the other: two goals of
        a conversation must not overtake each other on the way in.
    """

    def __init__(self, node: CapsuleNode, goals: Goals, desk: Desk) -> None:
        self._node = node
        self._goals = goals
        self._by_id: dict[bytes, Goal] = {}
        self._canceled_early: set[bytes] = set()
        self._arrival = 0.0
        self._server = _Server(
            node, Generate, '~/generate', execute_callback=self._never, callback_group=desk.group,
            goal_callback=self._arrived,
            handle_accepted_callback=self._accepted, cancel_callback=self._cancel,
            feedback_pub_qos_profile=TOKENS_QOS, result_timeout=RESULT_KEPT, **ACTION_QOS)
        desk.add(self._server)
        self._prompts = node.create_subscription(
            String, '~/prompt', self._prompted, TEXT_QOS,
            qos_overriding_options=QoSOverridingOptions.with_default_policies())

    @property
    def unsent(self) -> int:
        """Goals whose terminal state and result are not set yet."""
        return len(self._by_id)

    def destroy(self) -> None:
        """Destroy the server before its node."""
        self._server.destroy()

    def _arrived(self, request: Generate.Goal) -> GoalResponse:
        # Before the client hears of it: what it does next must find the goal arrived. Goals come
        # in one after the other, so `_accepted` is next.
        self._arrival = time.monotonic()
        return GoalResponse.ACCEPT

    def _accepted(self, handle: ServerGoalHandle) -> None:
        key = bytes(handle.goal_id.uuid)

        parcel = Generate.Impl.FeedbackMessage()
        parcel.goal_id = handle.goal_id

        def feedback(message: Token) -> None:
            parcel.feedback.token = message
            self._server.tell(parcel)

        goal = Goal(handle.goal_id, feedback, partial(self._ended, handle), self._arrival)
        self._by_id[key] = goal
        try:
            handle.execute()
        except Exception:
            pass  # a cancel came in between: the state is CANCELING, as good a start
        self._submit(goal, handle.request)
        if key in self._canceled_early:
            self._canceled_early.discard(key)
            self._goals.cancel(goal)

    def _submit(self, goal: Goal, request: Generate.Goal) -> None:
        """Queue a goal, or end it with a code. Never raises."""
        try:
            goal.session = request.session or 'default'
            runtime = self._node.active_runtime()
            goal.worker = runtime.worker
            parameters = self._node.parameters
            engine_request = generate_request(request, parameters)
            on_busy = choice('on_busy', request.on_busy, _ON_BUSY)
            timeout = seconds(request.timeout) or parameters['timeouts.goal']
            self._goals.submit(goal, runtime.worker, engine_request, timeout=timeout,
                               on_busy=on_busy)
        except Exception as error:
            if not isinstance(error, FlashrtError):
                self._node.get_logger().error(f'A goal was not taken, {report(error)}')
            self._goals.refuse(goal, error)

    def _cancel(self, handle: ServerGoalHandle) -> CancelResponse:
        try:
            key = bytes(handle.goal_id.uuid)
            goal = self._by_id.get(key)
            if goal is None:
                self._canceled_early.add(key)  # `_accepted` is about to run
            else:
                self._goals.cancel(goal)
        except Exception as error:
            self._node.get_logger().error(f'Cancel failed: {describe(error)}')
        return CancelResponse.ACCEPT

    def _ended(self, handle: ServerGoalHandle, goal: Goal) -> None:
        """Hand a goal back; its last message is out. On the outbox's thread."""
        self._log(goal)
        self._server.finish(handle, lambda _: self._result(handle, goal))

    def _result(self, handle: ServerGoalHandle, goal: Goal) -> Generate.Result:
        """Set the terminal state and return the result. On the outbox's thread."""
        try:
            result = goal.result()
            if goal.error is None:
                handle.succeed()
            elif goal.reason == Token.CANCELED and self._canceling(handle, goal):
                handle.canceled()
            else:
                handle.abort()
            return result
        except Exception as error:
            self._node.get_logger().error(f'No state for a goal: {describe(error)}')
            return goal.result()
        finally:
            self._by_id.pop(bytes(handle.goal_id.uuid), None)

    def _canceling(self, handle: ServerGoalHandle, goal: Goal) -> bool:
        """
        Tell whether a client asked for the cancel.

        The goal may end before the thread that serves the request has moved its state on: a few
        microseconds of Python, waited for here, since CANCELED is only legal from there.
        """
        if getattr(goal.error, 'code', '') != 'CANCELED' or not goal.canceled_by_client:
            return handle.is_cancel_requested
        until = time.monotonic() + 1.0
        while not handle.is_cancel_requested and time.monotonic() < until:
            time.sleep(0.0005)
        return handle.is_cancel_requested

    def _prompted(self, message: String) -> None:
        """Take a user turn for the default session."""
        try:
            if not message.data:
                self._node.get_logger().warning('An empty prompt on ~/prompt was ignored.')
                return
            goal = Goal(UUID(uuid=list(uuid.uuid4().bytes)), None, self._log,
                        time.monotonic())
            self._submit(goal, Generate.Goal(prompt=message.data))
        except Exception as error:
            self._node.get_logger().error(f'A prompt was lost: {describe(error)}')

    def _log(self, goal: Goal) -> None:
        logger = self._node.get_logger()
        if goal.error is None:
            return
        line = f'Goal in session {goal.session!r} ended: {report(goal.error)}'
        if is_fault(goal.error):
            logger.error(line)
        else:
            logger.info(line)

    @staticmethod
    def _never(handle: ServerGoalHandle) -> Generate.Result:
        handle.abort()
        return Generate.Result()
