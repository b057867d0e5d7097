"""The action client of :mod:`flashrt_ros.client`: one that hears all tokens of its goals."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
import threading
from typing import Any

from rclpy.action import ActionClient
from rclpy.callback_groups import CallbackGroup
from rclpy.node import Node

from flashrt_ros.action import Generate
from flashrt_ros.stream import ACTION_QOS, CALLS_QOS


class GoalClient(ActionClient):
    """
    An action client that hands on every message of feedback, in order.

    rclpy's own forgets the feedback callback of a goal as soon as the result is there, with
    tokens still on their way. A subscription beside it would take each token twice.

    :param hear: gets each message of feedback; never two at once.
    """

    def __init__(self, node: Node, name: str, group: CallbackGroup,
                 hear: Callable[[Any], None]) -> None:
        self._hear = hear
        self._heard: deque[Any] = deque()
        self._hearing = threading.Lock()
        super().__init__(
            node, Generate, name, callback_group=group, feedback_sub_qos_profile=CALLS_QOS,
            **ACTION_QOS)

    def take_data(self) -> Any:
        """Take what has arrived. An executor calls this in order, what follows in any."""
        data: Any = super().take_data()
        if 'feedback' in data:
            self._heard.append(data.pop('feedback'))
        return data

    async def execute(self, taken_data: Any) -> None:
        """Hand on what was taken; another thread that is at it already takes ours along."""
        try:
            while self._heard and self._hearing.acquire(blocking=False):
                try:
                    self._hear(self._heard.popleft())
                finally:
                    self._hearing.release()
        finally:  # a listener that fails must not lose the result that came with its token
            await super().execute(taken_data)
