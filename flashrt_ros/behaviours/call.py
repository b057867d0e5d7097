"""A request to a service of the node, polled and never waited for."""

from __future__ import annotations

from collections.abc import Iterator
import time
from typing import Any

from rclpy.task import Future

from flashrt_ros import srv
from flashrt_ros.behaviours.connection import Connection
from flashrt_ros.client import to_duration
from flashrt_ros.errors import BY_CODE
from flashrt_ros.msg import ErrorCode

_GRACE = 1.0  # seconds in which the node's own TIMEOUT may arrive, which says more than ours
_NAMES = {getattr(ErrorCode, name): name
          for name in (*BY_CODE, 'GOAL_REJECTED', 'SEND_GOAL_FAILURE', 'UNKNOWN')}
SERVICES: dict[str, Any] = {
    'save_capsule': srv.SaveCapsule, 'restore_capsule': srv.RestoreCapsule,
    'fork_capsule': srv.ForkCapsule, 'rollback': srv.Rollback,
    'drop_capsule': srv.DropCapsule, 'close_session': srv.CloseSession}


def describe(response: Any) -> str:
    """Return the code's name and the sentence of a response or result; '' for success."""
    if response.error_code == ErrorCode.NONE:
        return ''
    return f'{_NAMES.get(response.error_code, response.error_code)}: {response.error_msg}'


class Call:
    """
    A request on its way.

    It is sent as soon as the service is there. The node is told the same time limit, so that what
    it had not begun by then has no effect later.

    Args:
        connection: to the node
        service: name in the interface, such as 'save_capsule'
        request: the request
        timeout: seconds until the call is given up, discovery of the service included

    Attributes:
        response: None, then the response; one that never came is made up, with the code TIMEOUT
    """

    def __init__(self, connection: Connection, service: str, request: Any,
                 timeout: float) -> None:
        self.response: Any = None
        self._client = connection.client
        self._service = service
        self._request = request
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._future: Future | None = None
        if hasattr(request, 'timeout'):
            request.timeout = to_duration(timeout)

    def poll(self) -> bool:
        """Send what can be sent; tell whether the response is there."""
        if self.response is not None:
            return True
        late = time.monotonic() > self._deadline
        if self._future is None:
            if self._client.is_ready(self._service):
                self._deadline = time.monotonic() + self._timeout + _GRACE
                self._future = self._client.call_async(self._service, self._request)
            elif late:
                self._fail(f'{self._client.name} shows no sign of {self._service}: is it running, '
                           'and in the same ROS domain?')
        elif self._future.done():
            if self._future.exception() is None:
                self.response = self._future.result()
            else:
                self._fail(f'{self._service} came back broken: {self._future.exception()!r}')
        elif late:
            self._client.forget(self._service, self._future)
            self._fail(f'{self._client.name} did not answer {self._service} within '
                       f'{self._timeout:g} s: look at its log.')
        return self.response is not None

    @property
    def failed(self) -> bool:
        """Tell whether the response is there and carries a code."""
        return self.response is not None and self.response.error_code != ErrorCode.NONE

    def wait(self) -> Iterator[None]:
        """Yield until the response is there, for scripts."""
        while not self.poll():
            yield

    def _fail(self, sentence: str) -> None:
        self.response = SERVICES[self._service].Response(
            error_code=ErrorCode.TIMEOUT, error_msg=sentence)
