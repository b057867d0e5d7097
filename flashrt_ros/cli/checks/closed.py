"""Promises 4 and 5: the manifest is closed, and dead rows are dead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TYPE_CHECKING

from flashrt_ros.arena import Arena, Manifest, POSITION
from flashrt_ros.cli.checks import guard, segments, state
from flashrt_ros.cli.checks.base import Check, Sizes

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine


def closed_manifest(engine: Engine, sizes: Sizes) -> Check:
    """A replay writes nothing outside arena and scratch, and a missing buffer is noticed."""
    arena, plan = engine.arena, engine.plan
    on_device = arena.device.type == 'cuda'
    # On a device every graph is replayed: the buckets, the fold of one token, the step.
    counts = [min(n, plan.grid) for n in ((70, 1, 20, plan.grid) if on_device else (70, 1))]

    def replay() -> None:
        for count in counts:
            plan.append(state.random_ids(arena, count, sizes.seed))
        for _ in range(3):
            plan.step()
        if on_device:
            plan.verify([1, 2, 3], lambda token: None)

    state.begin(engine, sizes, length=100, salt=8)
    frozen, _ = engine.lineage.save()
    replay()  # whatever is built once, at first use, is built now
    engine.lineage.restore(frozen)
    if on_device:
        check = _closed_on_a_device(engine, replay)
        engine.lineage.pool.release(frozen)
        return check
    verdict = guard.watch(replay, [arena.storage, arena.scratch])
    engine.lineage.pool.release(frozen)
    findings = verdict.offences[:3] + verdict.changed[:3] + verdict.survivors[:3]
    refused, buffers = _refusals(engine)
    detail = (f'writes outside arena and scratch in {verdict.operators} operators, '
              f'{verdict.hashed_bytes} bytes of older memory (weights too) hashed before and '
              f'after, and no tensor outlived the replay; {refused} of {buffers} manifests that '
              'lack one buffer were refused.')
    if findings:
        detail += ' Found: ' + '; '.join(findings) + '.'
    return Check('closed_manifest', verdict.total == 0 and refused == buffers
                 and verdict.operators > 0, verdict.total, 'findings', detail)


def _closed_on_a_device(engine: Engine, replay: Callable[[], None]) -> Check:
    arena = engine.arena
    work = segments.work_space(engine)
    begun = arena.position
    verdict = segments.watch(replay, [arena.storage, arena.scratch, *work.values()], arena.device)
    moved = arena.position - begun
    findings = verdict.changed[:4] + verdict.survivors[:4]
    refused, buffers = _refusals(engine)
    own = {name: t for name, t in work.items() if t.device.type == 'cuda'}
    pinned = {name.rstrip('.0123456789') for name, t in work.items() if t.device.type == 'cpu'}
    detail = (f'{verdict.digested} bytes in {verdict.segments} segments of the device (weights '
              f'and pool too) and {verdict.host} bytes of tensors on the host digested before and '
              f'after a replay of {moved} tokens; it may write arena, scratch, '
              f'{sum(t.untyped_storage().nbytes() for t in own.values())} bytes of work space of '
              f'the plan in {len(own)} tensors, {verdict.library} bytes that captured library '
              f'products work in, and pinned memory ({", ".join(sorted(pinned))}); {refused} of '
              f'{buffers} manifests that lack one buffer were refused.')
    if findings:
        detail += ' Found: ' + '; '.join(findings) + '.'
    return Check('closed_manifest', verdict.total == 0 and refused == buffers and moved > 0,
                 verdict.total, 'findings', detail)


def _refusals(engine: Engine) -> tuple[int, int]:
    """Bind the model to arenas whose manifest lacks one buffer; count those that are refused."""
    buffers = [b for b in engine.arena.manifest.buffers if b.name != POSITION]
    plan: Any = type(engine.plan)
    refused = 0
    for missing in buffers:
        arena = Arena(Manifest([b for b in buffers if b is not missing]), 2, engine.arena.device)
        try:
            plan(engine.model, arena)
        except Exception as error:
            refused += missing.name in str(error)
    return refused, len(buffers)


def dead_rows(engine: Engine, sizes: Sizes) -> Check:
    """Rows at and above the position, and scratch, may hold anything: no result changes."""
    arena = engine.arena
    suffix = state.random_ids(arena, 40, sizes.seed)
    total = spoilt = 0

    def follow() -> list[state.Trace]:
        nonlocal total
        traces = [state.steps(engine, sizes.steps // 4)]
        engine.plan.append(suffix)
        traces.append(state.steps(engine, 4))
        total += sum(len(t.logits) for t in traces)
        return traces

    state.begin(engine, sizes, salt=9)
    want = follow()
    total, wrong = 0, 0
    for pattern in ('nan', 'random'):
        state.begin(engine, sizes, salt=9)
        spoilt += state.poison_dead(arena, pattern)
        wrong += sum(a.equal_steps(b) != len(a.tokens) or not a.equals(b)
                     for a, b in zip(want, follow(), strict=True))
        state.begin(engine, sizes, salt=9)  # the same before a prefill of several chunks
        engine.reset()
        state.poison_dead(arena, pattern)
        engine.append(token_ids=state.random_ids(arena, sizes.prompt, sizes.seed + 9))
        state.generate(engine, 5)
        wrong += not want[0].equals(state.steps(engine, sizes.steps // 4))
    return Check(
        'dead_rows', wrong == 0, wrong, 'continuations that changed',
        f'{spoilt} dead bytes held NaN, then random bytes, before steps, before an append and '
        f'before a whole prefill; {total} logits vectors were compared as bytes.')
