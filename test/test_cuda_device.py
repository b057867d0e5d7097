"""The CUDA plan on a real device; skipped, with the reason, where there is none."""

import pytest
import torch

from flashrt_ros import sampling
from flashrt_ros.arena import Arena
from flashrt_ros.cuda import available
from flashrt_ros.engine import Engine, EngineConfig, GenerateRequest
from flashrt_ros.models import load_model
from flashrt_ros.plan import manifest_of

pytestmark = pytest.mark.skipif(bool(available.why_not()),
                                reason=f'no CUDA plan here: {available.why_not()}')

TEXT = [(31 * i) % 509 for i in range(700)]


def plan_on(arena_fill: int = 0xff, eager: bool = False):
    from flashrt_ros.cuda.plan import CudaGraphPlan
    model = load_model('random:tiny', dtype='float32', device='cuda')
    arena = Arena(manifest_of(model, model.config.vocab_size), 1024, 'cuda')
    for plane in arena.rows.planes:
        plane.fill_(arena_fill)
    return CudaGraphPlan(model, arena, eager=eager)


def test_graphs_and_single_launches_leave_equal_bytes():
    plans = [plan_on(), plan_on(eager=True)]
    tokens = [[], []]
    for plan, said in zip(plans, tokens, strict=True):
        for count in (2, 40, 300):
            plan.append(TEXT[:count])
        sampling.write(plan.arena, sampling.Sampling(0.8, 50, 0.9, 3), 0)
        for _ in range(8):
            plan.step(said.append)
    assert tokens[0] == tokens[1]
    assert torch.equal(plans[0].arena.storage, plans[1].arena.storage)


def test_a_capture_changes_no_byte():
    from flashrt_ros.cuda.plan import CudaGraphPlan
    model = load_model('random:tiny', dtype='float32', device='cuda')
    arena = Arena(manifest_of(model, model.config.vocab_size), 1024, 'cuda')
    arena.storage.random_(0, 256)
    before = arena.storage.clone()
    CudaGraphPlan(model, arena)
    torch.cuda.synchronize()
    assert torch.equal(arena.storage, before)


def test_a_restored_capsule_goes_on_as_if_nothing_had_been():
    engine = Engine(EngineConfig(model='random:tiny', device='cuda', context=2048,
                                 pool_bytes=32 << 20))
    engine.append(token_ids=TEXT)
    engine.save(name='here')
    said = [engine.generate(GenerateRequest(max_tokens=24, temperature=0.9, seed=5)).token_ids]
    for _ in range(3):
        engine.restore(capsule='here')
        said.append(engine.generate(
            GenerateRequest(max_tokens=24, temperature=0.9, seed=5)).token_ids)
    assert len(set(said)) == 1
    engine.close()


def test_the_sampler_of_the_device_agrees_with_the_reference():
    plan = plan_on()
    mirror = Arena(plan.arena.manifest, 1024)
    generator = torch.Generator().manual_seed(1)
    for number, settings in enumerate([(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 5, 1.0),
                                       (1.3, 0, 0.8), (0.9, 40, 0.9)] * 4):
        logits = torch.randn(512, generator=generator) * 3
        for arena in (mirror, plan.arena):
            arena['logits'].copy_(logits)
            sampling.write(arena, sampling.Sampling(*settings, seed=7), number)
        expected = sampling.sample(mirror)
        plan._sample()
        assert plan.arena['mailbox'].item() == expected
