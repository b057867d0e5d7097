"""
One answer: restore if asked, fold what was sent, sample; whole, or stopped at a boundary.

All that can be refused is refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flashrt_ros import sampling
from flashrt_ros.arena import Arena
from flashrt_ros.capsule.boundary import EMPTY, HostState
from flashrt_ros.capsule.capsule import Capsule
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.capsule.pool import Frozen
from flashrt_ros.capsule.store import Store
from flashrt_ros.control import Control, FinishReason
from flashrt_ros.errors import Busy, Canceled, DeadlineExceeded, InvalidArgument, Preempted
from flashrt_ros.plan import Plan
from flashrt_ros.prompting import Prompting, Turn
from flashrt_ros.results import GenerateRequest, Generation, SaveResult, Stopwatch
from flashrt_ros.session import Answer, check_room, Piece, Session
from flashrt_ros.sessions import Sessions
from flashrt_ros.text import StopMatcher

_NO_STOPS = StopMatcher()  # has nothing to remember, so it serves all
STOPPED = (FinishReason.CANCELED, FinishReason.PREEMPTED, FinishReason.TIMEOUT)


class Listeners(NamedTuple):
    """Who is told of an answer while it comes; see :meth:`flashrt_ros.engine.Engine.generate`."""

    on_piece: Callable[[Piece], None]
    between: Callable[[], None]
    aside: Callable[[], None] | None


class _Checked(NamedTuple):
    """What a request comes down to, looked up and made once."""

    capsule: Capsule | None
    turn: Turn
    limit: int
    chosen: dict[str, float]
    matcher: StopMatcher


class Running:
    """For a ``with``: a session runs on the plan, and `aside` is called meanwhile."""

    def __init__(self, sessions: Sessions, plan: Plan, target: Session,
                 aside: Callable[[], None] | None) -> None:
        self._sessions, self._plan = sessions, plan
        self._target, self._aside = target, aside

    def __enter__(self) -> None:
        self._sessions.running = self._target
        self._plan.aside = self._aside

    def __exit__(self, *_: object) -> None:
        self._sessions.running = None
        self._plan.aside = None


class Answering:
    """
    Makes the answers of one engine.

    :param restore: takes a capsule, a session and a seed, None for the sequence of the capsule.
    :param save: the engine's.
    :param counts: the engine's tallies, which this adds to.
    :param max_tokens: of an answer whose request does not say.
    """

    def __init__(self, plan: Plan, lineage: Lineage, store: Store, sessions: Sessions,
                 prompting: Prompting, restore: Callable[[Capsule, str, int | None], object],
                 save: Callable[..., SaveResult], counts: dict[str, int],
                 max_tokens: int) -> None:
        self._plan = plan
        self._arena: Arena = plan.arena
        self._lineage = lineage
        self._store = store
        self._sessions = sessions
        self._prompting = prompting
        self._restore = restore
        self._save = save
        self._counts = counts
        self._max_tokens = max_tokens

    def answer(self, request: GenerateRequest, control: Control,
               listeners: Listeners) -> Generation:
        """Do what :meth:`flashrt_ros.engine.Engine.generate` says."""
        watch = Stopwatch()
        checked = self._checked(request)
        if control.cancelled:
            return self._nothing(request, control.cancelled, watch)
        there = self._sessions.find(request.session)
        if there is not None:
            return self._answer(there, request, checked, control, listeners, watch)
        with self._sessions.obtaining(request.session) as target:
            return self._answer(target, request, checked, control, listeners, watch)

    def _answer(self, target: Session, request: GenerateRequest, checked: _Checked,
                control: Control, listeners: Listeners, watch: Stopwatch) -> Generation:
        # A restore that is asked for heals a state that a fault made invalid.
        undo = (self._undo_point(target) if request.rollback_on_cancel
                and (self._arena.valid or not request.capsule) else None)
        try:
            generation = self._run(request, target, checked, control, listeners, watch)
            stopped = generation.finish_reason in STOPPED
            if request.save_as and not stopped:
                info = self._save(request.session, request.save_as, overwrite=True).info
                generation = generation._replace(info=info)
            if stopped and undo is not None and target is self._sessions.live:
                self._lineage.restore(undo[0])
                target.become(undo[1], undo[2], undo[0], self._sessions.next_epoch())
                generation = generation._replace(epoch=target.epoch,
                                                 position=target.position)
            return generation
        finally:
            if undo is not None:
                self._lineage.pool.release(undo[0])

    def running(self, target: Session, aside: Callable[[], None] | None) -> Running:
        """Note whose the arena is: what is served aside must leave both alone."""
        return Running(self._sessions, self._plan, target, aside)

    def _checked(self, request: GenerateRequest) -> _Checked:
        """Refuse all that can be refused before anything changes."""
        self._sessions.check((request.session,))
        if self._sessions.running is not None:
            raise Busy(f'session {self._sessions.running.name!r} is generating; wait for its '
                       'end.')
        if request.save_as:
            self._store.check_free(request.save_as, overwrite=True)
        limit = self._max_tokens if request.max_tokens == -1 else request.max_tokens
        if limit < 0:
            raise InvalidArgument('max_tokens must be -1 (the configured default), 0 (prefill '
                                  f'only) or a positive count, not {request.max_tokens}.')
        chosen: dict[str, float] = {}
        for name, value in (('temperature', request.temperature), ('top_p', request.top_p),
                            ('top_k', request.top_k), ('seed', request.seed)):
            if value is not None:
                chosen[name] = value
        if chosen:
            sampling.check(**chosen)  # type: ignore[arg-type]
        matcher = (_NO_STOPS if isinstance(request.stop, tuple) and not request.stop
                   else StopMatcher(request.stop))
        capsule = self._store.find(request.capsule) if request.capsule else None
        origin = capsule or self._sessions.find(request.session)
        host, position = (origin.host, origin.position) if origin else (EMPTY, 0)
        turn = self._prompting.turn(host, prompt=request.prompt, messages=request.messages,
                                    token_ids=request.token_ids, raw=request.raw,
                                    answer=limit > 0)
        if limit and not (position or host.tail or turn.ids):
            raise InvalidArgument('nothing is folded yet and the request brings nothing: send a '
                                  'prompt, messages or token_ids, or name a capsule.')
        check_room(self._arena.capacity, host, position, len(turn.ids) + (1 if limit else 0))
        return _Checked(capsule, turn, limit, chosen, matcher)

    def _run(self, request: GenerateRequest, target: Session, checked: _Checked,
             control: Control, listeners: Listeners, watch: Stopwatch) -> Generation:
        turn, limit = checked.turn, checked.limit
        if checked.capsule is not None:
            self._restore(checked.capsule, request.session, None)
        else:
            self._sessions.activate(target)
        reused, prefilled = target.position, 0
        answer: Answer | None = None

        def listen(piece: Piece) -> None:
            if piece.token_ids:
                watch.first()
            listeners.on_piece(piece)

        try:
            with self.running(target, listeners.aside):
                if turn.ids or limit:
                    prefilled = target.append(turn.ids, turn.state, turn.role, control,
                                              listeners.aside)
                    self._counts['tokens_prefilled'] += prefilled
                if limit:
                    answer = target.generate(
                        max_tokens=limit, matcher=checked.matcher, chosen=checked.chosen,
                        counter=None if request.seed is None else 0, on_piece=listen,
                        control=control, between=listeners.between)
        except (Canceled, Preempted, DeadlineExceeded):
            nothing = self._nothing(request, control.cancelled or FinishReason.CANCELED, watch)
            return nothing._replace(tokens_reused=reused if request.capsule else 0)
        tokens = answer.token_ids if answer else ()
        self._counts['generations'] += 1
        self._counts['tokens_generated'] += len(tokens)
        self._counts['passes'] += answer.passes if answer else 0
        return Generation(
            session=target.name,
            finish_reason=answer.finish_reason if answer else FinishReason.LENGTH,
            text=answer.text if answer else '', token_ids=tokens, prompt_tokens=len(turn.ids),
            tokens_reused=reused, tokens_prefilled=prefilled, completion_tokens=len(tokens),
            time_to_first_token=watch.to_first(), tokens_per_second=watch.rate(len(tokens)),
            epoch=target.epoch, position=target.position)

    def _undo_point(self, target: Session) -> tuple[Frozen, HostState, str]:
        return self._sessions.freeze(target)[0], target.host, target.parent_id

    def _nothing(self, request: GenerateRequest, reason: FinishReason,
                 watch: Stopwatch) -> Generation:
        """Answer of a request that was stopped before its first token."""
        session = self._sessions.find(request.session)
        return Generation(
            session=request.session, finish_reason=reason, text='', token_ids=(), prompt_tokens=0,
            tokens_reused=0, tokens_prefilled=0, completion_tokens=0,
            time_to_first_token=watch.to_first(), tokens_per_second=0.0,
            epoch=session.epoch if session else 0, position=session.position if session else 0)
