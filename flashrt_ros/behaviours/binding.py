"""How behaviours reach the node, their session and the blackboard."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import py_trees
from py_trees.common import Access

from flashrt_ros.behaviours.connection import connect, Connection


@dataclass(frozen=True)
class FromBlackboard:
    """
    A value that is read from the blackboard each time the behaviour starts.

    Stands for any field of a behaviour's request::

        Generate('Plan', prompt=FromBlackboard('mission/instruction'))
        Rollback('Back to the plan', position=FromBlackboard('answer.position'))

    Args:
        variable: name of the variable, with dots for its attributes
    """

    variable: str


class Bound(py_trees.behaviour.Behaviour):
    """
    Part of each behaviour here: the shared connection, the session, the variable it writes.

    Args:
        name: the behaviour's name
        server: full name of the flashrt node
        session: of the node, '' for its default one. Below a
            :class:`~flashrt_ros.behaviours.Speculate` of the same session it means the branch.
        key: blackboard variable that is written
        fields: values in which a :class:`FromBlackboard` may stand
    """

    server: str
    session: str
    key: str

    def bind(self, server: str, session: str, key: str, fields: Iterable[Any] = ()) -> None:
        """Remember names and register the blackboard's variables; call after ``__init__``."""
        self.server, self.session, self.key = server, session, key
        self.timeout = 10.0
        self._connection: Connection | None = None
        self.blackboard = self.attach_blackboard_client(name=self.name)
        self.blackboard.register_key(key=key, access=Access.WRITE)
        for value in fields:
            if isinstance(value, FromBlackboard):
                self.blackboard.register_key(
                    key=value.variable.partition('.')[0], access=Access.READ)

    def setup(self, **kwargs: Any) -> None:
        """
        Connect to the node.

        Args:
            **kwargs: ``node`` (an rclpy node) or ``client`` (a FlashrtClient)

        Raises:
            KeyError: neither was given
        """
        self._connection = connect(
            self.server, f'{self.name} [{type(self).__name__}]', **kwargs)

    @property
    def connection(self) -> Connection:
        """The connection that ``setup`` made."""
        if self._connection is None:
            raise RuntimeError(f'{self.name} [{type(self).__name__}] was ticked before setup: call '
                               'tree.setup(node=...) first.')
        return self._connection

    def value(self, given: Any) -> Any:
        """Return a field's value; a KeyError names the variable that is missing."""
        return self.blackboard.get(given.variable) if isinstance(given, FromBlackboard) else given

    def present_session(self) -> str:
        """Return the session that is meant right now: a branch, below a running Speculate."""
        parent = self.parent
        while parent is not None:
            branch = getattr(parent, 'present_branch', None)
            if branch and getattr(parent, 'session', None) == self.session \
                    and getattr(parent, 'server', None) == self.server:
                return str(branch)
            parent = parent.parent
        return self.session

    def write(self, value: Any) -> None:
        """Put what came out on the blackboard."""
        self.blackboard.set(self.key, value)
