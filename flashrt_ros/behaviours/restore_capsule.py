"""Make a capsule the state of a session."""

from __future__ import annotations

from typing import Any

from flashrt_ros.behaviours.binding import FromBlackboard
from flashrt_ros.behaviours.service import ServiceBehaviour
from flashrt_ros.client import ON_BUSY


class RestoreCapsule(ServiceBehaviour):
    """
    Make a capsule the live state of a session.

    * :data:`~py_trees.common.Status.RUNNING`: the node works, or waits for the session (`on_busy`)
    * :data:`~py_trees.common.Status.SUCCESS`: every live byte is the one that was saved
    * :data:`~py_trees.common.Status.FAILURE`: the session is as it was (UNKNOWN_CAPSULE,
      BUSY, INVALID_ARGUMENT for another epoch, ...), or no answer came (TIMEOUT)

    An interruption does not take the restore back.

    Example::

        RestoreCapsule('Back in the kitchen', capsule='kitchen', on_busy='preempt')
        RestoreCapsule('Unless somebody else did', capsule='kitchen',
                       expected_epoch=FromBlackboard('answer.epoch'))

    Args:
        name: the behaviour's name
        capsule: name or id
        session: to restore into, '' for the default one; created on first use
        on_busy: 'reject' (the default), 'wait' or 'preempt', where the session is generating
        seed: give the sampler this seed; None continues its stream
        expected_epoch: refuse where the session is in another epoch; 0 for any
        key: blackboard variable for the RestoreCapsule.Response
        server: full name of the flashrt node
        timeout: seconds for the whole call
    """

    service = 'restore_capsule'

    def __init__(self, name: str, *, capsule: str | FromBlackboard, session: str = '',
                 on_busy: str = 'default', seed: int | None = None,
                 expected_epoch: int | FromBlackboard = 0, key: str = 'restored',
                 server: str = '/flashrt', timeout: float = 10.0) -> None:
        super().__init__(name, session=session, key=key, server=server, timeout=timeout,
                         capsule=capsule, on_busy=ON_BUSY[on_busy], reseed=seed is not None,
                         seed=seed or 0, expected_epoch=expected_epoch)

    def said(self, response: Any) -> str:
        """Return what is live now."""
        return f'{response.info.name}: {response.info.tokens} tokens'
