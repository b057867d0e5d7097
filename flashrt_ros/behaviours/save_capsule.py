"""Save the state of a session under a name."""

from __future__ import annotations

from typing import Any

from flashrt_ros.behaviours.binding import FromBlackboard
from flashrt_ros.behaviours.service import ServiceBehaviour


class SaveCapsule(ServiceBehaviour):
    """
    Freeze a session's state under a name.

    * :data:`~py_trees.common.Status.RUNNING`: the save waits for the next token boundary
    * :data:`~py_trees.common.Status.SUCCESS`: the capsule exists, complete and unchangeable
    * :data:`~py_trees.common.Status.FAILURE`: no capsule of that name was made or changed, or no
      answer came (TIMEOUT); the response on the blackboard tells why

    An interruption does not take the save back.

    Example::

        SaveCapsule('Remember the kitchen', capsule='kitchen', overwrite=True, persist=True)

    Args:
        name: the behaviour's name
        capsule: name to give
        session: to save, '' for the default one
        key: blackboard variable for the SaveCapsule.Response
        server: full name of the flashrt node
        timeout: seconds for the whole call
        **fields: others of SaveCapsule.Request: overwrite, pin, persist, align, note
    """

    service = 'save_capsule'

    def __init__(self, name: str, *, capsule: str | FromBlackboard, session: str = '',
                 key: str = 'saved', server: str = '/flashrt', timeout: float = 10.0,
                 **fields: Any) -> None:
        super().__init__(name, session=session, key=key, server=server, timeout=timeout,
                         capsule=capsule, **fields)

    def said(self, response: Any) -> str:
        """Return where it was saved."""
        return f'{response.info.name}: {response.info.tokens} tokens'
