"""
Promise 10: every class of state is load-bearing.

A boundary is copied by hand, buffer by buffer, onto an arena that holds another conversation of the
same length, once whole and once without one class. Stale bytes of another conversation are what a
forgetful restore would leave, and because the lengths are equal nothing but content gives it away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashrt_ros.arena import Arena, Role
from flashrt_ros.cli.checks import state
from flashrt_ros.cli.checks.base import Check, not_applicable, Sizes
from flashrt_ros.sampling import LOGITS

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine

Contents = dict[str, torch.Tensor]


def ablation_kv_only(engine: Engine, sizes: Sizes) -> Check:
    """What engines that cache K and V only would restore: rows, and nothing else."""
    return _ablate(engine, sizes, 'ablation_kv_only', {Role.RECURRENT, Role.CONV, Role.BOUNDARY})


def ablation_no_recurrent(engine: Engine, sizes: Sizes) -> Check:
    """Everything but the recurrent states."""
    return _ablate(engine, sizes, 'ablation_no_recurrent', {Role.RECURRENT})


def ablation_no_conv(engine: Engine, sizes: Sizes) -> Check:
    """Everything but the convolution windows."""
    return _ablate(engine, sizes, 'ablation_no_conv', {Role.CONV})


def ablation_no_boundary(engine: Engine, sizes: Sizes) -> Check:
    """Everything but logits, sampler and position."""
    return _ablate(engine, sizes, 'ablation_no_boundary', {Role.BOUNDARY})


def _ablate(engine: Engine, sizes: Sizes, name: str, left_out: set[Role]) -> Check:
    arena = engine.arena
    present = {b.role for b in arena.manifest.buffers}
    if not left_out & present or (name == 'ablation_kv_only' and not present & {
            Role.RECURRENT, Role.CONV}):
        return not_applicable(name, 'this model has no such state.')
    state.begin(engine, sizes, salt=10)
    engine.save(name=name)
    contents = contents_of(arena)
    suffix = state.random_ids(arena, 24, sizes.seed)
    want_bytes, want = state.snapshot(arena), logits_of(engine, suffix)

    state.begin(engine, sizes, salt=11)
    engine.restore(capsule=name)
    restored_bytes = state.differing(want_bytes, state.snapshot(arena))
    restored = _distance(want, logits_of(engine, suffix))
    whole_bytes, whole = _copied(engine, sizes, contents, set(), want_bytes, want, suffix)
    part_bytes, part = _copied(engine, sizes, contents, left_out, want_bytes, want, suffix)
    exact = restored_bytes == 0 and restored == 0.0 and whole_bytes == 0 and whole == 0.0
    words = ', '.join(sorted(role.value for role in left_out))
    return Check(
        name, exact and part_bytes > 0 and part > 0.0, _finite(part),
        'max abs logit difference',
        f'without {words}: {part_bytes} live bytes and the logits differ; the restore and a copy '
        f'by hand of everything differ by {restored_bytes + whole_bytes} bytes and '
        f'{max(restored, whole):g}.')


def _finite(value: float) -> float:
    return value if value != float('inf') else 1e308  # JSON has no infinity


def contents_of(arena: Arena) -> Contents:
    """Copy every buffer of the state by name, of rows the live ones."""
    position = arena.position
    return {b.name: (arena[b.name][:position] if b.role is Role.ROWS else arena[b.name]).clone()
            for b in arena.manifest.buffers if b.role is not Role.SCRATCH}


def put_back(arena: Arena, contents: Contents, left_out: set[Role]) -> None:
    """Copy buffers back by hand, but for some classes."""
    arena.will_write(0)
    for name, content in contents.items():
        buffer = arena.manifest.by_name[name]
        if buffer.role not in left_out:
            target = arena[name]
            (target[:len(content)] if buffer.role is Role.ROWS else target).copy_(content)


def logits_of(engine: Engine, suffix: list[int]) -> list[torch.Tensor]:
    """Logits at the boundary, after a given suffix, and after one given token more."""
    found = [engine.arena[LOGITS].clone()]
    for ids in (suffix, suffix[:1]):
        engine.plan.append(ids)
        found.append(engine.arena[LOGITS].clone())
    return found


def _copied(engine: Engine, sizes: Sizes, contents: Contents, left_out: set[Role],
            want_bytes: state.Snapshot, want: list[torch.Tensor],
            suffix: list[int]) -> tuple[int, float]:
    arena = engine.arena
    position = len(next(c for n, c in contents.items()
                        if arena.manifest.by_name[n].role is Role.ROWS))
    engine.reset()  # another conversation that ends at the same position
    engine.append(token_ids=state.random_ids(arena, position, sizes.seed + 12))
    put_back(arena, contents, left_out)
    changed = state.differing(want_bytes, state.snapshot(arena))
    return changed, _distance(want, logits_of(engine, suffix))


def _distance(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    if all(map(state.same_bytes, left, right)):
        return 0.0
    return max(5e-324, *map(state.distance, left, right))
