"""Start sessions from a capsule or from the live state of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashrt_ros.behaviours.binding import FromBlackboard
from flashrt_ros.behaviours.service import ServiceBehaviour


class ForkCapsule(ServiceBehaviour):
    """
    Start one or more sessions from a capsule, or from the live state of a session.

    * :data:`~py_trees.common.Status.RUNNING`: the fork waits for the next token boundary
    * :data:`~py_trees.common.Status.SUCCESS`: all branches exist and stand at the same boundary
    * :data:`~py_trees.common.Status.FAILURE`: none was made (NAME_EXISTS, UNKNOWN_CAPSULE, ...), or
      no answer came (TIMEOUT)

    Branches stay until someone closes them; :class:`~flashrt_ros.behaviours.Speculate` does.
    An interruption does not take the fork back.

    Example::

        ForkCapsule('Two futures', sessions=['plan_a', 'plan_b'], seeds=[1, 2])

    Args:
        name: the behaviour's name
        sessions: names of the branches
        capsule: name or id; '' forks the live state of `session`
        session: whose live state is forked where `capsule` is ''
        seeds: none, or one for each branch
        key: blackboard variable for the ForkCapsule.Response
        server: full name of the flashrt node
        timeout: seconds for the whole call
    """

    service = 'fork_capsule'

    def __init__(self, name: str, *, sessions: Sequence[str], capsule: str | FromBlackboard = '',
                 session: str = '', seeds: Sequence[int] = (), key: str = 'forked',
                 server: str = '/flashrt', timeout: float = 10.0) -> None:
        super().__init__(name, session=session, key=key, server=server, timeout=timeout,
                         sessions=list(sessions), capsule=capsule, seeds=list(seeds))

    def address(self, request: Any, session: str) -> None:
        """Write the source session into the request, where it is read."""
        request.source_session = '' if request.capsule else session

    def said(self, response: Any) -> str:
        """Return what was made from where."""
        return f'{", ".join(response.sessions)} at {response.info.tokens} tokens'
