"""Take a session back in its own history."""

from __future__ import annotations

from typing import Any

from flashrt_ros.behaviours.binding import FromBlackboard
from flashrt_ros.behaviours.service import ServiceBehaviour


class Rollback(ServiceBehaviour):
    """
    Take a session back: to a position, by a number of tokens, or by a number of turns.

    * :data:`~py_trees.common.Status.RUNNING`: the node works
    * :data:`~py_trees.common.Status.SUCCESS`: the session stands exactly there
    * :data:`~py_trees.common.Status.FAILURE`: the session is as it was (BUSY while it generates,
      INVALID_ARGUMENT for a target that does not exist or another epoch), or no answer came
      (TIMEOUT)

    An interruption does not take the rollback back.

    Example::

        Rollback('The last turn never happened', turns=1)
        Rollback('Back to the plan', position=FromBlackboard('answer.position'))

    Args:
        name: the behaviour's name
        position: an absolute position; give exactly one of `position`, `tokens` and `turns`
        tokens: that many back
        turns: that many back
        session: to take back, '' for the default one
        key: blackboard variable for the Rollback.Response
        server: full name of the flashrt node
        timeout: seconds for the whole call
        **fields: others of Rollback.Request: expected_epoch, max_replay

    Raises:
        ValueError: not exactly one target was given
    """

    service = 'rollback'

    def __init__(self, name: str, *, position: int | FromBlackboard | None = None,
                 tokens: int | FromBlackboard | None = None,
                 turns: int | FromBlackboard | None = None, session: str = '',
                 key: str = 'rolled_back', server: str = '/flashrt', timeout: float = 10.0,
                 **fields: Any) -> None:
        given = [(to, value) for to, value in enumerate((position, tokens, turns))
                 if value is not None]
        if len(given) != 1:
            raise ValueError(f'{name}: give exactly one of position, tokens and turns.')
        super().__init__(name, session=session, key=key, server=server, timeout=timeout,
                         to=given[0][0], value=given[0][1], **fields)

    def said(self, response: Any) -> str:
        """Return where the session stands now."""
        return f'at {response.position}, {response.tokens_replayed} tokens replayed'
