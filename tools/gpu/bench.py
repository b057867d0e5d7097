"""How fast: decode, its parts, prefill, capsules, first token."""

from __future__ import annotations

import gc

import common
import torch

from flashrt_ros import sampling
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.capsule.pool import Pool
from flashrt_ros.cuda import decode as decoding
from flashrt_ros.cuda.copies import Mover
from flashrt_ros.cuda.plan import CudaGraphPlan

BANDWIDTH = 4.8e12  # bytes a second, by the datasheet


def at(plan, position: int) -> None:
    """Pretend that many rows are folded; they hold small numbers."""
    arena = plan.arena
    for buffer in arena.manifest.rows:
        view = arena[buffer.name]
        if view.dtype.is_floating_point:
            view[:position].normal_(0, 0.5)
        else:
            view[:position].zero_()
    arena.set_position(position)


def state_bytes(model, arena, position: int) -> int:
    """Weights once (a tied table too), recurrent state read and written, live rows read."""
    weights = model.parameters.nbytes
    if not model.config.tied:  # only a row of the embedding is read
        weights -= model.parameters[model.embedding_name].nbytes
    recurrent = sum(b.nbytes for b in arena.manifest.fixed if b.role.value == 'recurrent')
    return weights + 2 * recurrent + position * arena.manifest.row_bytes


def decode(model, plan, positions=(1024, 4096, 16384)) -> list[dict]:
    watch = common.Stopwatch(30)
    rows = []
    for position in positions:
        at(plan, position)
        graph = plan.graphs['step']
        micros = watch(graph.replay, before=lambda p=position: plan.arena.set_position(p))
        plan.mail.forget()
        plan.arena.set_position(position)
        many = common.wall(lambda: [plan.step() for _ in range(16)], 5)
        size = state_bytes(model, plan.arena, position)
        sampling.write(plan.arena, sampling.Sampling(0.8, 40, 0.95, 5), 0)
        sampled = watch(graph.replay, before=lambda p=position: plan.arena.set_position(p))
        sampling.write(plan.arena, sampling.Sampling(), 0)
        rows.append({'position': position, 'device_us': round(micros, 1),
                     'sampled_us': round(sampled, 1),
                     'wall_us': round(many['median_us'] / 16, 1),
                     'tokens_per_s': round(16e6 / many['median_us'], 1),
                     'share': round(size / BANDWIDTH * 1e6 / micros, 3),
                     'state_bytes': size})
    return rows


def ahead(model, context: int) -> dict[str, list[float]]:
    """Microseconds of a step at 4k and 16k, by what is asked for early and rows of a split."""
    usual, found = (decoding.AHEAD, decoding.SPLIT), {}
    for size, split in ((0, 128), (1, 128), (2, 128), (4, 128), (6, 128), (8, 128), (12, 128),
                        (4, 64)):
        decoding.AHEAD, decoding.SPLIT = size << 20, split
        plan = CudaGraphPlan(model, common.arena_of(model, context))
        watch, row = common.Stopwatch(15), []
        for position in (4096, 16384):
            at(plan, position)
            row.append(round(watch(plan.graphs['step'].replay,
                                   before=lambda p=plan, q=position: p.arena.set_position(q)), 1))
        found[f'{size} MiB, {split}'] = row
        del plan
        gc.collect()
        torch.cuda.empty_cache()
    decoding.AHEAD, decoding.SPLIT = usual
    return found


def blocks(plan, positions=(1024, 4096, 16384)) -> list[dict]:
    """Microseconds of a step beside a block of four known tokens and a verified draft."""
    watch, rows = common.Stopwatch(20), []
    plan.mail.send([1, 2, 3, 4])
    for position in positions:
        row: dict = {'position': position}
        for name in ('step', 'fold', 'few', 'verify'):
            at(plan, position)
            row[name] = round(watch(plan.graphs[name].replay,
                                    before=lambda q=position: plan.arena.set_position(q)), 1)
        rows.append(row)
    plan.mail.forget()
    return rows


def parts(model, plan, position: int = 4096) -> dict[str, float]:
    """Microseconds of each kind of launch in a step: all of a kind in a graph of their own."""
    at(plan, position)
    kinds: dict[str, list] = {'sample': [plan._sample], 'head': [plan._decode.head(None)]}
    for launch in plan._decode.layers:
        name = launch.kernel.name
        if name == 'gemv':
            name = f'gemv {tuple(launch.args[0].shape)}'
        kinds.setdefault(name, []).append(launch)
    watch, found = common.Stopwatch(15), {}
    for name, launches in kinds.items():
        graph = common.captured(lambda launches=launches: [each() for each in launches])
        micros = watch(graph.replay, before=lambda: plan.arena.set_position(position))
        entry = {'each_us': round(micros / len(launches), 2), 'count': len(launches)}
        if name.startswith('gemv') or name == 'head':
            weight = launches[0].args[0]
            entry['tb_s'] = round(weight.nbytes * len(launches) / micros / 1e6, 2)
        found[name] = entry
    return found


def prefill(plan, positions=(0, 3584, 15872), buckets=(32, 128, 512)) -> list[dict]:
    watch = common.Stopwatch(8)
    rows = []
    for bucket in buckets:
        plan.mail.send(list(range(1, bucket + 1)))
        for position in positions:
            at(plan, position)
            micros = watch(plan.graphs[bucket].replay,
                           before=lambda p=position: plan.arena.set_position(p))
            rows.append({'bucket': bucket, 'position': position, 'device_us': round(micros, 1)})
    return rows


def profile(plan, name, position: int, top: int = 14) -> dict[str, list]:
    """Device time by kernel within one graph, from the profiler."""
    from torch.profiler import profile as profiler
    from torch.profiler import ProfilerActivity
    at(plan, position)
    if isinstance(name, int):
        plan.mail.send(list(range(1, name + 1)))
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        plan.graphs[name].replay()
        torch.cuda.synchronize()
    table = sorted(((e.device_time_total, e.count, e.key) for e in seen.key_averages()),
                   reverse=True)
    return {key[:60]: [round(total, 1), count] for total, count, key in table[:top]}


def capsules(plan, positions=(1024, 4096, 16384)) -> list[dict]:
    arena = plan.arena
    manifest = arena.manifest
    pool = Pool(manifest, 10 * manifest.fixed_bytes
                + (3 * max(positions) + 8192) * manifest.row_bytes, 'cuda')
    line = Lineage(arena, pool)
    line.mover = Mover(arena, pool)
    return [_capsule(plan, pool, line, position) for position in positions]


def _capsule(plan, pool: Pool, line: Lineage, position: int) -> dict:
    arena, watch = plan.arena, common.Stopwatch(20)
    manifest = arena.manifest
    at(plan, position)
    arena.will_write(0)
    frozen, size = line.save()
    source = torch.ones(size, dtype=torch.uint8, device='cuda')
    target = torch.zeros_like(source)
    saved: list = []

    def save() -> None:
        arena.will_write(0)
        saved.append(line.save()[0])

    def forget() -> None:
        while saved:
            pool.release(saved.pop())

    def restore() -> None:
        line.restore(frozen)

    def dirty() -> None:
        arena.will_write(0)

    def diverged() -> None:
        arena.will_write(position - 1)

    def copy() -> None:
        target.copy_(source)

    small = source[:manifest.fixed_bytes]
    row = {'position': position, 'bytes': size, 'fixed_bytes': manifest.fixed_bytes}
    row['copy_us'] = watch(copy)
    row['save_us'] = watch(save, before=forget)
    line.restore(frozen)
    row['restore_full_us'] = watch(restore, before=dirty)
    row['restore_family_us'] = watch(restore, before=diverged)
    row['copy_fixed_us'] = watch(lambda: target[:manifest.fixed_bytes].copy_(small))
    row['wall_copy'] = common.wall(copy)
    row['wall_restore_full'] = common.wall(lambda: (dirty(), restore()))
    row['wall_restore_family'] = common.wall(lambda: (diverged(), restore()))
    row['wall_save'] = common.wall(save, before=forget)
    forget()
    pool.release(frozen)
    return {k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}


def first_token(plan, positions=(2048, 4096, 8192, 16384), suffix: int = 32) -> list[dict]:
    """Restore and a suffix up to the first token, beside our own cold prefill of all of it."""
    arena = plan.arena
    pool = Pool(arena.manifest, 10 * arena.manifest.fixed_bytes
                + (2 * max(positions) + 8192) * arena.manifest.row_bytes, 'cuda')
    line = Lineage(arena, pool)
    line.mover = Mover(arena, pool)
    plan.mail.forget()
    arena.set_position(0)
    arena.fixed.zero_()
    empty, _ = line.save()
    return [_first_token(plan, pool, line, empty, position, suffix) for position in positions]


def _first_token(plan, pool: Pool, line: Lineage, empty, position: int, suffix: int) -> dict:
    arena, tail = plan.arena, common.ids(suffix, 256, 1)
    text = common.ids(position, 256)

    def prefix() -> None:
        for start in range(0, position, plan.grid):
            plan.append(text[start:start + plan.grid])

    def cold() -> None:
        line.restore(empty)
        prefix()
        plan.append(tail)
        plan.step()

    cold_time = common.until_token(cold, 2)
    line.restore(empty)
    prefix()
    frozen, _ = line.save()

    def warm() -> None:
        line.restore(frozen)
        plan.append(tail)
        plan.step()

    def warm_full() -> None:
        arena.will_write(0)
        warm()

    def at_once() -> None:
        line.restore(frozen)
        plan.step()

    row = {'position': position, 'suffix': suffix, 'cold': cold_time,
           'family': common.until_token(warm), 'full': common.until_token(warm_full),
           'suffix_0': common.until_token(at_once)}
    pool.release(frozen)
    return row
