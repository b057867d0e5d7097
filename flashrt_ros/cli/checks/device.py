"""What only a plan with graphs, a stream and addresses that are baked in can get wrong."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch

from flashrt_ros import sampling
from flashrt_ros.arena import Arena
from flashrt_ros.cli.checks import segments, state, steady
from flashrt_ros.cli.checks.base import Check, Sizes

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine

RESTORES = 1000
SLOW = 200_000_000  # clock cycles, about a tenth of a second: the host is done long before


def unequal(left: torch.Tensor, right: torch.Tensor) -> int:
    """Count the bytes that differ."""
    return int((left != right).sum().item())


def graph_equals_eager(engine: Engine, sizes: Sizes) -> Check:
    """Replays of graphs and single launches of the same kernels leave the same bytes."""
    arena, plan = engine.arena, engine.plan
    counts = [min(count, plan.grid) for count in (plan.grid, 100, 20, 3, 1)]
    state.begin(engine, sizes, length=100, salt=26)
    frozen, _ = engine.lineage.save()

    def append() -> None:
        for index, count in enumerate(counts):
            plan.append(state.random_ids(arena, count, index))

    append()
    draft = [plan.step() for _ in range(3)]  # a guess that holds

    def run() -> list[int]:
        append()
        tokens: list[int] = []
        plan.verify(draft, tokens.append)
        tokens += [plan.step() for _ in range(sizes.steps // 4)]
        sampling.write(arena, sampling.Sampling(0.8, 50, 0.95, 5), 0)
        plan.verify(draft, tokens.append)
        return tokens + [plan.step() for _ in range(sizes.steps // 4)]

    found: list[tuple[torch.Tensor, torch.Tensor, list[int]]] = []
    device_plan: Any = plan
    for eager in (False, True):
        engine.lineage.restore(frozen)
        state.poison_dead(arena, 'nan')  # so that dead bytes are equal at the start
        device_plan.eager = eager
        try:
            tokens = run()
        finally:
            device_plan.eager = False
        found.append((arena.storage.clone(), arena.scratch.clone(), tokens))
    engine.lineage.pool.release(frozen)
    replays, launches = found
    wrong = unequal(replays[0], launches[0]) + unequal(replays[1], launches[1])
    same = replays[2] == launches[2]
    return Check(
        'graph_equals_eager', wrong == 0 and same, wrong, 'bytes that differ',
        f'of {arena.storage.numel()} bytes, dead rows too, after appends of '
        f'{", ".join(map(str, counts))} tokens and {len(replays[2])} steps, greedy and sampled, '
        f'some by a draft, from one capsule: by {len(device_plan.graphs)} graphs, and by launching '
        f'the kernels one after another; the tokens are {"the same" if same else "NOT the same"}.')


def capture_side_effect_free(engine: Engine, sizes: Sizes) -> Check:
    """Building a plan, capture of all graphs included, changes no byte of any state."""
    arena = engine.arena
    state.begin(engine, sizes, length=60, salt=27)
    other = Arena(arena.manifest, arena.capacity, arena.device)
    blocks = (other.storage, other.scratch, arena.storage, arena.scratch)
    for block in blocks[:2]:
        state.spoil(block, 'random')
    before = [block.clone() for block in blocks]
    build: Any = type(engine.plan)
    plan = build(engine.model, other, engine.plan.grid)
    torch.cuda.synchronize(arena.device)
    wrong = sum(map(unequal, before, blocks))
    return Check(
        'capture_side_effect_free', wrong == 0 and len(plan.graphs) > 0, wrong,
        'bytes that changed',
        f'{len(plan.graphs)} graphs were captured over {other.storage.numel()} bytes of random '
        f'state, beside the live state of {arena.storage.numel()} bytes.')


def stable_addresses(engine: Engine, sizes: Sizes) -> Check:
    """A thousand restores: no address moves, no graph is added, no memory is asked for."""
    device, plan = engine.arena.device, engine.plan
    state.begin(engine, sizes, length=70, salt=28)
    engine.save(name='short')
    state.begin(engine, sizes, salt=28)
    engine.save(name='long')
    graphs: Any = getattr(plan, 'graphs', {})

    def look() -> tuple:
        torch.cuda.synchronize(device)
        return ([(name, id(graph)) for name, graph in graphs.items()],
                torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device),
                torch.cuda.memory_stats(device).get('allocation.all.allocated', 0))

    def places() -> set[int]:
        work = segments.work_space(engine).values()
        return steady.addresses(engine) | {tensor.data_ptr() for tensor in work}

    def restore(count: int, seen: set[int]) -> int:
        for index in range(count):
            engine.restore(capsule=('short', 'long')[index % 2])
            if index % 10 == 9:
                engine.append(token_ids=[1, 2])
            seen |= steady.addresses(engine)
        return count

    where, want = places(), look()
    seen = set(where)
    restore(20, seen)
    begun = look()
    done = restore(min(RESTORES, sizes.cycles), seen)
    found = look()
    moved = len(where ^ (seen | places()))
    allocated, reserved, asked = (b - a for a, b in zip(begun[1:], found[1:]))
    same = want[0] == found[0] and not allocated and not reserved and not asked
    return Check(
        'stable_addresses', same and moved == 0 and done > 0,
        moved + abs(allocated) + abs(reserved) + asked, 'addresses moved, bytes more, allocations',
        f'over {done} restores of two capsules in turn, every tenth with an append: {moved} of '
        f'{len(where)} addresses moved, work space too; {len(want[0])} graphs before and '
        f'{len(found[0])} after; {allocated:+d} bytes allocated, {reserved:+d} reserved; the '
        f'allocator was asked {asked} times.')


def stream_ordered_save(engine: Engine, sizes: Sizes) -> Check:
    """A save behind slow work, and writes behind the save: the capsule is what lay between."""
    arena = engine.arena
    ids = state.random_ids(arena, 60, sizes.seed)
    state.begin(engine, sizes, length=100, salt=29)
    engine.save(name='start')
    engine.append(token_ids=ids)
    want = state.snapshot(arena)
    wrong, ahead, rounds = 0, 0, 3
    for index in range(rounds):
        engine.restore(capsule='start')
        torch.cuda.synchronize(arena.device)
        torch.cuda._sleep(SLOW)
        slow = torch.cuda.Event()
        slow.record()
        engine.append(token_ids=ids)
        engine.save(name='between', overwrite=True)
        engine.append(token_ids=ids[::-1])
        arena.fixed.fill_(0x5a)  # and a write that nothing announces
        ahead += not slow.query()
        torch.cuda.synchronize(arena.device)
        arena.will_write(0)
        state.spoil(arena.storage, ('nan', 'random')[index % 2])
        engine.restore(capsule='between')
        wrong += state.differing(want, state.snapshot(arena))
    return Check(
        'stream_ordered_save', wrong == 0 and ahead == rounds, wrong, 'bytes that differ',
        f'{rounds} times a kernel of about 0.1 s, an append, a save, another append and a stray '
        f'write were queued; the host had queued all of it before the first ended {ahead} of '
        f'{rounds} times; {state.live_size(want)} live bytes compared.')
