"""Is what the device computes right: against torch, against itself, against the contract."""

from __future__ import annotations

from pathlib import Path
import tempfile

import common
import torch

from flashrt_ros import sampling
from flashrt_ros.arena import Arena
from flashrt_ros.engine import Engine, EngineConfig

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


def drafts(spec: str, dtype: str, positions=(40, 126, 700)) -> dict:
    """Blocks and verified drafts against steps: every live byte, over positions and guesses."""
    model, plan = common.build(spec, dtype, 1024)
    arena, wrong, checked = plan.arena, [], 0
    for position in positions:
        for settings in (sampling.Sampling(), sampling.Sampling(0.9, 40, 0.95, 7)):
            arena.reset()
            text = common.ids(position, model.config.vocab_size)
            for start in range(0, position, plan.grid):
                plan.append(text[start:start + plan.grid])
            sampling.write(arena, settings, 3)
            torch.cuda.synchronize()
            start_bytes, true, after = arena.storage.clone(), [], []
            for _ in range(4):
                true.append(plan.step())
                after.append([part.clone() for part in arena.live_bytes()])
            for right in range(6):  # 5: known tokens in one block
                arena.storage.copy_(start_bytes)
                arena.set_position(position)
                guesses = [*true[:right], *((token + 1) % 256 for token in true[right:])]
                said: list[int] = []
                if right < 5:
                    taken = plan.verify(guesses, said.append)
                else:
                    plan.append(true)
                    arena['sampler.counter'].add_(4)
                    taken, said = 4, true
                same = [bool((a == b).all().item()) for a, b in
                        zip(arena.live_bytes(), after[taken - 1], strict=True)]
                checked += 1
                if taken != max(1, min(4, right)) or said != true[:taken] or not all(same):
                    wrong.append((position, settings.temperature, right, taken, same))
    return {'ok': not wrong, 'checked': checked, 'wrong': wrong[:6]}


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


def contract(spec: str, dtype: str, names: list[str]) -> dict:
    """Run checks of `flashrt-ros verify` on one engine."""
    from flashrt_ros.cli import checks
    from flashrt_ros.cli.opening import pool_bytes
    with tempfile.TemporaryDirectory() as directory:
        context = 2048
        engine = Engine(EngineConfig(
            model=spec, dtype=dtype, device='cuda', context=context, directory=directory,
            pool_bytes=pool_bytes(spec, dtype, 'cuda', context, rows=16 * context, blocks=64)))
        sizes = checks.Sizes(model=spec, dtype=dtype, context=context, directory=Path(directory),
                             seconds=10.0)
        found = list(checks.run(engine, sizes, names))
        engine.close()
    return {'ok': all(check.passed for check in found), **{
        check.name: check.figure if check.passed else check.detail for check in found}}


def oracle(spec: str, dtype: str) -> dict:
    """Logits against `transformers` on the same weights and device: `flashrt-ros bench oracle`."""
    from flashrt_ros.cli.benchmarks import agreement
    from flashrt_ros.cli.opening import pool_bytes
    engine = Engine(EngineConfig(
        model=spec, dtype=dtype, device='cuda', context=1024,
        pool_bytes=pool_bytes(spec, dtype, 'cuda', 1024, rows=1024, blocks=8)))
    rows, sentence = agreement.rows(engine, [700], 4, 1)
    engine.close()
    return {'ok': bool(rows) and all(row['passed'] for row in rows), 'rows': rows,
            'transformers': sentence}
