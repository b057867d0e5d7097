"""Is what the device computes right: against torch, against itself, against the contract."""

from __future__ import annotations

import gc
import random

import common
import torch

from flashrt_ros import sampling
from flashrt_ros.arena import Arena
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.capsule.pool import Pool
from flashrt_ros.cuda.copies import Mover
from flashrt_ros.cuda.plan import CudaGraphPlan

COUNTS = (1, 3, 20, 1, 100, 512, 300, 2)


def agrees(spec: str, dtype: str) -> dict:
    """Compare every buffer with the torch form in fp32; beside it, how far torch itself is off."""
    model, plan = common.build(spec, dtype, 2048)
    exact, usual = common.reference(model, 2048), common.plain(model, 2048)
    vocabulary = model.config.vocab_size
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    for index, count in enumerate(COUNTS):
        chunk = common.ids(count, vocabulary, index)
        for each in (plan, exact, usual):
            each.append(chunk)
        for total, part in ((ours, plan), (theirs, usual)):
            for kind, value in common.distances(part.arena, exact.arena).items():
                total[kind] = max(total.get(kind, 0.0), value)
    limit = 1e-3 if dtype == 'float32' else 0.0
    ok = all(value <= max(limit, 1.3 * theirs[kind] + 3e-3 * (dtype == 'bfloat16'))
             for kind, value in ours.items())
    return {'ok': ok, 'ours': ours, 'torch': theirs}


def graph_equals_eager(spec: str, dtype: str) -> dict:
    """Fold and sample with graphs and with single launches: all bytes of the state are equal."""
    model, plan = common.build(spec, dtype, 1024)
    other = CudaGraphPlan(model, common.arena_of(model, 1024), eager=True)
    tokens: list[list[int]] = [[], []]
    for index, each in enumerate((plan, other)):
        for seed, count in enumerate((40, 2, 200)):
            each.append(common.ids(count, model.config.vocab_size, seed))
        sampling.write(each.arena, sampling.Sampling(0.8, 50, 0.95, 5), 0)
        for _ in range(8):
            each.step(tokens[index].append)
    same = bool((plan.arena.storage == other.arena.storage).all().item())
    return {'ok': same and tokens[0] == tokens[1], 'tokens': tokens[0]}


def capture_side_effect_free(spec: str, dtype: str) -> dict:
    """Build a plan over a state of random bytes: not one byte changes."""
    model = common.load_model(spec, dtype=dtype, device='cuda')
    arena = common.arena_of(model, 1024)
    arena.storage.random_(0, 256)
    arena.scratch.random_(0, 256)
    before, scratch = arena.storage.clone(), arena.scratch.clone()
    CudaGraphPlan(model, arena)
    torch.cuda.synchronize()
    return {'ok': bool((arena.storage == before).all().item()
                       and (arena.scratch == scratch).all().item())}


def sampler(spec: str) -> dict:
    """Tokens of the device against the reference on the CPU, same logits, settings, counters."""
    model, plan = common.build(spec, 'bfloat16', 64)
    vocabulary = model.config.vocab_size
    mirror = Arena(plan.arena.manifest, 64)
    generator = torch.Generator().manual_seed(3)
    wrong = []
    settings = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 50, 1.0), (0.9, 0, 0.9), (0.8, 40, 0.95),
                (1.5, 1000, 0.5), (0.05, 0, 0.999), (1.0, 1, 1.0)]
    total = 0
    for number, (temperature, top_k, top_p) in enumerate(settings * 4):
        logits = torch.randn(vocabulary, generator=generator) * (1 + number % 5)
        if number % 3 == 2:
            logits = (logits * 8).bfloat16().float()  # many ties
        for arena in (mirror, plan.arena):
            arena['logits'].copy_(logits)
            sampling.write(arena, sampling.Sampling(temperature, top_k, top_p, 99), number)
        expected = sampling.sample(mirror)
        plan._sample()
        found = int(plan.arena['mailbox'].item())
        total += 1
        if found != expected:
            wrong.append((number, temperature, top_k, top_p, found, expected))
    return {'ok': not wrong, 'checked': total, 'wrong': wrong[:5]}


def lineage(spec: str, operations: int = 400) -> dict:
    """Random saves, restores and folds against full copies; addresses and memory stay."""
    model, plan = common.build(spec, 'bfloat16', 1024)
    arena = plan.arena
    pool = Pool(arena.manifest, max(64 << 20, 48 * arena.manifest.fixed_bytes), 'cuda')
    line = Lineage(arena, pool)
    line.mover = Mover(arena, pool)
    rng = random.Random(1)
    kept: list = []
    failures = restores = 0
    copy: list = []
    addresses = {name: view.data_ptr() for name, view in arena.views.items()}
    torch.cuda.synchronize()
    gc.collect()
    memory = torch.cuda.memory_allocated()
    line.save()
    for number in range(operations):
        choice = rng.random()
        if choice < 0.45 and arena.position < 900:
            plan.append(common.ids(rng.choice((1, 3, 30, 90)), 256, number))
        elif choice < 0.65 and len(kept) < 6:
            frozen, _ = line.save()
            copy = [part.clone() for part in arena.live_bytes()]
            kept.append((frozen, copy))
        elif kept and choice < 0.9:
            frozen, copy = rng.choice(kept)
            if rng.random() < 0.3:
                arena.storage.random_(0, 256)
                arena.clean = 0
            line.restore(frozen)
            restores += 1
            failures += arena.position != frozen.position
            failures += int(arena['position'].item()) != frozen.position
            failures += not all((a == b).all().item() for a, b in
                                zip(arena.live_bytes(), copy, strict=True))
        elif kept:
            frozen, copy = kept.pop(rng.randrange(len(kept)))
            pool.release(frozen)
    frozen = kept[0][0] if kept else line.save()[0]
    kept.clear()
    del copy
    for _ in range(1000):
        line.restore(frozen)
        plan.append([1])
    torch.cuda.synchronize()
    gc.collect()
    flat = torch.cuda.memory_allocated() - memory
    stable = addresses == {name: view.data_ptr() for name, view in arena.views.items()}
    return {'ok': not failures and stable and abs(flat) < 1 << 20, 'restores': restores + 1000,
            'failures': failures, 'stable_addresses': stable, 'memory_growth': flat}


def stream_ordered_save(spec: str) -> dict:
    """Save behind a slow kernel and a fold, then fold on: the capsule holds the bytes between."""
    model, plan = common.build(spec, 'bfloat16', 1024)
    arena = plan.arena
    pool = Pool(arena.manifest, max(64 << 20, 24 * arena.manifest.fixed_bytes), 'cuda')
    line = Lineage(arena, pool)
    line.mover = Mover(arena, pool)
    start, _ = line.save()
    plan.append(common.ids(77, 256))
    torch.cuda.synchronize()
    expected = [part.clone() for part in arena.live_bytes()]
    line.restore(start)
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # cycles
    plan.append(common.ids(77, 256))
    frozen, _ = line.save()
    plan.append(common.ids(50, 256, 4))
    line.restore(frozen)
    same = all((a == b).all().item() for a, b in zip(arena.live_bytes(), expected, strict=True))
    return {'ok': same}


def oracle(spec: str, dtype: str) -> dict:
    """Logits against `transformers` on the same weights and device: after prefill, after steps."""
    import transformers
    transformers.logging.set_verbosity_error()
    model, plan = common.build(spec, dtype, 2048)
    preset = spec.removeprefix('random:').partition('?')[0]
    config = transformers.Qwen3_5TextConfig(**model.presets[preset])
    with torch.device('cuda'):
        theirs = transformers.Qwen3_5ForCausalLM(config).to(model.dtype).eval()
    theirs.load_state_dict(dict(model.weights()), strict=False)
    theirs.tie_weights()
    exact = common.reference(model, 2048)
    text = common.ids(700, model.config.vocab_size)
    result: dict = {'transformers': transformers.__version__, 'ok': True}
    with torch.inference_mode():
        answer = theirs(input_ids=torch.tensor([text], device='cuda'), use_cache=True)
        for start in range(0, 700, plan.grid):
            plan.append(text[start:start + plan.grid])
            exact.append(text[start:start + plan.grid])
        for step in range(4):
            want = answer.logits[0, -1].float()
            true = exact.arena['logits']
            ours = plan.arena['logits']
            scale = true.abs().max()
            off = ((ours - want).abs().max() / scale).item()
            result[f'step_{step}'] = {
                'ours_to_transformers': off,
                'ours_to_fp32': ((ours - true).abs().max() / scale).item(),
                'transformers_to_fp32': ((want - true).abs().max() / scale).item()}
            result['ok'] &= off < (1e-3 if dtype == 'float32' else 0.1)
            token = int(want.argmax())
            plan.append([token])
            exact.append([token])
            answer = theirs(input_ids=torch.tensor([[token]], device='cuda'),
                            past_key_values=answer.past_key_values, use_cache=True)
    return result
