"""
The engine: model + arena + plan + store + sessions; the whole product without ROS.

One session is live on the arena, the others are parked as frozen boundaries; naming a parked one
makes it live. Every verb checks first and changes afterwards, so a refusal leaves everything as it
was. The engine is synchronous and belongs to one thread at a time; ``worker.Worker`` owns that
thread where several callers share it.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from flashrt_ros import sampling
from flashrt_ros.arena import Arena
from flashrt_ros.capsule import fingerprint as fingerprints
from flashrt_ros.capsule.boundary import HostState
from flashrt_ros.capsule.capsule import Capsule, CapsuleInfo
from flashrt_ros.capsule.lineage import Lineage, runs
from flashrt_ros.capsule.names import check_name
from flashrt_ros.capsule.pool import Frozen, Pool, pages_for
from flashrt_ros.capsule.store import Store
from flashrt_ros.capsule.tiers import DiskTier
from flashrt_ros.control import Control, FinishReason
from flashrt_ros.errors import (Busy, Canceled, Capacity, DeadlineExceeded, DeviceFault,
                                FlashrtError, InvalidArgument, Preempted, UnknownSession)
from flashrt_ros.models import load_model
from flashrt_ros.plan import TOKENS, EagerPlan, manifest_of
from flashrt_ros.results import (AppendResult, ForkResult, GenerateRequest, Generation,
                                 RestoreResult, RollbackResult, SaveResult, SessionInfo)
from flashrt_ros.sampling import Sampling
from flashrt_ros.session import Piece, Session
from flashrt_ros.text import Text, next_turn

__all__ = ['AppendResult', 'CapsuleInfo', 'Control', 'Engine', 'EngineConfig', 'FinishReason',
           'ForkResult', 'GenerateRequest', 'Generation', 'Piece', 'RestoreResult',
           'RollbackResult', 'Sampling', 'SaveResult', 'SessionInfo']

DEFAULT_SESSION = 'default'


@dataclass(frozen=True)
class EngineConfig:
    """
    What an engine is built from.

    :param model: ``embedded``, a Hugging Face directory, a hub id in the local cache, or
        ``random:<preset>``.
    :param dtype: ``auto`` is float32 on a CPU.
    :param context: tokens the arena holds.
    :param pool_bytes: budget of the capsule pool (device tier).
    :param directory: of the disk tier; empty for none.
    :param disk_bytes: budget of the disk tier; 0 for no limit.
    :param sampling: settings of a fresh session.
    :param max_tokens: default length of a generation.
    :param threads: of the CPU; 0 leaves torch's choice.
    """

    model: str = 'embedded'
    dtype: str = 'auto'
    device: str = 'auto'
    context: int = 8192
    max_sessions: int = 16
    pool_bytes: int = 256 << 20
    directory: str = ''
    disk_bytes: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 256
    threads: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (('context', 1, 1 << 24), ('max_sessions', 1, 4096),
                                ('pool_bytes', 1, 1 << 48), ('disk_bytes', 0, 1 << 60),
                                ('max_tokens', 0, 1 << 24), ('threads', 0, 1024)):
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise InvalidArgument(f'{name} must lie in [{low}, {high}], not {value!r}.')


class Engine:
    """
    The facade that everything outside calls.

    :param progress: told in words what the load is doing; an exception it raises ends the load.
    :raises FlashrtError: typed, before or while loading; nothing is left behind.
    """

    def __init__(self, config: EngineConfig,
                 progress: Callable[[str], None] | None = None) -> None:
        tell = progress or (lambda words: None)
        begin = time.monotonic()
        self.config = config
        device = _device(config.device)
        if config.threads:
            torch.set_num_threads(config.threads)
        tell(f'loading model {config.model}')
        dtype = 'float32' if config.dtype == 'auto' else config.dtype
        self.model = load_model(config.model, dtype=dtype, device=device)
        vocabulary = self.model.config.vocab_size
        if config.context > self.model.config.max_positions:
            raise InvalidArgument(
                f'a context of {config.context} tokens is more than the '
                f'{self.model.config.max_positions} positions of {config.model}; configure less.')
        source = self.model.source_dir
        self.text = Text.load(source) if source else Text.bytes_only(vocabulary)
        tell(f'allocating a context of {config.context} tokens')
        manifest = manifest_of(self.model, vocabulary)
        _check_memory(manifest.storage_bytes(config.context) + config.pool_bytes)
        self.arena = Arena(manifest, config.context, device)
        self.plan = EagerPlan(self.model, self.arena)
        self.lineage = Lineage(self.arena, Pool(manifest, config.pool_bytes, device))
        tell('taking the fingerprint')
        self.fingerprint = fingerprints.build(self.model, manifest, self.text, device,
                                              self.plan.grid)
        disk = DiskTier(config.directory, config.disk_bytes) if config.directory else None
        self.store = Store(self.lineage, self.fingerprint, config.context, disk)
        sampling.write(self.arena, config.sampling, 0)
        self._empty, _ = self.lineage.save()
        self._epoch = 0
        self._running: Session | None = None
        self._sessions: dict[str, Session] = {}
        self._live = self._sessions[DEFAULT_SESSION] = self._new_session(DEFAULT_SESSION)
        self._counts = {'saves': 0, 'restores': 0, 'forks': 0, 'rollbacks': 0, 'generations': 0,
                        'tokens_prefilled': 0, 'tokens_generated': 0, 'tokens_replayed': 0}
        self.load_seconds = time.monotonic() - begin

    # -- sessions -----------------------------------------------------------------------------

    def _next_epoch(self) -> int:
        self._epoch = max(self._epoch + 1, time.time_ns())
        return self._epoch

    def _new_session(self, name: str) -> Session:
        return Session(name, self._next_epoch(), self.plan, self.lineage, self.text,
                       self.model.config.eos_token_ids, self._empty)

    def session(self, name: str = DEFAULT_SESSION) -> Session:
        """
        Return a session by name.

        :raises InvalidName, UnknownSession: by what is wrong with the name.
        """
        check_name(name, 'session')
        try:
            return self._sessions[name]
        except KeyError:
            raise UnknownSession(
                f'there is no session {name!r}; restore or fork a capsule into it, or generate '
                f'on it. There are: {", ".join(sorted(self._sessions))}.') from None

    def _check_sessions(self, names: Sequence[str]) -> None:
        for name in names:
            check_name(name, 'session')
        new = [name for name in dict.fromkeys(names) if name not in self._sessions]
        if len(self._sessions) + len(new) > self.config.max_sessions:
            raise Capacity(f'{len(self._sessions)} of {self.config.max_sessions} sessions are in '
                           'use; close one, or configure a larger sessions.max.')

    def _obtain(self, name: str) -> Session:
        """Return a session, created parked at the empty boundary on first use."""
        session = self._sessions.get(name)
        if session is None:
            self._check_sessions([name])
            session = self._sessions[name] = self._new_session(name)
            session.frozen = self.lineage.pool.hold(self._empty)
        return session

    def _activate(self, session: Session) -> int:
        """Make a session live, parking the one that is; return the bytes copied."""
        if session is self._live:
            return 0
        if self._running is not None:
            raise Busy(f'session {self._running.name!r} is generating, so {session.name!r} cannot '
                       'become live now; wait for the end or cancel it.')
        copied = self._park_live()
        assert session.frozen is not None
        copied += self.lineage.restore(session.frozen)
        self.lineage.pool.release(session.frozen)
        session.frozen, self._live = None, session
        if session.reseed is not None:
            self._reseed(session.reseed)
            session.reseed = None
        return copied

    def _park_live(self) -> int:
        if self._live is None or not self.arena.valid:
            return 0
        self._live.frozen, copied = self.store.make_room(self.lineage.save)
        return copied

    def _reseed(self, seed: int) -> None:
        settings, _ = sampling.read(self.arena)
        sampling.write(self.arena, replace(settings, seed=seed), 0)

    def _idle(self, session: Session, what: str) -> None:
        if session is self._running:
            raise Busy(f'session {session.name!r} is generating; {what} when it has ended, or '
                       'cancel it first.')

    def sessions(self) -> list[SessionInfo]:
        """List all sessions by name."""
        return [SessionInfo(s.name, s.position, self.arena.capacity, s.epoch,
                            s is self._running, s is self._live)
                for _, s in sorted(self._sessions.items())]

    def close_session(self, session: str) -> int:
        """
        Forget a session; the default one becomes empty instead. Return pool bytes freed.

        :raises Busy: while it generates.
        """
        target = self.session(session)
        self._idle(target, 'close it')
        before = self.lineage.pool.used_bytes
        if session == DEFAULT_SESSION:
            self.reset(session)
            return max(0, before - self.lineage.pool.used_bytes)
        if target is self._live:
            self._become_live(self._sessions[DEFAULT_SESSION], forget=True)
        elif target.frozen is not None:
            self.lineage.pool.release(target.frozen)
        target.forget_kept()
        del self._sessions[session]
        return max(0, before - self.lineage.pool.used_bytes)

    def _become_live(self, session: Session, forget: bool) -> None:
        """Make a parked session live without parking the present one."""
        if forget and session is not self._live:
            assert session.frozen is not None
            self.lineage.restore(session.frozen)
            self.lineage.pool.release(session.frozen)
            session.frozen, self._live = None, session

    # -- append and generate --------------------------------------------------------------------

    def _source(self, host: HostState, *, prompt: str | None, messages: Sequence,
                token_ids: Sequence[int], raw: bool, answer: bool
                ) -> tuple[list[int], str, str | None]:
        """Turn a source into ids and the turn state and role after them; changes nothing."""
        given = [name for name, value in (('prompt', prompt is not None and prompt != ''),
                                          ('messages', len(messages) > 0),
                                          ('token_ids', len(token_ids) > 0)) if value]
        if len(given) > 1:
            raise InvalidArgument(f'give one of prompt, messages and token_ids, not '
                                  f'{" and ".join(given)} together.')
        if token_ids:
            vocabulary = self.model.config.vocab_size
            ids = [int(token) for token in token_ids]
            bad = next((token for token in ids if not 0 <= token < vocabulary), None)
            if bad is not None:
                raise InvalidArgument(f'token id {bad} is outside [0, {vocabulary}).')
            return ids, 'assistant_open', host.role
        if raw and prompt:
            at_start = host.turn == 'empty'
            return (self._known(self.text.encode(prompt, at_start=at_start, bos=at_start)),
                    'assistant_open', host.role)
        chat = [{'role': role, 'content': content} for role, content in messages]
        if prompt:
            chat = [{'role': 'user', 'content': prompt}]
        if not chat and (not answer or host.turn in ('empty', 'assistant_open',
                                                     'assistant_ended')):
            return [], host.turn, host.role
        ids = self._known(self.text.render(chat, answer, host.turn, host.role))
        turn, role = next_turn(chat, answer, host.turn, host.role)
        return ids, turn.value, role

    def _known(self, ids: list[int]) -> list[int]:
        """Refuse ids that the tokenizer has and the model does not."""
        vocabulary = self.model.config.vocab_size
        if ids and max(ids) >= vocabulary:
            raise InvalidArgument(f'the text contains the token id {max(ids)}, and the model '
                                  f'knows ids below {vocabulary}: its tokenizer has tokens that '
                                  'it was not trained on. Leave that text out.')
        return ids

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
        self._check_sessions([session])
        target = self._sessions.get(session)
        host = target.host if target else HostState()
        ids, turn, role = self._source(host, prompt=prompt, messages=messages,
                                       token_ids=token_ids, raw=raw, answer=generation_prompt)
        if target is not None:
            self._idle(target, 'append')
        self._room(target, host, len(ids))
        target = self._obtain(session)
        self._activate(target)
        prefilled = target.append(ids, turn, role, control)
        self._counts['tokens_prefilled'] += prefilled
        return AppendResult(prefilled, target.position, target.epoch, time.monotonic() - begin)

    def _room(self, target: Session | None, host: HostState, count: int,
              position: int | None = None) -> None:
        if position is None:
            position = target.position if target else 0
        self._live.check_room(host, position, count)

    def generate(self, request: GenerateRequest, on_piece: Callable[[Piece], None] | None = None,
                 control: Control | None = None,
                 between: Callable[[], None] | None = None) -> Generation:
        """
        Restore if asked, fold the source, sample.

        Cancel, preemption and deadline are no errors here: the answer says how it ended and holds
        what was said until then, and the session stands at a committed boundary.

        :param on_piece: called once a step, before the token is folded; must return quickly.
        :param between: called between steps, at a boundary; may save this session.
        :raises FlashrtError: a refusal; nothing has changed then.
        """
        begin = time.monotonic()
        control = control or Control()
        self._check_sessions([request.session])
        target = self._sessions.get(request.session)
        if self._running is not None:
            raise Busy(f'session {self._running.name!r} is generating; wait for its end.')
        if request.save_as:
            self.store.check_free(request.save_as, overwrite=True)
        limit = self.config.max_tokens if request.max_tokens == -1 else request.max_tokens
        if limit < 0:
            raise InvalidArgument('max_tokens must be -1 (the configured default), 0 (prefill '
                                  f'only) or a positive count, not {request.max_tokens}.')
        chosen = self._settings(request)
        capsule = self.store.find(request.capsule) if request.capsule else None
        host = capsule.host if capsule else target.host if target else HostState()
        position = capsule.position if capsule else target.position if target else 0
        ids, turn, role = self._source(host, prompt=request.prompt, messages=request.messages,
                                       token_ids=request.token_ids, raw=request.raw,
                                       answer=limit > 0)
        if limit and not (position or host.tail or ids):
            raise InvalidArgument('nothing is folded yet and the request brings nothing: send a '
                                  'prompt, messages or token_ids, or name a capsule.')
        self._room(target, host, len(ids) + (1 if limit else 0), position)
        Session.check_stop(request.stop)
        if control.cancelled:
            return self._nothing(request, control.cancelled, begin)

        target = self._obtain(request.session)
        undo = self._undo_point(target) if request.rollback_on_cancel else None
        try:
            return self._generate(request, target, ids, turn, role, limit, chosen, on_piece,
                                  control, between, begin, undo)
        finally:
            if undo is not None:
                self.lineage.pool.release(undo[0])

    def _generate(self, request: GenerateRequest, target: Session, ids: list[int], turn: str,
                  role: str | None, limit: int, chosen: dict, on_piece: Callable | None,
                  control: Control, between: Callable | None, begin: float,
                  undo: tuple[Frozen, HostState, str] | None) -> Generation:
        reused = 0
        if request.capsule:
            reused = self.restore(request.session, request.capsule).tokens_reused
        else:
            self._activate(target)
            reused = target.position
        first: list[float] = []

        def listen(piece: Piece) -> None:
            if piece.token_ids and not first:
                first.append(time.monotonic())
            if on_piece is not None:
                on_piece(piece)

        self._running = target
        try:
            prefilled = target.append(ids, turn, role, control) if ids or limit else 0
            self._counts['tokens_prefilled'] += prefilled
            settings, counter = sampling.read(self.arena)
            settings = replace(settings, **chosen)
            if request.seed is not None:
                counter = 0
            answer = target.generate(
                max_tokens=limit, stop=request.stop, settings=settings, counter=counter,
                on_piece=listen, control=control, between=between or (lambda: None)
            ) if limit else None
        except (Canceled, Preempted, DeadlineExceeded):
            reason = control.cancelled or FinishReason.CANCELED
            return self._put_back(target, undo, self._nothing(request, reason, begin))
        finally:
            self._running = None
        end = time.monotonic()
        tokens = answer.token_ids if answer else ()
        self._counts['generations'] += 1
        self._counts['tokens_generated'] += len(tokens)
        info = None
        finish = answer.finish_reason if answer else FinishReason.LENGTH
        stopped = finish in (FinishReason.CANCELED, FinishReason.PREEMPTED, FinishReason.TIMEOUT)
        if request.save_as and not stopped:
            info = self.save(request.session, request.save_as, overwrite=True).info
        spent = end - first[0] if first else 0.0
        generation = Generation(
            session=target.name, finish_reason=finish, text=answer.text if answer else '',
            token_ids=tokens, prompt_tokens=len(ids), tokens_reused=reused,
            tokens_prefilled=prefilled, completion_tokens=len(tokens),
            time_to_first_token=first[0] - begin if first else end - begin,
            tokens_per_second=(len(tokens) - 1) / spent if len(tokens) > 1 and spent > 0 else 0.0,
            epoch=target.epoch, position=target.position, info=info)
        return self._put_back(target, undo, generation) if stopped else generation

    def _undo_point(self, target: Session) -> tuple[Frozen, HostState, str]:
        if target is self._live:
            frozen, _ = self.store.make_room(self.lineage.save)
        else:
            frozen = self.lineage.pool.hold(target.frozen)
        return frozen, target.host, target.parent_id

    def _put_back(self, target: Session, undo: tuple[Frozen, HostState, str] | None,
                  generation: Generation) -> Generation:
        """Put the session where it was before the request, if the request asked for that."""
        if undo is None or target is not self._live:
            return generation
        frozen, host, parent = undo
        self.lineage.restore(frozen)
        target.become(host, parent, frozen, self._next_epoch())
        return replace(generation, epoch=target.epoch, position=target.position)

    def _nothing(self, request: GenerateRequest, reason: FinishReason,
                 begin: float) -> Generation:
        session = self._sessions.get(request.session)
        return Generation(
            session=request.session, finish_reason=reason, text='', token_ids=(), prompt_tokens=0,
            tokens_reused=0, tokens_prefilled=0, completion_tokens=0,
            time_to_first_token=time.monotonic() - begin, tokens_per_second=0.0,
            epoch=session.epoch if session else 0, position=session.position if session else 0)

    @staticmethod
    def _settings(request: GenerateRequest) -> dict:
        chosen = {name: value for name, value in (
            ('temperature', request.temperature), ('top_p', request.top_p),
            ('top_k', request.top_k), ('seed', request.seed)) if value is not None}
        Sampling(**chosen)  # refuses what is out of range
        return chosen

    # -- capsules -------------------------------------------------------------------------------

    def save(self, session: str = DEFAULT_SESSION, name: str = '', *, overwrite: bool = False,
             pin: bool = False, persist: bool = False, align: bool = False,
             note: str = '') -> SaveResult:
        """
        Freeze a session's boundary under a name (one made up from its id, if left empty).

        :param persist: also write it to disk, in the background.
        :param align: freeze the last grid position instead, with the ids behind it as an unfolded
            tail, so that restore + append equals one cold prefill bit for bit.
        :raises NameExists, InvalidName, Capacity, InvalidArgument: nothing has changed then.
        """
        begin = time.monotonic()
        target = self.session(session)
        identity = uuid.uuid4().hex
        name = name or f'capsule-{identity[:8]}'
        self.store.check_free(name, overwrite)
        if persist and self.store.disk is None:
            raise InvalidArgument('persist needs a capsule directory; set capsules.directory, or '
                                  'save without persist.')
        if len(note) > 4096:
            raise InvalidArgument(f'the note has {len(note)} characters; 4096 are allowed.')
        if align:
            frozen, host, copied = self._freeze_aligned(target)
        else:
            frozen, copied = self._freeze(target)
            host = target.host
        capsule = Capsule(identity, name, target.parent_id, session, frozen.position,
                          bool(align or host.tail), time.time(), note, host, frozen, pin)
        self.store.put(capsule, overwrite)
        if not align:
            target.parent_id = identity
        if persist:
            self.store.persist(capsule)
        self._counts['saves'] += 1
        return SaveResult(self.store.info(capsule), copied, time.monotonic() - begin)

    def _freeze(self, target: Session) -> tuple[Frozen, int]:
        """Return the boundary of a session with one reference of its own."""
        if target is not self._live:
            return self.lineage.pool.hold(target.frozen), 0
        if not self.arena.valid:
            raise DeviceFault('the live state was invalidated by a fault and cannot be saved; '
                              'restore a capsule or reset the session.')
        return self.store.make_room(self.lineage.save)

    def _freeze_aligned(self, target: Session) -> tuple[Frozen, HostState, int]:
        grid, host = self.plan.grid, target.host
        kept = target.grid_boundary()
        if host.tail and not kept:
            raise InvalidArgument('this session was restored from an aligned capsule and has '
                                  'folded nothing since; use that capsule.')
        if kept is None:
            raise InvalidArgument(
                f'an aligned save needs a grid position (a multiple of {grid} tokens) that was '
                'reached purely by prefill, and this session has none: its prompt is shorter, or '
                'it was restored from a capsule behind it. Save without align.')
        full, copied = self._freeze(target)
        tail = full.position - kept.position
        if tail > grid:
            self.lineage.pool.release(full)
            raise InvalidArgument(
                f'the last pure grid position is {kept.position}, {tail} tokens back, which is '
                f'more than the grid of {grid}: the position lies in generated or later text. '
                'Save aligned right after the prompt, or without align.')
        rows = self.lineage.pool.rows.view(TOKENS)
        ids: list[int] = []
        for _, place, count in runs(full.pages, 0, full.position, kept.position):
            ids += rows[place:place + count].view(-1).tolist()
        frozen = Frozen(kept.position, kept.block, full.pages[:pages_for(kept.position)])
        self.lineage.pool.hold(frozen)
        self.lineage.pool.release(full)
        return frozen, replace(host, schedule=host.schedule.cut(kept.position),
                               tail=(*ids, *host.tail)), copied

    def restore(self, session: str = DEFAULT_SESSION, capsule: str = '', *,
                seed: int | None = None) -> RestoreResult:
        """
        Make a capsule the boundary of a session (created on first use), and the session live.

        While another session generates, the session is only pointed at the capsule.

        :param seed: start another random sequence.
        :raises UnknownCapsule, Corrupt, Incompatible, Busy, Capacity: nothing has changed then.
        """
        begin = time.monotonic()
        if seed is not None:
            Sampling(seed=seed)
        self._check_sessions([session])
        found = self.store.find(capsule)
        if session in self._sessions:
            self._idle(self._sessions[session], 'restore')
        frozen = self.store.promote(found)
        if found.tokens and not found.position:
            raise InvalidArgument(f'capsule {capsule!r} would reuse nothing; prefill it again.')
        target = self._obtain(session)
        copied = self._assign(target, frozen, found.host, found.id, seed)
        self._counts['restores'] += 1
        return RestoreResult(self.store.info(found), target.epoch, found.position, copied,
                             time.monotonic() - begin)

    def _assign(self, target: Session, frozen: Frozen, host: HostState, parent_id: str,
                seed: int | None) -> int:
        """Point a session at a frozen boundary and, unless another one generates, make it live."""
        copied = 0
        if self._running is not None:
            self._point(target, frozen, seed)
        else:
            if target is not self._live:
                copied += self._park_live()
            copied += self.lineage.restore(frozen)
            if target is not self._live:
                self.lineage.pool.release(target.frozen)
                target.frozen, self._live = None, target
            if seed is not None:
                self._reseed(seed)
        target.become(host, parent_id, frozen, self._next_epoch())
        return copied

    def _point(self, target: Session, frozen: Frozen, seed: int | None) -> None:
        self.lineage.pool.hold(frozen)
        if target.frozen is not None:
            self.lineage.pool.release(target.frozen)
        target.frozen, target.reseed = frozen, seed

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
        self._check_sessions(names)
        source = None if capsule else self.session(source_session or DEFAULT_SESSION)
        for name in names:
            if source is not None and name == source.name:
                raise InvalidArgument(f'branch {name!r} is the source itself; choose another '
                                      'name.')
            if name in self._sessions:
                self._idle(self._sessions[name], 'fork onto it')
        copied = 0
        if source is None:
            found = self.store.find(capsule)
            frozen = self.lineage.pool.hold(self.store.promote(found))
        else:
            frozen, copied = self._freeze(source)
            found = Capsule(uuid.uuid4().hex, '', source.parent_id, source.name, frozen.position,
                            bool(source.host.tail), time.time(), 'implicit save of a fork',
                            source.host, frozen)
            source.parent_id = found.id
        try:
            for name, seed in itertools.zip_longest(names, seeds):
                branch = self._obtain(name)
                if branch is self._live:
                    self._assign(branch, frozen, found.host, found.id, seed)
                else:
                    self._point(branch, frozen, seed)
                    branch.become(found.host, found.id, frozen, self._next_epoch())
            info = self.store.info(found)
        finally:
            self.lineage.pool.release(frozen)
        self._counts['forks'] += 1
        return ForkResult(info, tuple(names), copied, time.monotonic() - begin)

    def rollback(self, session: str = DEFAULT_SESSION, *,
                 to: Literal['position', 'tokens', 'turns'], value: int, expected_epoch: int = 0,
                 max_replay: int | None = None, control: Control | None = None) -> RollbackResult:
        """
        Go back to a position, by tokens, or by turns.

        :param expected_epoch: refuse if the session was restored or rolled back since; 0 for any.
        :param max_replay: refuse a replay of more tokens.
        :raises InvalidArgument, UnknownSession, Busy: nothing has changed then.
        """
        begin = time.monotonic()
        target = self.session(session)
        self._idle(target, 'roll back')
        if expected_epoch and expected_epoch != target.epoch:
            raise InvalidArgument(f'session {session!r} is in epoch {target.epoch}, not '
                                  f'{expected_epoch}: it was restored, reset or rolled back '
                                  'meanwhile. Read its state and decide again.')
        position, host = target.position + len(target.host.tail), target.host
        if value < 0:
            raise InvalidArgument(f'the value of a rollback must not be negative: {value}.')
        if to == 'position':
            goal = value
        elif to == 'tokens':
            goal = position - value
        elif to == 'turns':
            if value > len(host.turns):
                raise InvalidArgument(f'session {session!r} has {len(host.turns)} turns; '
                                      f'{value} cannot be undone.')
            goal = host.turns[-value][0] if value else position
        else:
            raise InvalidArgument(f'roll back to a position, or by tokens or turns, not {to!r}.')
        if not 0 <= goal <= position:
            raise InvalidArgument(f'session {session!r} has {position} tokens; {value} is beyond '
                                  'that.')
        copied = self._activate(target)
        replayed, moved = target.rollback(goal, max_replay, control)
        target.epoch = self._next_epoch()
        self._counts['rollbacks'] += 1
        self._counts['tokens_replayed'] += replayed
        return RollbackResult(target.epoch, target.position, replayed, copied + moved,
                              time.monotonic() - begin)

    def reset(self, session: str = DEFAULT_SESSION) -> RestoreResult:
        """
        Make a session the empty boundary, with the configured sampler settings.

        :raises Busy, UnknownSession: nothing has changed then.
        """
        begin = time.monotonic()
        target = self.session(session)
        self._idle(target, 'reset it')
        copied = self._assign(target, self._empty, HostState(), '', None)
        return RestoreResult(None, target.epoch, 0, copied, time.monotonic() - begin)

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
        found.pinned = pinned
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
        manifest, pool = self.arena.manifest, self.lineage.pool
        blocks, pages = pool.free()
        return {
            'model': self.model.spec, 'dtype': str(self.model.dtype).removeprefix('torch.'),
            'device': str(self.arena.device), 'threads': torch.get_num_threads(),
            'context': self.arena.capacity, 'grid': self.plan.grid,
            'vocabulary': self.model.config.vocab_size,
            'fixed_bytes': manifest.fixed_bytes, 'row_bytes': manifest.row_bytes,
            'arena_bytes': self.arena.storage.numel(), 'pool_bytes': pool.nbytes,
            'pool_used_bytes': pool.used_bytes, 'pool_free_blocks': blocks,
            'pool_free_pages': pages, 'fingerprint': self.fingerprint.digest,
            'sessions': len(self._sessions), 'load_seconds': self.load_seconds,
            **self._counts}

    def close(self) -> None:
        """Finish disk writes and let go of everything."""
        self.store.close()


def _device(name: str) -> str:
    if name not in ('auto', 'cpu', 'cuda'):
        raise InvalidArgument(f'device must be auto, cpu or cuda, not {name!r}.')
    if name == 'cuda':
        raise DeviceFault('the CUDA plan is not part of this version yet; configure device cpu '
                          'or auto.')
    return 'cpu'


def _check_memory(needed: int) -> None:
    try:
        import psutil
        available = psutil.virtual_memory().available
    except ImportError:
        return
    if needed > available:
        raise Capacity(f'the context and the capsule pool need {needed} bytes and {available} are '
                       'free; configure a smaller context.max_tokens or capsules.device_bytes.')
