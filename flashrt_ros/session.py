"""
A session: one conversation, live on the arena or parked as a frozen boundary.

Every verb here starts and ends at a committed boundary. Appends and generations run under the
lineage's guard, so a failure in the middle puts the fixed block back and nothing has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from flashrt_ros import sampling
from flashrt_ros.arena import Arena
from flashrt_ros.capsule.boundary import HostState, Sampler
from flashrt_ros.capsule.capsule import Capsule
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.capsule.pool import Frozen
from flashrt_ros.control import Control, FinishReason
from flashrt_ros.drafts import PromptLookup
from flashrt_ros.errors import ContextFull, Corrupt, DeviceFault, FlashrtError, InvalidArgument
from flashrt_ros.plan import Plan, TOKENS
from flashrt_ros.ring import Kept, Ring
from flashrt_ros.text import Detokenizer, StopMatcher, Text


@dataclass(frozen=True)
class Piece:
    """
    What one step of a generation brought.

    ``text`` holds whole characters only and is empty while a character is incomplete or text may
    still turn into a stop string. ``index`` is the completion index of ``token_ids[0]``,
    ``position`` the context position after the piece, ``epoch`` the session's.
    """

    token_ids: tuple[int, ...]
    index: int
    position: int
    text: str
    epoch: int


@dataclass(frozen=True)
class Answer:
    """The outcome of :meth:`Session.generate`."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    passes: int  # steps and verified drafts; on a device each reads the weights once


def check_room(capacity: int, host: HostState, position: int, count: int) -> None:
    """
    Refuse, before anything changes, what the context cannot hold.

    :raises ContextFull: naming what is needed and what there is.
    """
    used = position + len(host.tail)
    if used + count > capacity:
        raise ContextFull(
            f'the context holds {capacity} tokens; {used} are in use and {count} more do not fit. '
            'Roll back, restore an earlier capsule, or configure a context.max_tokens of at least '
            f'{used + count}.')


def check_ids(ids: Sequence[int], arena: Arena) -> None:
    """
    Refuse ids that a file brought and no token has, before a device looks them up.

    :raises Corrupt: saying what to do.
    """
    if len(ids) and not 0 <= min(ids) <= max(ids) < arena[sampling.LOGITS].numel():
        raise Corrupt('the history of this session holds ids that the model does not know: the '
                      'capsule that it came from is damaged. Restore another one, or reset it.')


class Session:
    """
    One conversation. Verbs may be called only while it is live; the engine sees to that.

    :param ring: keeps light boundaries for cheap rollbacks.
    :param save: freezes the live boundary, making room where needed; the lineage's own by default.
    :param draft_tokens: most tokens that are guessed and verified at once; 0 for none.
    """

    def __init__(self, name: str, epoch: int, plan: Plan, lineage: Lineage, text: Text,
                 eos: Collection[int], ring: Ring,
                 save: Callable[[], tuple[Frozen, int]] | None = None,
                 draft_tokens: int = 0) -> None:
        self.name = name
        self.epoch = epoch
        self.parent_id = ''
        self.parked: Capsule | None = None  # its boundary, while it is not on the arena
        self.reseed: int | None = None  # applied when a parked session becomes live
        self._plan = plan
        self._lineage = lineage
        self._text = text
        self._eos = frozenset(eos)
        self._settings = plan.settings
        self._draft_tokens = draft_tokens
        self.ring = ring
        self._save = save or lineage.save
        self._host = HostState()
        self._sampler: Sampler = (0.0, 0, 1.0, 0, 0)  # at the start of the last generation
        self._sampled = 0  # tokens of the generation under way, at its last boundary
        self._saying: tuple[list[int], StopMatcher, Detokenizer]  # its ids and text
        self._same: Kept | None = None  # kept by the ring, with the bytes of the live fixed block
        self._begun: int | None = None  # inside a fold, an append or a replay: where it began

    # -- the state --------------------------------------------------------------------------

    @property
    def host(self) -> HostState:
        """Host part of the present boundary, valid between any two steps."""
        host = self._host
        if not self._sampled:
            return host
        ids, matcher, detokenizer = self._saying
        return replace(
            host, schedule=host.schedule.sampled(self._sampler, self._sampled),
            turn='assistant_ended' if ids[self._sampled - 1] in self._eos else 'assistant_open',
            detokenizer=detokenizer.state(), held=matcher.held)

    @property
    def position(self) -> int:
        """Number of folded tokens, at the last committed boundary."""
        if self.parked is not None:
            return self.parked.position
        return self._plan.arena.position if self._begun is None else self._begun

    @property
    def folding(self) -> bool:
        """True inside a fold, an append or a replay, where the arena holds no boundary."""
        return self._begun is not None

    def become(self, host: HostState, parent_id: str, kept: Frozen | None, epoch: int) -> None:
        """Take over another boundary's host part; its block serves as a kept boundary."""
        self._host, self._sampled, self.parent_id = host, 0, parent_id
        self.epoch, self._same = epoch, None
        if kept is None:
            self.ring.clear()
            return
        pure = host.schedule.pure_grid(self._plan.grid)
        self._same = self.ring.adopt(kept.position, kept.block,
                                     bool(pure) and kept.position == pure)

    def changed(self) -> None:
        """Note that the live fixed block is no longer what it became."""
        self._same = None

    def _mark(self, position: int) -> int | None:
        """Keep the present boundary as the start of a turn; return a block that holds it."""
        same = self._same
        if same is None or same.position != position or not self.ring.holds(same):
            same = self._same = self.ring.mark(position)
        return same.block if same else None

    # -- append -----------------------------------------------------------------------------

    def append(self, ids: Sequence[int], turn: str, role: str | None = None,
               control: Control | None = None,
               aside: Callable[[], None] | None = None) -> int:
        """
        Fold ids (behind an unfolded tail, if there is one) on the grid; all or nothing.

        :param turn: turn state after the last id.
        :param role: role of the message folded last.
        :param aside: called between two chunks; must leave this session and the arena alone.
        :return: tokens prefilled.
        :raises ContextFull, Canceled, DeadlineExceeded, DeviceFault: nothing has changed then.
        """
        host = self.host
        pending = [*host.tail, *ids]
        if not pending:
            if turn != host.turn or role != host.role:
                host = replace(host, turn=turn, role=role)
            self._host, self._sampled = host, 0
            return 0
        start = self._plan.arena.position
        check_room(self._plan.arena.capacity, host, start, len(ids))
        schedule, grid = host.schedule, self._plan.grid
        pure = schedule.tokens == schedule.pure_grid(grid)
        last_pure = (start + len(pending)) // grid * grid if pure else 0
        candidate: Kept | None = None
        self.ring.drop_above(start)
        block = self._mark(start) if ids and start else None
        try:
            with self._lineage.guard(block):
                done, self._begun = 0, start
                while done < len(pending):
                    if done and aside is not None:
                        aside()
                    if control is not None:
                        control.check('the append')
                    count = min(grid - (start + done) % grid, len(pending) - done)
                    self._plan.append(pending[done:done + count])
                    schedule = schedule.appended(count)
                    done += count
                    if start + done == last_pure:
                        candidate = self.ring.take(last_pure)
        except BaseException as error:
            if candidate is not None:
                self._lineage.pool.release_block(candidate.block)
            raise _as_typed(error, 'an append', start) from error
        finally:
            self._begun = None
        self._same = None
        if candidate is not None:
            self.ring.set_grid(candidate)
        self._sampled = 0
        if ids:  # the turn begins behind the tail, which was said before it
            turns = (*host.turns, (start + len(host.tail), host.turn))
            self._host = HostState(schedule=schedule, turns=turns, turn=turn, role=role,
                                   seeds=host.seeds)
        else:
            self._host = replace(host, schedule=schedule, tail=(), turn=turn, role=role)
        return len(pending)

    # -- generate ---------------------------------------------------------------------------

    def generate(self, *, max_tokens: int, matcher: StopMatcher, chosen: Mapping[str, float],
                 counter: int | None, on_piece: Callable[[Piece], None], control: Control,
                 between: Callable[[], None]) -> Answer:
        """
        Sample and fold up to ``max_tokens`` tokens.

        A stop, a cancel and a deadline end at a committed boundary. A fault of the device in the
        middle puts the state back to where this generation began.

        :param matcher: a fresh one.
        :param chosen: settings of the sampler by name; the others stay what the state holds.
        :param counter: where in the random sequence to begin; None goes on with it.
        :param between: called at every boundary; may save this session or serve others.
        :raises ContextFull: if there is no free row at the start.
        :raises DeviceFault: if a step failed.
        """
        arena, host = self._plan.arena, self.host
        start = arena.position
        if not start:
            raise InvalidArgument('nothing is folded yet, so there is nothing to continue; send '
                                  'a prompt or restore a capsule first.')
        check_room(arena.capacity, host, start, 1)
        detokenizer = (Detokenizer.restore(self._text, host.detokenizer) if host.detokenizer
                       else Detokenizer(self._text))
        ids: list[int] = []
        texts: list[str] = []
        failures: list[BaseException] = []
        finish: list[FinishReason] = []

        def publish(tokens: tuple[int, ...], text: str) -> None:
            texts.append(text)
            try:
                on_piece(Piece(tokens, len(ids) - len(tokens), start + len(ids), text,
                               self.epoch))
            except Exception as error:  # the listener's fault must not leave a token unfolded
                failures.append(error)

        def emit(token: int) -> bool:
            ids.append(token)
            ended = token in self._eos
            text, stopped, _ = matcher.push('' if ended else detokenizer.push(token))
            if ended or stopped:
                finish.append(FinishReason.STOP)
            publish((token,), text)
            return bool(finish or failures or control.cancelled)  # a draft ends here

        self.ring.drop_above(start)
        block = self._mark(start)  # as it was: the settings below belong to this generation
        self._host, self._sampled, self._saying = host, 0, (ids, matcher, detokenizer)
        if host.held:
            text, stopped, _ = matcher.push(host.held)
            if stopped:  # a stop string of this request was said already
                finish.append(FinishReason.STOP)
            if text:
                publish((), text)
        lookup: PromptLookup | None = None  # made behind the first token, which it would delay
        passes = 0
        try:
            with self._lineage.guard(block):
                while not finish:
                    position = arena.position
                    if len(ids) >= max_tokens or position >= arena.capacity:
                        finish.append(FinishReason.LENGTH)
                    elif (reason := control.cancelled) is not None:
                        finish.append(reason)
                    else:
                        before, self._begun = len(ids), position
                        if not before:  # with the first token: the schedule tells of no others
                            self._settings.choose(chosen, counter)
                        if lookup and (draft := lookup.guess(
                                min(self._draft_tokens, max_tokens - before))):
                            self._plan.verify(draft, emit)
                        else:
                            self._plan.step(emit)
                        self._begun = None
                        passes += 1
                        if not before:  # here before the token was
                            self._sampler = self._settings.answer()
                        self._sampled = len(ids)
                        if lookup:
                            lookup.extend(ids[before:])
                        elif self._draft_tokens and len(ids) < max_tokens:
                            known = arena[TOKENS][:arena.position].view(-1).cpu().numpy()
                            check_ids([known.min(), known.max()], arena)
                            lookup = PromptLookup(known, arena.capacity)
                        every = self.ring.tokens
                        if every and before // every != len(ids) // every:
                            self.ring.mark(start + self._sampled, turn=False)
                        between()
                    if failures:
                        break
        except BaseException as error:
            self._sampled, self._begun = 0, None
            self.ring.drop_above(start)
            raise _as_typed(error, 'a step', start) from error
        self._same = None
        self._finish(matcher, detokenizer, publish)
        if failures:
            raise failures[0]
        return Answer(tuple(ids), ''.join(texts), finish[0], passes)

    def _finish(self, matcher: StopMatcher, detokenizer: Detokenizer,
                publish: Callable[[tuple[int, ...], str], None]) -> None:
        """Give held text out and commit the host part at the end of an answer."""
        host = self.host
        ended = self._sampled > 0 and host.turn == 'assistant_ended'
        rest = matcher.flush()
        if ended:
            rest += detokenizer.flush()
        if rest:
            publish((), rest)
        self._host = replace(
            host, turn='assistant_ended' if ended else 'assistant_open',
            detokenizer=None if ended else detokenizer.state(), held='')
        self._sampled = 0

    # -- rollback ---------------------------------------------------------------------------

    def goal(self, to: str, value: int) -> int:
        """
        Turn "back to a position, by tokens, by turns" into a position.

        :raises InvalidArgument: for what lies outside this session.
        """
        position = self.position + len(self.host.tail)
        turns = self.host.turns
        if to not in ('position', 'tokens', 'turns'):
            raise InvalidArgument(f'roll back to a position, or by tokens or turns, not {to!r}.')
        if value < 0:
            raise InvalidArgument(f'the value of a rollback must not be negative: {value}.')
        if to == 'turns':
            if value > len(turns):
                raise InvalidArgument(f'session {self.name!r} has {len(turns)} turns; {value} '
                                      'cannot be undone.')
            return turns[-value][0] if value else position
        goal = value if to == 'position' else position - value
        if not 0 <= goal <= position:
            raise InvalidArgument(f'session {self.name!r} has {position} tokens; {value} is '
                                  'beyond that.')
        return goal

    def rollback(self, target: int, max_replay: int | None = None,
                 control: Control | None = None,
                 aside: Callable[[], None] | None = None) -> tuple[int, int]:
        """
        Go back to position ``target``: nearest kept boundary, then replay along the schedule.

        :return: tokens replayed, bytes copied.
        :param target: as :meth:`goal` gives it.
        :param aside: called between two folds, as in :meth:`append`.
        :raises InvalidArgument: for a replay beyond ``max_replay``; nothing has changed then.
        :raises DeviceFault: if the live state is invalid: its rows may be those of another one.
        """
        arena, host = self._plan.arena, self.host
        if not arena.valid:
            raise DeviceFault('the live state was invalidated by an earlier fault and has no '
                              'earlier boundary; restore a capsule or reset the session.')
        position = arena.position
        if target >= position:  # within the unfolded tail: rows and fixed block stay
            self._host, self._sampled = self._host_at(host, target), 0
            return 0, 0
        kept = self.ring.nearest(target)
        replay = target - kept.position
        if max_replay is not None and replay > max_replay:
            raise InvalidArgument(
                f'rolling back to {target} would replay {replay} tokens from the kept boundary at '
                f'{kept.position}, more than max_replay {max_replay}. Raise max_replay, or '
                'restore a capsule.')
        ids: list[int] = []
        if replay:
            ids = arena[TOKENS][kept.position:target].view(-1).tolist()
            check_ids(ids, arena)
        after = self._host_at(host, target)
        if replay == 0:
            copied = self._lineage.put_back(kept.block, kept.position)
            self._seed_at(host, target)
        else:
            copied = self._replay(kept, ids, host, target, control, aside)
        self._host, self._sampled, self._same = after, 0, None
        self.ring.drop_above(target)
        return replay, copied

    def _replay(self, kept: Kept, ids: list[int], host: HostState, target: int,
                control: Control | None, aside: Callable[[], None] | None) -> int:
        # A chunk that the target cuts leaves other last bits in its rows, so going forward again
        # after a fault needs the rows too: an implicit save, which copies only unsaved rows.
        self._lineage.pool.hold_block(kept.block)  # the save may give light boundaries up
        try:
            before, _ = self._save()
        except BaseException:
            self._lineage.pool.release_block(kept.block)
            raise
        try:
            self._begun = before.position
            copied = self._lineage.put_back(kept.block, kept.position)
            self._seed_at(host, kept.position)
            for start, length, sampler in host.schedule.folds(
                    kept.position, target, self._plan.block):
                if aside is not None and start > kept.position:
                    aside()
                if control is not None:
                    control.check('the rollback')
                self._plan.append(ids[start - kept.position:start - kept.position + length])
                if sampler is not None:
                    temperature, top_k, top_p, seed, counter = sampler
                    sampling.write(self._plan.arena, sampling.Sampling(
                        temperature, top_k, top_p, seed), counter + 1)
                self._seed_at(host, start + length)
        except BaseException as error:
            self._lineage.restore(before)
            raise _as_typed(error, 'the replay of a rollback', before.position) from error
        finally:
            self._begun = None
            self._lineage.pool.release(before)
            self._lineage.pool.release_block(kept.block)
        return copied

    def _seed_at(self, host: HostState, position: int) -> None:
        """Begin the random sequence that a restore or a fork began at this position."""
        seed = next((seed for at, seed in host.seeds if at == position), None)
        if seed is not None:
            sampling.reseed(self._plan.arena.manifest, self._plan.arena.fixed, seed)

    def _host_at(self, host: HostState, target: int) -> HostState:
        """Derive the host part of an earlier position; it may lie within an unfolded tail."""
        position = self._plan.arena.position
        if target == position + len(host.tail):
            return host
        tail = host.tail[:max(0, target - position)]
        turns = tuple(mark for mark in host.turns if mark[0] < target)
        turn = next((state for start, state in host.turns if start == target), None)
        there = HostState(schedule=host.schedule.cut(target), turns=turns, tail=tail,
                          turn=turn or ('assistant_open' if target else 'empty'),
                          seeds=tuple(seed for seed in host.seeds if seed[0] <= target))
        # UTF-8 needs at most three earlier bytes, and a token has at least one: a short run-up
        # brings the decoder into the state it had here.
        if turn is not None or not target:
            recent: list[int] = []
        elif tail:  # whether it was sampled is not known, and does no harm
            begin = max((start for start, _ in turns), default=0)
            recent = list(tail[-min(16, target - begin):])
        else:
            last = there.schedule.runs[-1]
            count = min(16, last.count) if last.sampler else 0
            recent = (self._plan.arena[TOKENS][target - count:target].view(-1).tolist()
                      if count else [])
        if not recent:
            return there
        detokenizer = Detokenizer(self._text)
        for token in recent:
            if token not in self._eos:
                detokenizer.push(token)
        if recent[-1] in self._eos:
            return replace(there, turn='assistant_ended')
        return replace(there, detokenizer=detokenizer.state())


def _as_typed(error: BaseException, what: str, position: int) -> BaseException:
    """Wrap a foreign exception; typed ones and interrupts pass as they are."""
    if isinstance(error, FlashrtError) or not isinstance(error, Exception):
        return error
    return DeviceFault(f'{what} failed ({type(error).__name__}: {error}); the state is back at '
                       f'position {position}. Try again, or restore a capsule.')
