"""Decorators that talk to the node before and after their child runs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any
import uuid

import py_trees
from py_trees.common import Status

from flashrt_ros import srv
from flashrt_ros.behaviours.binding import Bound
from flashrt_ros.behaviours.call import Call, describe
from flashrt_ros.behaviours.connection import Connection

_NEVER = 1  # no epoch: they are times, in ns since 1970
CHILD = 'child'  # yielded by a script: the child's turn
Script = Generator[str | None, None, Status]


class ScriptedDecorator(Bound, py_trees.decorators.Decorator):
    """
    A decorator whose course is written as one generator.

    The script yields None to wait for the next tick, CHILD to have the child ticked, and returns
    its final status. The child is ticked at most once a tick and only where the script asks for
    it.

    Args:
        name: the decorator's name
        child: the child behaviour or subtree
    """

    def __init__(self, name: str, child: py_trees.behaviour.Behaviour) -> None:
        py_trees.decorators.Decorator.__init__(self, name=name, child=child)
        self._script: Script | None = None
        self._turn: str | None = None

    def script(self) -> Script:
        """Return the course from the start to the final status."""
        raise NotImplementedError

    def interrupted(self) -> None:
        """Clean up in the background; the child has been stopped."""

    def initialise(self) -> None:
        """Begin the script."""
        self._turn = None
        self._script = self.script()

    def update(self) -> Status:
        """Advance the script."""
        assert self._script is not None
        try:
            self._turn = next(self._script)
            return Status.RUNNING
        except StopIteration as end:
            return Status(end.value)

    def tick(self) -> Iterator[py_trees.behaviour.Behaviour]:
        """
        Manage the child through the tick.

        Yields:
            a reference to itself or one of its children
        """
        if self.status != Status.RUNNING:
            self.initialise()
            status = self.update()
        else:
            status = Status.RUNNING
            if self._turn != CHILD:
                status = self.update()
        if status == Status.RUNNING and self._turn == CHILD:
            yield from self.decorated.tick()
            status = self.update()
        if status != Status.RUNNING:
            self.stop(status)
        self.status = status
        yield self

    def terminate(self, new_status: Status) -> None:
        """Hand what is unfinished over to the background where the decorator is interrupted."""
        script, self._script = self._script, None
        if script is None or new_status != Status.INVALID:
            return
        script.close()
        if self.decorated.status == Status.RUNNING:
            self.decorated.stop(Status.INVALID)  # first: its goals must be told to end
        self.interrupted()


class Mind:
    """
    Steps of scripts: what decorators ask of the node.

    Each step is a generator that ends with the Call, which has its response then.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        self.connection = connection
        self.timeout = timeout
        self.saves: list[Call] = []  # whose capsules are not dropped yet

    def call(self, service: str, request: Any) -> Call:
        """Start a call."""
        call = Call(self.connection, service, request, self.timeout)
        if service == 'save_capsule':
            self.saves.append(call)
        return call

    def ask(self, service: str, request: Any) -> Generator[None, None, Call]:
        """Call and wait."""
        call = self.call(service, request)
        yield from call.wait()
        return call

    def where(self, session: str) -> Call:
        """
        Ask where a session stands: `epoch` and `position` of the response, an epoch of 0 for none.

        A rollback that expects an epoch which never was changes nothing, is answered within
        whatever runs, and tells that in its refusal. ~/state tells it too, but later.
        """
        return self.call('rollback', srv.Rollback.Request(
            session=session, to=srv.Rollback.Request.TOKENS, value=0, expected_epoch=_NEVER))

    def settle(self, session: str) -> Iterator[None]:
        """Wait until nothing that was interrupted in a session is left; not in the background."""
        while self.connection.settling(session):
            yield

    def quiet(self, session: str) -> Iterator[None]:
        """Wait until the goals that were abandoned in a session have ended."""
        while self.connection.ending(session):
            yield

    def drop(self, save: Call) -> Iterator[None]:
        """Drop what a call saves, if it does; a failure is logged."""
        if save in self.saves:
            self.saves.remove(save)
        yield from save.wait()
        if save.failed:
            return
        capsule = save.response.info.name
        call = yield from self.ask('drop_capsule', srv.DropCapsule.Request(capsule=capsule))
        self._log(call, f'Capsule {capsule!r} was left over')

    def close(self, session: str) -> Iterator[None]:
        """Close a session; a failure is logged."""
        yield from self.quiet(session)
        call = yield from self.ask('close_session', srv.CloseSession.Request(session=session))
        self._log(call, f'Session {session!r} was left over')

    def _log(self, call: Call, words: str) -> None:
        if call.failed:
            self.connection.node.get_logger().warning(f'{words}: {describe(call.response)}')


def unique(kind: str) -> str:
    """Return a name that no other process uses, and that tells where it comes from."""
    return f'{kind}-{uuid.uuid4().hex[:12]}'
