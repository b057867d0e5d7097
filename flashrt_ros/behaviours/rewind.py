"""Roll the mind back when the child fails."""

from __future__ import annotations

from collections.abc import Iterator

import py_trees
from py_trees.common import Status

from flashrt_ros import srv
from flashrt_ros.behaviours.call import Call, describe
from flashrt_ros.behaviours.scripted import CHILD, Mind, Script, ScriptedDecorator, unique
from flashrt_ros.client import ON_BUSY


class Rewind(ScriptedDecorator):
    """
    Save the mind on entry; when the child fails, make it as if the child had never run.

    * :data:`~py_trees.common.Status.RUNNING`: the snapshot is taken, the child runs, or the mind
      is being rolled back
    * :data:`~py_trees.common.Status.SUCCESS`: the child succeeded; the mind keeps what it lived
      through
    * :data:`~py_trees.common.Status.FAILURE`: the child failed, and the mind is byte for byte what
      it was on entry, with a new epoch. Or no snapshot could be taken, and the child never ran. Or
      the mind could not be rolled back: then the snapshot is kept, and named in the feedback
      message and the log

    What else there is to know of its policy:

    * Only the session is rolled back: neither the world nor the blackboard.
    * Goals that were interrupted below it end first. A goal of others that runs in the session at
      the moment of the rewind is preempted (``on_busy``).
    * An interruption (``terminate(INVALID)``) is no failure: the mind keeps what it lived through,
      unless ``rewind_on_interrupt``; then it is rolled back in the background, and behaviours that
      come next in the session wait for it.
    * The snapshot is pinned, has a name that nobody else uses, and is dropped at the end. A process
      that dies inside leaves it: capsules called ``rewind-...``.

    The blackboard variable ``key`` is the RestoreCapsule.Response of a rewind, the
    SaveCapsule.Response of a snapshot that failed, else None.

    Example::

        Rewind('Or never happened', py_trees.composites.Sequence('Bring', memory=True, children=[
            Generate('Plan', prompt='Bring me the cup.'), Execute('Execute')]))

    Args:
        name: the decorator's name
        child: the child behaviour or subtree
        session: of the node, '' for its default one
        on_busy: 'preempt', 'wait' or 'reject', where others generate in the session
        rewind_on_interrupt: roll back too where a higher priority takes over
        key: blackboard variable
        server: full name of the flashrt node
        timeout: seconds for each call
    """

    def __init__(self, name: str, child: py_trees.behaviour.Behaviour, *, session: str = '',
                 on_busy: str = 'preempt', rewind_on_interrupt: bool = False,
                 key: str = 'rewound', server: str = '/flashrt', timeout: float = 10.0) -> None:
        super().__init__(name, child)
        self.bind(server, session, key)
        self.timeout = timeout
        self.on_busy = ON_BUSY[on_busy]
        self.rewind_on_interrupt = rewind_on_interrupt
        self._save: Call | None = None
        self._began = False
        self._where = ''

    def script(self) -> Script:
        """Save, run the child, restore where it failed."""
        mind = Mind(self.connection, self.timeout)
        self._save, self._began, self._where = None, False, self.present_session()
        self.write(None)
        self.feedback_message = 'takes a snapshot'
        yield from mind.settle(self._where)
        self._save = save = mind.call('save_capsule', srv.SaveCapsule.Request(
            session=self._where, capsule=unique('rewind'), pin=True, note=self.name[:100]))
        yield from save.wait()
        if save.failed:
            self.write(save.response)
            self.feedback_message = f'no snapshot, not run: {describe(save.response)}'
            return Status.FAILURE
        self._began = True
        while True:
            self.feedback_message = f'can go back to {save.response.info.tokens}'
            yield CHILD
            if self.decorated.status == Status.SUCCESS:
                self.connection.attend(mind.drop(save))
                self.feedback_message = 'kept'
                return Status.SUCCESS
            if self.decorated.status != Status.RUNNING:
                break
        self.feedback_message = 'rewinds'
        yield from mind.settle(self._where)
        yield from self._restore(mind, save)
        return Status.FAILURE

    def interrupted(self) -> None:
        """Drop the snapshot, and roll back where that was asked for."""
        if self._save is not None:
            self.connection.attend(
                self._forget(Mind(self.connection, self.timeout), self._save, self._where,
                             self._began and self.rewind_on_interrupt), self._where)
            self._save = None

    def _forget(self, mind: Mind, save: Call, session: str, rewind: bool) -> Iterator[None]:
        yield from mind.quiet(session)
        if rewind:
            yield from self._restore(mind, save)
        else:
            yield from mind.drop(save)

    def _restore(self, mind: Mind, save: Call) -> Iterator[None]:
        info = save.response.info
        restore = yield from mind.ask('restore_capsule', srv.RestoreCapsule.Request(
            session=self._where, capsule=info.name, on_busy=self.on_busy))
        self.write(restore.response)
        if restore.failed:
            self.feedback_message = (f'NOT rewound, capsule {info.name} is kept: '
                                     f'{describe(restore.response)}')
            mind.connection.node.get_logger().error(f'{self.name}: {self.feedback_message}')
            return
        self.feedback_message = f'rewound to {info.tokens}'
        mind.connection.attend(mind.drop(save))
