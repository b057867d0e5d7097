"""Think on a branch, and keep it only if it was worth it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import py_trees
from py_trees.common import Status

from flashrt_ros import srv
from flashrt_ros.behaviours.call import Call, describe
from flashrt_ros.behaviours.scripted import CHILD, Mind, Script, ScriptedDecorator, unique
from flashrt_ros.client import ON_BUSY
from flashrt_ros.msg import ErrorCode


class Speculate(ScriptedDecorator):
    """
    Fork the mind, run the child on the branch, then make the branch the mind, or forget it.

    Behaviours below it that name the same session (and server) work on the branch without knowing:
    the same subtree runs with and without a Speculate above. Speculates may be nested.

    * :data:`~py_trees.common.Status.RUNNING`: the branch is made, the child runs, or the outcome
      is carried over
    * :data:`~py_trees.common.Status.SUCCESS`: the child succeeded, and the session is now what the
      branch was; with ``commit=False``, it succeeded, and the session never noticed
    * :data:`~py_trees.common.Status.FAILURE`: the child failed and the session never noticed; or
      there was no fork, and the child never ran; or the commit was not possible, and the session
      is as it was

    What else there is to know of its policy:

    * Commit is save of the branch, restore into the session, drop of that capsule. It is refused
      (INVALID_ARGUMENT) where the session is in another epoch or at another position than at the
      fork: others have restored it, rolled it back or talked to it since, and that would be
      forgotten. ``overwrite`` commits all the same. The look and the restore are two requests, a
      tick apart; another epoch in between refuses too, what is said in between is not seen.
    * The branch is closed at the end of each kind. An interruption (``terminate(INVALID)``)
      discards: the child's goals are cancelled, the branch is closed in the background. Only a
      commit that is on its way already may still happen.
    * A session more is in use meanwhile (``sessions.max``). A process that dies inside leaves a
      session called ``speculate-...``.

    The blackboard variable ``key`` is the RestoreCapsule.Response of a commit, the response that
    tells why there was no fork or commit, else None.

    Example::

        Speculate('Think ahead', Generate('Guess', prompt='Bring me the cup.'))

    Args:
        name: the decorator's name
        child: the child behaviour or subtree
        session: that is forked, '' for the default one
        branch: name of the branch; '' makes one up
        seed: give the branch's sampler this seed; None continues the session's stream
        commit: whether to keep what came out when the child has succeeded: a bool, or a function
            that is asked then
        overwrite: commit also where the session has moved on
        on_busy: 'reject', 'wait' or 'preempt', where the session generates at the commit
        key: blackboard variable
        server: full name of the flashrt node
        timeout: seconds for each call
    """

    def __init__(self, name: str, child: py_trees.behaviour.Behaviour, *, session: str = '',
                 branch: str = '', seed: int | None = None,
                 commit: bool | Callable[[], bool] = True, overwrite: bool = False,
                 on_busy: str = 'reject', key: str = 'speculated', server: str = '/flashrt',
                 timeout: float = 10.0) -> None:
        super().__init__(name, child)
        self.bind(server, session, key)
        self.timeout = timeout
        self.branch = branch
        self.seed = seed
        self.commit = commit
        self.overwrite = overwrite
        self.on_busy = ON_BUSY[on_busy]
        self.present_branch = ''  #: the branch while the child runs on it, else ''
        self._fork: Call | None = None
        self._mind: Mind
        self._name = ''

    def script(self) -> Script:
        """Fork, run the child, commit or discard."""
        self._mind = mind = Mind(self.connection, self.timeout)
        self.present_branch, self._fork = '', None
        session = self.present_session()
        self._name = self.branch or unique('speculate')
        self.write(None)
        self.feedback_message = 'forks'
        yield from mind.settle(session)
        yield from mind.settle(self._name)
        self._fork = fork = mind.call('fork_capsule', srv.ForkCapsule.Request(
            source_session=session, sessions=[self._name],
            seeds=[] if self.seed is None else [self.seed]))
        where = mind.where(session)
        while not all([fork.poll(), where.poll()]):  # both are sent in the first tick
            yield None
        if fork.failed:
            return self._fail(fork.response, 'no branch, not run')
        self.present_branch = self._name
        while True:
            self.feedback_message = f'on {self._name} from {fork.response.info.tokens}'
            yield CHILD
            if self.decorated.status != Status.RUNNING:
                break
        self.present_branch = ''
        yield from mind.settle(self._name)
        status = Status.SUCCESS
        if self.decorated.status != Status.SUCCESS:
            status = Status.FAILURE
            self.feedback_message = 'discarded'
        elif self.commit() if callable(self.commit) else self.commit:
            status = yield from self._carry_over(mind, session, fork.response.info.tokens,
                                                 where.response)
        else:
            self.feedback_message = 'discarded, as told'
        self._fork = None
        self.connection.attend(mind.close(self._name), self._name)
        return status

    def interrupted(self) -> None:
        """Close the branch in the background."""
        self.present_branch = ''
        if self._fork is not None:
            self.connection.attend(
                self._forget(self._mind, self._fork, self._name), self._name)
            self._fork = None

    def _forget(self, mind: Mind, fork: Call, branch: str) -> Iterator[None]:
        for save in list(mind.saves):
            yield from mind.drop(save)
        yield from fork.wait()
        if not fork.failed:
            yield from mind.close(branch)

    def _carry_over(self, mind: Mind, session: str, origin: int, before: Any) -> Script:
        """
        Restore the branch into the session.

        :param origin: position of the fork.
        :param before: where the session stood then; its position lacks a tail that is not folded.
        """
        self.feedback_message = 'commits'
        yield from mind.settle(session)
        save = mind.call('save_capsule', srv.SaveCapsule.Request(
            session=self._name, capsule=unique('speculate-commit'), pin=True,
            note=self.name[:100]))
        probe = mind.where(session)
        while not all([save.poll(), probe.poll()]):  # both are sent in the first tick
            yield None
        failure = save.response if save.failed else None
        if failure is None and not self.overwrite:
            failure = _moved(before, origin, probe.response)
        if failure is not None:
            self.connection.attend(mind.drop(save))
            return self._fail(failure, 'not committed')
        restore = yield from mind.ask('restore_capsule', srv.RestoreCapsule.Request(
            session=session, capsule=save.response.info.name, on_busy=self.on_busy,
            # Others may act between the probe and this.
            expected_epoch=0 if self.overwrite else probe.response.epoch))
        self.connection.attend(mind.drop(save))
        if restore.failed:
            return self._fail(restore.response, 'not committed')
        self.write(restore.response)
        self.feedback_message = f'committed: {origin} to {restore.response.info.tokens}'
        return Status.SUCCESS

    def _fail(self, response: Any, words: str) -> Status:
        self.write(response)
        self.feedback_message = f'{words}: {describe(response)}'
        return Status.FAILURE


def _moved(before: Any, origin: int, now: Any) -> Any:
    """Return what tells why a commit would forget something, None where it would not."""
    untold = next((response for response in (before, now) if not response.epoch), None)
    if untold is not None:
        return untold
    if now.epoch != before.epoch:
        how = f'was restored, reset or rolled back, to {now.position},'
    elif now.position != origin and not now.position == before.position < origin:
        how = f'went from {origin} to {now.position}'
    else:
        return None
    return srv.RestoreCapsule.Response(
        error_code=ErrorCode.INVALID_ARGUMENT,
        error_msg=f'The session {how} since the fork, and a commit would forget that: fork again, '
        'or say overwrite.')
