"""
The engine: model + arena + plan + store + sessions; the whole product without ROS.

One session is live on the arena, the others are parked as frozen boundaries; naming a parked one
makes it live. Every verb checks first and changes afterwards, so a refusal leaves everything as it
was. The engine is synchronous and belongs to one thread at a time; ``worker.Worker`` owns that
thread where several callers share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
import itertools
import time
from typing import Any, Literal
import uuid

import torch

from flashrt_ros import aligned, sampling
from flashrt_ros.aligned import Aligned
from flashrt_ros.answering import Answering, Listeners
from flashrt_ros.assembly import assemble, build_plan
from flashrt_ros.capsule import accounts
from flashrt_ros.capsule.boundary import HostState
from flashrt_ros.capsule.capsule import Capsule, CapsuleInfo
from flashrt_ros.capsule.names import check_note
from flashrt_ros.capsule.pool import Frozen
from flashrt_ros.config import EngineConfig
from flashrt_ros.control import Control, FinishReason
from flashrt_ros.errors import Corrupt, InvalidArgument, Storage
from flashrt_ros.prompting import Prompting
from flashrt_ros.results import (
    AppendResult,
    ForkResult,
    GenerateRequest,
    Generation,
    RestoreResult,
    RollbackResult,
    SaveResult,
    SessionInfo,
)
from flashrt_ros.ring import Ring
from flashrt_ros.sampling import Sampling
from flashrt_ros.session import check_room, Piece, Session
from flashrt_ros.sessions import DEFAULT_SESSION, Sessions

__all__ = ['AppendResult', 'CapsuleInfo', 'Control', 'Engine', 'EngineConfig', 'FinishReason',
           'ForkResult', 'GenerateRequest', 'Generation', 'Piece', 'RestoreResult',
           'RollbackResult', 'Sampling', 'SaveResult', 'SessionInfo']


class Engine:
    """
    The facade that everything outside calls.

    :param progress: told in words what the load is doing; an exception it raises ends the load.
    :raises FlashrtError: typed, before or while loading; nothing is left behind.
    """

    def __init__(self, config: EngineConfig,
                 progress: Callable[[str], None] | None = None) -> None:
        begin = time.monotonic()
        self.config = config
        parts = assemble(config, progress or _ignore)
        self.model, self.text = parts.model, parts.text
        self.arena, self.plan = parts.arena, parts.plan
        self.lineage, self.store = parts.lineage, parts.store
        self.fingerprint = parts.fingerprint
        sampling.write(self.arena, config.sampling, 0)
        self._empty, _ = self.lineage.save()
        self._prompting = Prompting(self.text, self.model.config.vocab_size)
        self._sessions = Sessions(self.lineage, self.store, self._save, self._empty,
                                  self._new_session, config.max_sessions)
        self.store.light = self._sessions.light
        self._counts = dict.fromkeys(
            ('saves', 'restores', 'forks', 'rollbacks', 'generations', 'tokens_prefilled',
             'tokens_generated', 'tokens_replayed', 'passes'), 0)
        self._answering = Answering(
            self.plan, self.lineage, self.store, self._sessions, self._prompting, self._restore,
            self.save, self._counts, config.max_tokens)
        self._had_directory = False
        self.load_seconds = time.monotonic() - begin

    def _save(self) -> tuple[Frozen, int]:
        return self.store.make_room(self.lineage.save)

    def _new_session(self, name: str, epoch: int) -> Session:
        config = self.config
        ring = Ring(self.lineage, self._empty.block, config.ring_boundaries, config.ring_tokens,
                    config.ring_bytes)
        return Session(name, epoch, self.plan, self.lineage, self.text,
                       self.model.config.eos_token_ids, ring, self._save,
                       config.draft_tokens)

    # -- sessions -----------------------------------------------------------------------------

    def session(self, name: str = DEFAULT_SESSION) -> Session:
        """
        Return a session by name.

        :raises InvalidName, UnknownSession: by what is wrong with the name.
        """
        return self._sessions.get(name)

    def sessions(self) -> list[SessionInfo]:
        """List all sessions by name."""
        return self._sessions.infos()

    def close_session(self, session: str) -> int:
        """
        Forget a session; the default one becomes empty instead. Return pool bytes freed.

        :raises UnknownSession, Busy: nothing has changed then.
        """
        before = self.lineage.pool.used_bytes
        self._sessions.close(session)
        return max(0, before - self.lineage.pool.used_bytes)

    def reset(self, session: str = DEFAULT_SESSION) -> RestoreResult:
        """
        Make a session the empty boundary, with the configured sampler settings, and live.

        :raises Busy, UnknownSession: nothing has changed then.
        """
        begin = time.monotonic()
        target = self._sessions.get(session)
        self._sessions.check_idle(target, 'reset it')
        copied = self._sessions.assign(target, self._empty, HostState(), '', None)
        return RestoreResult(None, target.epoch, 0, copied, time.monotonic() - begin)

    # -- append and generate ------------------------------------------------------------------

    def append(self, session: str = DEFAULT_SESSION, *, prompt: str | None = None,
               messages: Sequence[tuple[str, str]] = (), token_ids: Sequence[int] = (),
               raw: bool = False, generation_prompt: bool = False,
               control: Control | None = None) -> AppendResult:
        """
        Fold a source into a session without generating.

        :param generation_prompt: also fold what the chat template puts before an answer.
        :raises ContextFull, InvalidArgument, Canceled, DeadlineExceeded: nothing has changed then.
        """
        begin = time.monotonic()
        self._sessions.check((session,))
        target = self._sessions.find(session)
        host, position = (target.host, target.position) if target else (HostState(), 0)
        turn = self._prompting.turn(host, prompt=prompt, messages=messages, token_ids=token_ids,
                                    raw=raw, answer=generation_prompt)
        self._sessions.check_idle(target, 'append')
        check_room(self.arena.capacity, host, position, len(turn.ids))
        with self._sessions.obtaining(session) as target:
            self._sessions.activate(target)
        prefilled = target.append(turn.ids, turn.state, turn.role, control)
        self._counts['tokens_prefilled'] += prefilled
        return AppendResult(prefilled, target.position, target.epoch, time.monotonic() - begin)

    def generate(self, request: GenerateRequest, on_piece: Callable[[Piece], None] | None = None,
                 control: Control | None = None,
                 between: Callable[[], None] | None = None,
                 aside: Callable[[], None] | None = None) -> Generation:
        """
        Restore if asked, fold the source, sample.

        Cancel, preemption and deadline are no errors here: the answer says how it ended and holds
        what was said until then, and the session stands at a committed boundary.

        :param on_piece: called once a step, before the token is folded; must return quickly.
        :param between: called between steps, at a boundary; may save this session.
        :param aside: called where there is no boundary: between the chunks of the prefill, on a
            CPU between the layers, on a device while a token is waited for; may do what leaves
            this session and the arena alone.
        :raises FlashrtError: a refusal; nothing has changed then. Or a fault on the way: what was
            done before it stays, the restore, the folded source, and where the end boundary could
            not be saved, the answer.
        """
        return self._answering.answer(
            request, control or Control(),
            Listeners(on_piece or _ignore, between or _ignore, aside))

    # -- capsules -----------------------------------------------------------------------------

    def save(self, session: str = DEFAULT_SESSION, name: str = '', *, overwrite: bool = False,
             pin: bool = False, persist: bool = False, align: bool = False,
             rebuild: bool = False, note: str = '') -> SaveResult:
        """
        Freeze a session's boundary under a name (one made up from its id, if left empty).

        :param persist: also write it to disk, in the background.
        :param align: freeze the last grid position instead, with the ids behind it as an unfolded
            tail, so that restore + append equals one cold prefill bit for bit.
        :param rebuild: where an aligned save would be refused since that position is too far
            back, prefill the ids again in a spare arena; the answer says how many.
        :raises NameExists, InvalidName, Capacity, InvalidArgument: nothing has changed then.
        """
        begin = time.monotonic()
        target = self._sessions.get(session)
        identity = uuid.uuid4().hex
        name = name or f'capsule-{identity[:8]}'
        self.store.check_free(name, overwrite, persist)
        if persist and self.store.disk is None:
            raise InvalidArgument('persist needs a capsule directory; set capsules.directory, or '
                                  'save without persist.')
        if persist and not align:
            self.store.check_disk(target.position)
        check_note(note)
        prefilled = 0
        if align:
            found = self._freeze_aligned(target, rebuild)
            frozen, host, copied = found.frozen, found.host, found.bytes_copied
            prefilled = found.tokens_prefilled
        else:
            (frozen, copied), host = self._sessions.freeze(target), target.host
        capsule = Capsule(identity, name, target.parent_id, session, frozen.position,
                          align or bool(host.tail), time.time(), note, host, frozen, pin)
        try:
            self.store.put(capsule, overwrite)
        except BaseException:
            self.lineage.pool.release(frozen)
            raise
        if not align:
            target.parent_id = identity
        if persist:
            self.store.persist(capsule)
        self._counts['saves'] += 1
        return SaveResult(self.store.info(capsule), copied, time.monotonic() - begin, prefilled)

    def _freeze_aligned(self, target: Session, rebuild: bool) -> Aligned:
        """Freeze a grid boundary with the ids behind it (contract, promise 3)."""
        try:
            aligned.refuse(target, self.plan.grid)
            rebuild = False
        except InvalidArgument:
            if not rebuild:
                raise
        full, copied = self._sessions.freeze(target)
        try:
            if not rebuild:
                return aligned.from_kept(target, full, copied, self.lineage.pool)
            return aligned.rebuild(target, full, copied, self.lineage, self._empty,
                                   partial(build_plan, self.model), self.store.make_room)
        finally:
            self.lineage.pool.release(full)

    def restore(self, session: str = DEFAULT_SESSION, capsule: str = '', *,
                seed: int | None = None, expected_epoch: int = 0) -> RestoreResult:
        """
        Make a capsule the boundary of a session (created on first use), and the session live.

        While another session generates, the session is only pointed at the capsule.

        :param seed: start another random sequence.
        :param expected_epoch: refuse if the session was restored or rolled back since; 0 for any.
        :raises UnknownCapsule, Corrupt, Incompatible, Busy, Capacity: nothing has changed then.
        :raises InvalidArgument, UnknownSession: it is in another epoch, or not there.
        """
        begin = time.monotonic()
        if seed is not None:
            Sampling(seed=seed)
        if expected_epoch:
            self.check_epoch(session, expected_epoch)
        target = self._sessions.find(session)
        if target is None:
            self._sessions.check((session,))
        found = self.store.find(capsule)
        if target is not None:
            self._sessions.check_idle(target, 'restore')
        copied = self._restore(found, session, seed)
        epoch = (target or self._sessions.get(session)).epoch
        return RestoreResult(self.store.info(found), epoch, found.position, copied,
                             time.monotonic() - begin)

    def _restore(self, found: Capsule, session: str, seed: int | None) -> int:
        if found.host.tail:
            self._check_tail(found)
            if not found.position:
                raise InvalidArgument(f'capsule {found.name!r} would reuse nothing; prefill it '
                                      'again.')
        copied = self._assign(found, session, seed)
        self._counts['restores'] += 1
        return copied

    def _check_tail(self, found: Capsule) -> None:
        """Refuse, before a device looks them up, ids in the tail of a file that no token has."""
        if max(found.host.tail, default=0) >= self.model.config.vocab_size:
            raise Corrupt(f'the tail of capsule {found.name!r} holds ids that the model does not '
                          'know; save it again.')

    def _assign(self, found: Capsule, session: str, seed: int | None) -> int:
        if found.frozen is None and self._sessions.running is None:
            with self.store.beside(found) as place:
                if place is not None:
                    frozen, pool, block = place
                    with self._sessions.obtaining(session) as target:
                        return self._sessions.assign(target, frozen, found.host, found.id, seed,
                                                     pool, block)
        frozen = self.store.promote(found)
        if self._sessions.find(session) is self._sessions.live:
            return self._sessions.assign(self._sessions.live, frozen, found.host, found.id, seed)
        with self.lineage.pool.holding(frozen), self._sessions.obtaining(session) as target:
            return self._sessions.assign(target, frozen, found.host, found.id, seed)

    def fork(self, capsule: str = '', *, source_session: str = '', sessions: Sequence[str],
             seeds: Sequence[int] = ()) -> ForkResult:
        """
        Branch sessions off a capsule, or off a session's present boundary.

        Branches are parked and share all pages; each becomes live when it is named. A branch with
        the name of an existing session replaces what that one holds.

        :param seeds: none, or one for each branch.
        :raises UnknownCapsule, UnknownSession, Capacity, InvalidArgument: nothing changed then.
        """
        begin = time.monotonic()
        names = list(sessions)
        if not names or len(set(names)) != len(names):
            raise InvalidArgument('name at least one branch, and no branch twice.')
        if seeds and len(seeds) != len(names):
            raise InvalidArgument(f'give no seeds or one for each of the {len(names)} branches, '
                                  f'not {len(seeds)}.')
        if capsule and source_session:
            raise InvalidArgument('fork from a capsule or from a session, not from both.')
        for seed in seeds:
            Sampling(seed=seed)
        self._sessions.check(names)
        source = None if capsule else self._sessions.get(source_session or DEFAULT_SESSION)
        for name in names:
            if source is not None and name == source.name:
                raise InvalidArgument(f'branch {name!r} is the source itself; choose another '
                                      'name.')
            self._sessions.check_idle(self._sessions.find(name), 'fork onto it')
        copied = 0
        if source is None:
            found = self.store.find(capsule)
            self._check_tail(found)
            frozen = self.store.promote(found)  # nothing below makes room, so it stays there
        else:
            frozen, copied = self._sessions.freeze(source)
            found = Capsule(uuid.uuid4().hex, '', source.parent_id, source.name, frozen.position,
                            bool(source.host.tail), time.time(), 'implicit save of a fork',
                            source.host, frozen)
            source.parent_id = found.id
        try:
            pairs = list(itertools.zip_longest(names, seeds))
            if len(pairs) > 1:  # the live one first: only its copy can fail, nothing changed then
                pairs.sort(key=lambda pair: pair[0] != self._sessions.live.name)
            for name, seed in pairs:
                copied += self._sessions.branch(name, frozen, found.host, found.id, seed)
            info = self.store.info(found)
        finally:
            if source is not None:
                self.lineage.pool.release(frozen)
        self._counts['forks'] += 1
        return ForkResult(info, tuple(names), copied, time.monotonic() - begin)

    def rollback(self, session: str = DEFAULT_SESSION, *,
                 to: Literal['position', 'tokens', 'turns'], value: int, expected_epoch: int = 0,
                 max_replay: int | None = None, control: Control | None = None,
                 aside: Callable[[], None] | None = None) -> RollbackResult:
        """
        Go back to a position, by tokens, or by turns.

        :param expected_epoch: refuse if the session was restored or rolled back since; 0 for any.
        :param max_replay: refuse a replay of more tokens.
        :param aside: called within a replay, as in :meth:`generate`.
        :raises InvalidArgument, UnknownSession, Busy: nothing has changed then.
        :raises DeviceFault: if a fault made the live state invalid; restore a capsule.
        """
        begin = time.monotonic()
        target = self._sessions.get(session)
        self._sessions.check_idle(target, 'roll back')
        if expected_epoch:
            self.check_epoch(session, expected_epoch)
        goal = target.goal(to, value)
        copied = self._sessions.activate(target)
        with self._answering.running(target, aside):
            replayed, moved = target.rollback(goal, max_replay, control, aside)
        target.epoch = self._sessions.next_epoch()
        self._counts['rollbacks'] += 1
        self._counts['tokens_replayed'] += replayed
        return RollbackResult(target.epoch, target.position, replayed, copied + moved,
                              time.monotonic() - begin)

    def check_epoch(self, session: str, expected: int) -> None:
        """
        Refuse where a session is not in the epoch that a caller decided by; 0 stands for any.

        :raises InvalidArgument, UnknownSession: by what is wrong.
        """
        epoch = self._sessions.get(session).epoch
        if expected and expected != epoch:
            raise InvalidArgument(f'session {session!r} is in epoch {epoch}, not {expected}: it '
                                  'was restored, reset or rolled back meanwhile. Read its state '
                                  'and decide again.')

    # -- the store ------------------------------------------------------------------------------

    def list(self) -> list[CapsuleInfo]:
        """List the capsules, oldest first."""
        return self.store.infos()

    def info(self, capsule: str) -> CapsuleInfo:
        """Return what is known of a capsule, by name or id."""
        return self.store.info(self.store.find(capsule))

    def drop(self, capsule: str, *, disk: bool = True) -> CapsuleInfo:
        """
        Forget a capsule (and its file); sessions that grew from it stay whole.

        :raises UnknownCapsule: if there is none.
        """
        found = self.store.find(capsule)
        info = self.store.info(found)
        self.store.drop(found, disk)
        return info

    def pin(self, capsule: str, pinned: bool) -> CapsuleInfo:
        """Keep a capsule in the pool whatever happens, or stop doing so."""
        found = self.store.find(capsule)
        self.store.pin(found, pinned)
        return self.store.info(found)

    def demote(self, capsule: str) -> CapsuleInfo:
        """
        Move a capsule down one tier, before room is needed.

        :raises Capacity: if it is pinned, or no tier below takes it; nothing has changed then.
        """
        found = self.store.find(capsule)
        self.store.demote(found)
        return self.store.info(found)

    def persist(self, capsule: str) -> CapsuleInfo:
        """Write a capsule to disk in the background."""
        found = self.store.find(capsule)
        self.store.persist(found)
        return self.store.info(found)

    def flush(self, timeout: float | None = None) -> None:
        """
        Wait for background disk writes.

        :raises Storage: the first that failed since the last call.
        """
        self.store.flush(timeout)

    def facts(self) -> dict:
        """Return what is worth knowing about this engine, JSON-able; sizes in bytes."""
        manifest = self.arena.manifest
        return {
            'model': self.model.spec, 'dtype': str(self.model.dtype).removeprefix('torch.'),
            'device': str(self.arena.device), 'threads': torch.get_num_threads(),
            'context': self.arena.capacity, 'grid': self.plan.grid,
            'vocabulary': self.model.config.vocab_size,
            'fixed_bytes': manifest.fixed_bytes, 'row_bytes': manifest.row_bytes,
            'arena_bytes': self.arena.storage.numel(), **self._tiers(),
            'fingerprint': self.fingerprint.digest,
            'sessions': len(self._sessions), 'load_seconds': self.load_seconds,
            **self._counts}

    def _tiers(self) -> dict[str, Any]:
        """Return what the tiers say of themselves; a disk that went away is a fact, no error."""
        fault, disk = '', self.store.disk
        try:
            told = accounts.facts(self.store)
        except Storage as error:
            memory = copy(self.store)
            memory.disk = memory.files = None
            told, fault = accounts.facts(memory), str(error)
        directory = getattr(disk, 'directory', None)
        if directory is not None and not fault:
            there = directory.is_dir()
            if self._had_directory and not there:
                fault = (f'the capsule directory {str(directory)!r} has vanished.')
            self._had_directory = self._had_directory or there
        if fault:
            fault += (' Capsules in memory go on, those that were only on disk cannot be restored: '
                      'mount or make capsules.directory again, then persist again what must last.')
        return {**told, 'disk_fault': fault}

    def audit(self) -> None:
        """
        Count who holds what again, and compare with the pools; for tests and doubts.

        :raises Internal: for the first difference.
        """
        self.store.flush()
        accounts.audit(self.store, [self._empty], self._sessions.blocks())

    def close(self) -> None:
        """Finish disk writes and let go of everything."""
        self.store.close()


def _ignore(*_: object) -> None:
    """Do nothing: the listener of a caller that did not bring one."""
