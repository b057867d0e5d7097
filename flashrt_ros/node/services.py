"""The services: each checks, hands a function to the worker and fills its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
import time
from typing import Any, Literal, TYPE_CHECKING

from std_srvs.srv import Trigger

from flashrt_ros import srv
from flashrt_ros.capsule.names import check_note
from flashrt_ros.control import Control
from flashrt_ros.errors import Busy, DeadlineExceeded, FlashrtError, InvalidArgument, NameExists
from flashrt_ros.node import convert
from flashrt_ros.node.desk import Desk, Reply
from flashrt_ros.node.goals import Goals
from flashrt_ros.node.jobs import is_fault, Job, report
from flashrt_ros.node.requests import (
    check_name,
    choice,
    DEFAULT_SESSION,
    MAX_BRANCHES,
    seconds,
    session_name,
)

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine
    from flashrt_ros.node.node import CapsuleNode
    from flashrt_ros.node.runtime import Runtime

_ON_BUSY = ('DEFAULT', 'REJECT', 'WAIT', 'PREEMPT')
_ROLLBACK_TO: tuple[Literal['position', 'tokens', 'turns'], ...] = (
    'position', 'tokens', 'turns')
_NO_LIMIT = srv.Rollback.Request.MAX_REPLAY__DEFAULT


class Services:
    """
    The services of the node. Handlers are coroutines: none holds a thread while it waits.

    :param node: says whether it is active, and gives worker, alarms and statistics.
    :param goals: the open goals.
    :param desk: takes the requests.
    """

    def __init__(self, node: CapsuleNode, goals: Goals, desk: Desk) -> None:
        self._node = node
        self._goals = goals

        def serve(kind: Any, name: str, work: Callable[..., Awaitable[None]]) -> None:
            async def handler(request: Any, response: Any) -> Any:
                return await self._serve(name, work, request, response)
            desk.serve(kind, f'~/{name}', handler)

        serve(srv.SaveCapsule, 'save_capsule', self._save)
        serve(srv.RestoreCapsule, 'restore_capsule', self._restore)
        serve(srv.ForkCapsule, 'fork_capsule', self._fork)
        serve(srv.Rollback, 'rollback', self._rollback)
        serve(srv.ListCapsules, 'list_capsules', self._list)
        serve(srv.DropCapsule, 'drop_capsule', self._drop)
        serve(srv.PinCapsule, 'pin_capsule', self._pin)
        serve(srv.CloseSession, 'close_session', self._close)
        serve(Trigger, 'reset', self._reset)
        serve(Trigger, 'cancel_all', self._cancel_all)

    async def _serve(self, name: str, work: Callable[..., Awaitable[None]], request: Any,
                     response: Any) -> Any:
        """Run a handler; whatever happens, answer with a code."""
        started = time.monotonic()
        failure: BaseException | None = None
        try:
            await work(self._node.active_runtime(), request, response)
        except Exception as error:
            failure = error
            if is_fault(error):
                self._node.get_logger().error(f'{name} failed, {report(error)}')
        elapsed = time.monotonic() - started
        if isinstance(response, Trigger.Response):
            response.success = failure is None
            if failure is not None:
                code = failure.code if isinstance(failure, FlashrtError) else 'INTERNAL'
                response.message = f'{code}: {convert.error_text(failure)}'
        elif failure is not None:
            convert.fail(response, failure)
        if hasattr(response, 'elapsed'):
            response.elapsed = convert.duration(elapsed)
        self._node.statistics.service(name, failure, elapsed)
        if name != 'list_capsules':
            self._node.mirror.refresh()
        return response

    def _deadline(self, timeout: Any = None) -> float:
        given = seconds(timeout) if timeout is not None else 0.0
        return time.monotonic() + (given or self._node.parameters['timeouts.service'])

    async def _call(self, runtime: Runtime, function: Callable[[Engine], Any], *,
                    deadline: float, at_boundary: bool = True, session: str | None = None,
                    control: Control | None = None) -> Any:
        """Await a function of the engine; `session` and `control` as in `Worker.call`."""
        reply: Reply[Any] = Reply()
        Job(runtime.worker, function, at_boundary=at_boundary, session=session, deadline=deadline,
            grace=self._node.parameters['timeouts.stall'] or 60.0, alarms=self._node.alarms,
            reply=reply, control=control)
        return await reply

    async def _free(self, session: str, on_busy: int, deadline: float) -> None:
        """
        See to it that a session is not generating, as `on_busy` says.

        A goal that was told to end already does not count as busy: a cancel and then a rollback
        is the common case, and the end is a token away.

        :raises Busy, DeadlineExceeded: it generates.
        """
        if on_busy == srv.RestoreCapsule.Request.PREEMPT:
            self._goals.preempt(session)
        elif on_busy != srv.RestoreCapsule.Request.WAIT and self._goals.is_busy(session):
            raise Busy(f'Session {session!r} is generating: cancel its goals first (~/cancel_all '
                       'cancels every goal), or wait for them.')
        reply: Reply[None] = Reply()
        self._goals.when_idle(session, reply)
        if reply.is_set:
            return

        def expire() -> None:
            reply.set(error=DeadlineExceeded(
                f'Session {session!r} was still generating when the time limit passed, and '
                'nothing was changed: cancel its goals, or give a longer timeout.'))
        alarm = self._node.alarms.at(deadline, expire)
        try:
            await reply
        finally:
            alarm.cancel()

    async def _save(self, runtime: Runtime, request: srv.SaveCapsule.Request,
                    response: srv.SaveCapsule.Response) -> None:
        session = session_name(request.session)
        name = check_name(request.capsule)
        note = check_note(request.note)
        saved = await self._call(runtime, lambda engine: engine.save(
            session, name, overwrite=request.overwrite, pin=request.pin, persist=request.persist,
            align=request.align, note=note), deadline=self._deadline(request.timeout),
            session=session)
        response.info = convert.capsule_info(saved.info)
        response.bytes_copied = convert.unsigned(saved.bytes_copied)
        if request.persist:
            self._node.mirror.watch_disk(name)

    async def _restore(self, runtime: Runtime, request: srv.RestoreCapsule.Request,
                       response: srv.RestoreCapsule.Response) -> None:
        session = session_name(request.session)
        seed = int(request.seed) if request.reseed else None
        expected = int(request.expected_epoch)

        def work(engine: Engine) -> Any:
            if runtime.worker.current_session == session:
                raise Busy(f'Another goal began in session {session!r}: try again.')
            return engine.restore(session, capsule, seed=seed, expected_epoch=expected)

        try:
            capsule = check_name(request.capsule)
            on_busy = choice('on_busy', request.on_busy, _ON_BUSY)
            deadline = self._deadline(request.timeout)
            if expected:  # before a goal is preempted for nothing
                await self._call(runtime, lambda engine: engine.check_epoch(session, expected),
                                 deadline=deadline)
            await self._free(session, on_busy, deadline)
            # A rollback is no goal: it may run in this session, and is waited for.
            restored = await self._call(runtime, work, deadline=deadline, session=session)
        except FlashrtError:
            response.epoch = convert.unsigned(runtime.worker.place(session)[0])
            raise
        response.info = convert.capsule_info(restored.info)
        response.epoch = convert.unsigned(restored.epoch)
        response.tokens_reused = convert.unsigned(restored.tokens_reused)
        response.bytes_copied = convert.unsigned(restored.bytes_copied)

    async def _fork(self, runtime: Runtime, request: srv.ForkCapsule.Request,
                    response: srv.ForkCapsule.Response) -> None:
        sessions = [check_name(name, 'session') for name in request.sessions]
        if not 1 <= len(sessions) <= MAX_BRANCHES or len(set(sessions)) != len(sessions):
            raise InvalidArgument(f'sessions needs 1 to {MAX_BRANCHES} different names, one for '
                                  'each branch.')
        if len(request.seeds) not in (0, len(sessions)):
            raise InvalidArgument('seeds must be empty or hold one seed for each session.')
        capsule = check_name(request.capsule) if request.capsule else ''
        if capsule and request.source_session:
            raise InvalidArgument('Give capsule or source_session, not both.')
        source = session_name(request.source_session)
        seeds = [int(seed) for seed in request.seeds]

        def work(engine: Engine) -> Any:
            taken = {info.name for info in engine.sessions()}.intersection(sessions)
            if taken:
                raise NameExists(f'There is a session {min(taken)!r} already: close it first, or '
                                 'choose another name for the branch.')
            return engine.fork(capsule, source_session='' if capsule else source,
                               sessions=sessions, seeds=seeds)

        forked = await self._call(runtime, work, deadline=self._deadline(request.timeout),
                                  session=None if capsule else source)
        response.info = convert.capsule_info(forked.info)
        response.sessions = [convert.text(name) for name in forked.sessions]
        response.bytes_copied = convert.unsigned(forked.bytes_copied)

    async def _rollback(self, runtime: Runtime, request: srv.Rollback.Request,
                        response: srv.Rollback.Response) -> None:
        session = session_name(request.session)
        limit = None if request.max_replay == _NO_LIMIT else int(request.max_replay)
        expected = int(request.expected_epoch)
        deadline, control = self._deadline(), Control()
        try:
            to = _ROLLBACK_TO[choice('to', request.to, ('POSITION', 'TOKENS', 'TURNS'))]
            if expected:  # a refusal need not wait for its turn
                await self._call(runtime, lambda engine: engine.check_epoch(session, expected),
                                 deadline=deadline)
            await self._free(session, srv.RestoreCapsule.Request.REJECT, deadline)
            done = await self._call(runtime, lambda engine: engine.rollback(
                session, to=to, value=int(request.value), expected_epoch=expected,
                max_replay=limit, control=control, aside=runtime.worker.aside), deadline=deadline,
                at_boundary=False, session=session, control=control)
        except FlashrtError:
            # Who decided by what was so a moment ago decides again by what is so now.
            epoch, position = runtime.worker.place(session)
            response.epoch = convert.unsigned(epoch)
            response.position = convert.unsigned(position)
            raise
        response.epoch = convert.unsigned(done.epoch)
        response.position = convert.unsigned(done.position)
        response.tokens_replayed = convert.unsigned(done.tokens_replayed)

    async def _list(self, runtime: Runtime, request: srv.ListCapsules.Request,
                    response: srv.ListCapsules.Response) -> None:
        session = check_name(request.session, 'session') if request.session else ''
        infos = await self._call(runtime, lambda engine: engine.list(), deadline=self._deadline())
        response.capsules = convert.capsule_list(
            (info for info in infos if not session or info.session == session),
            self._node.mirror.known).capsules

    async def _drop(self, runtime: Runtime, request: srv.DropCapsule.Request,
                    response: srv.DropCapsule.Response) -> None:
        capsule = check_name(request.capsule)
        info = await self._call(runtime, lambda engine: engine.drop(capsule),
                                deadline=self._deadline())
        response.bytes_freed = convert.unsigned(info.bytes_exclusive)

    async def _pin(self, runtime: Runtime, request: srv.PinCapsule.Request,
                   response: srv.PinCapsule.Response) -> None:
        capsule = check_name(request.capsule)
        info = await self._call(runtime, lambda engine: engine.pin(capsule, request.pin),
                                deadline=self._deadline())
        response.info = convert.capsule_info(info)

    async def _close(self, runtime: Runtime, request: srv.CloseSession.Request,
                     response: srv.CloseSession.Response) -> None:
        session = session_name(request.session)
        deadline = self._deadline(request.timeout)
        await self._free(session, srv.RestoreCapsule.Request.REJECT, deadline)
        freed = await self._call(runtime, lambda engine: engine.close_session(session),
                                 deadline=deadline, at_boundary=False)
        response.bytes_freed = convert.unsigned(freed)

    async def _reset(self, runtime: Runtime, request: Trigger.Request,
                     response: Trigger.Response) -> None:
        deadline = self._deadline()
        await self._free(DEFAULT_SESSION, srv.RestoreCapsule.Request.REJECT, deadline)
        await self._call(runtime, lambda engine: engine.reset(DEFAULT_SESSION),
                         deadline=deadline, at_boundary=False)
        response.message = f'Session {DEFAULT_SESSION!r} is empty.'

    async def _cancel_all(self, runtime: Runtime, request: Trigger.Request,
                          response: Trigger.Response) -> None:
        count = self._goals.cancel_all()
        goals = 'goal was' if count == 1 else 'goals were'
        response.message = f'{count} {goals} told to end.' if count else 'No goal was open.'
