"""The common part of behaviours that call one service."""

from __future__ import annotations

from typing import Any

from py_trees.common import Status

from flashrt_ros.behaviours.binding import Bound
from flashrt_ros.behaviours.call import Call, describe, SERVICES
from flashrt_ros.errors import InvalidArgument
from flashrt_ros.filling import fill
from flashrt_ros.msg import ErrorCode


class ServiceBehaviour(Bound):
    """
    Send a request once, be RUNNING until the response is there.

    * :data:`~py_trees.common.Status.RUNNING`: the service is being discovered, or works, or what
      was interrupted in the session is not over yet
    * :data:`~py_trees.common.Status.SUCCESS`: the response's ``error_code`` is 0
    * :data:`~py_trees.common.Status.FAILURE`: any other code; TIMEOUT where no response came

    The response is the blackboard variable ``key`` then, None before. An interruption forgets the
    response; what the node was asked for may still happen.

    Args:
        name: the behaviour's name
        session: of the node, '' for its default one
        key: blackboard variable for the response
        server: full name of the flashrt node
        timeout: seconds for the whole call, discovery included
        **fields: of the request
    """

    service = ''  #: a key of SERVICES

    def __init__(self, name: str, *, session: str, key: str, server: str, timeout: float,
                 **fields: Any) -> None:
        super().__init__(name)
        self.bind(server, session, key, fields.values())
        self.timeout = timeout
        self.fields = fields
        self._call: Call | None = None

    def request(self) -> Any:
        """Return the request, with what is on the blackboard now."""
        return fill(SERVICES[self.service].Request,
                    **{name: self.value(value) for name, value in self.fields.items()})

    def said(self, response: Any) -> str:
        """Return the feedback message for a response without a code."""
        return ''

    def initialise(self) -> None:
        """Forget the last response."""
        self._call = None
        self.write(None)

    def update(self) -> Status:
        """Send the request, or look for the response."""
        if self._call is None:
            session = self.present_session()
            if self.connection.settling(session):
                self.feedback_message = 'waits for what was interrupted'
                return Status.RUNNING
            try:
                request = self.request()
                self.address(request, session)
            except (KeyError, TypeError, ValueError, InvalidArgument) as error:
                why = str(error).rstrip('.')
                return self._end(SERVICES[self.service].Response(
                    error_code=ErrorCode.INVALID_ARGUMENT,
                    error_msg=f'The request of {self.name!r} cannot be filled: {why}.'))
            self._call = Call(self.connection, self.service, request, self.timeout)
        if not self._call.poll():
            self.feedback_message = self.service
            return Status.RUNNING
        return self._end(self._call.response)

    def address(self, request: Any, session: str) -> None:
        """Write the session into the request."""
        request.session = session

    def terminate(self, new_status: Status) -> None:
        """Forget the call."""
        self._call = None

    def _end(self, response: Any) -> Status:
        self.write(response)
        self.feedback_message = describe(response) or self.said(response)
        if response.error_code == ErrorCode.NONE:
            return Status.SUCCESS
        return Status.FAILURE

