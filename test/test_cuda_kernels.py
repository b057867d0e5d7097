"""The CUDA kernels against their torch references, on an emulated device."""

from pathlib import Path
import random
import shutil

import pytest
import torch

from flashrt_ros import sampling
from flashrt_ros.arena import Arena, Buffer, Manifest, Role
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.capsule.pool import Pool
from flashrt_ros.models import load_model
from flashrt_ros.models.qwen3_5 import Qwen35
from flashrt_ros.plan import EagerPlan, manifest_of

pytestmark = pytest.mark.skipif(not shutil.which('g++'), reason='the emulated device needs g++')


def plans(patch, dtype, spec='random:tiny', context=256, grid=128):
    """Return the CUDA plan on the emulator and the reference plan, which runs in fp32."""
    patch.syspath_prepend(str(Path(__file__).parent))
    import cuda_emulator

    from flashrt_ros.cuda.plan import CudaGraphPlan
    cuda_emulator.install(patch)
    model = load_model(spec, dtype=dtype)
    reference = load_model(spec, dtype='float32')
    for (_, to), (_, origin) in zip(reference.weights(), model.weights(), strict=True):
        to.copy_(origin)
    vocabulary = model.config.vocab_size
    arenas = [Arena(manifest_of(m, vocabulary), context) for m in (model, reference)]
    for arena in arenas:
        for plane in arena.rows.planes:
            plane.fill_(0xff)  # dead rows are NaN
    return CudaGraphPlan(model, arenas[0], grid, eager=True), EagerPlan(reference, arenas[1], grid)


def differences(plan, reference) -> dict[str, float]:
    """Relative distance of every state buffer, live rows only."""
    found = {}
    position = reference.arena.position
    assert plan.arena.position == position
    for name, theirs in reference.arena.views.items():
        ours = plan.arena[name]
        if name in ('mailbox',):
            continue
        if theirs.shape[0] == reference.arena.capacity and name != 'logits':
            ours, theirs = ours[:position], theirs[:position]
        ours, theirs = ours.double(), theirs.double()
        scale = theirs.norm().item() or 1.0
        found[name] = ((ours - theirs).norm() / scale).item()
    return found


def close(plan, reference, tolerance: float) -> None:
    bad = {name: d for name, d in differences(plan, reference).items() if not d <= tolerance}
    assert not bad, bad


def near(patch, splits: int) -> None:
    """Let tokens behind so many half splits of the attention see whole ones."""
    from flashrt_ros.cuda import decode
    patch.setattr(decode, 'WAVE', splits * Qwen35.presets['tiny']['num_key_value_heads'])


def test_folding_agrees_with_the_reference(monkeypatch):
    near(monkeypatch, 2)
    plan, reference = plans(monkeypatch, 'float32')
    rng = random.Random(0)
    for count in (1, 2, 20, 1, 70, 50, 1):
        ids = [rng.randrange(512) for _ in range(count)]
        plan.append(ids)
        reference.append(ids)
        close(plan, reference, 2e-5)


def test_folding_in_bfloat16_is_no_worse_than_the_plain_form(monkeypatch):
    """The measure is how far the torch form in bfloat16 is from fp32 on the same weights."""
    near(monkeypatch, 1)
    plan, reference = plans(monkeypatch, 'bfloat16')
    model = load_model('random:tiny', dtype='bfloat16')
    plain = EagerPlan(model, Arena(manifest_of(model, 512), 256), 128)
    rng = random.Random(0)
    for count in (1, 2, 20, 1, 70, 50, 1):
        ids = [rng.randrange(512) for _ in range(count)]
        for each in (plan, reference, plain):
            each.append(ids)
        allowed = differences(plain, reference)
        for name, distance in differences(plan, reference).items():
            assert distance <= 1.3 * allowed[name] + 2e-3, name


def test_heads_of_the_published_size_agree_with_the_reference(monkeypatch):
    """Heads of 128 and 256 and three query heads over one, two layers deep."""
    monkeypatch.setitem(Qwen35.presets, 'wide', {
        **Qwen35.presets['tiny'], 'num_hidden_layers': 2, 'linear_num_key_heads': 1,
        'linear_num_value_heads': 2, 'linear_key_head_dim': 128, 'linear_value_head_dim': 128,
        'num_key_value_heads': 1, 'num_attention_heads': 3, 'head_dim': 256})
    plan, reference = plans(monkeypatch, 'float32', 'random:wide')
    for count in (1, 20, 120, 1):
        for each in (plan, reference):
            each.append([(7 * i) % 512 for i in range(count)])
        close(plan, reference, 2e-5)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_splits_that_grow_with_the_position(monkeypatch, dtype):
    """One of up to 64 keys, then two that are even, in whole tiles."""
    monkeypatch.setattr('flashrt_ros.cuda.chunk_attention.LEAST', 32)
    monkeypatch.setattr('flashrt_ros.cuda.chunk_attention.MOST', 2)
    monkeypatch.setitem(Qwen35.presets, 'short', {**Qwen35.presets['tiny'], 'num_hidden_layers': 2})
    plan, reference = plans(monkeypatch, dtype, 'random:short', 512)
    for count in (20, 70, 20, 20, 128, 20, 100, 30):
        for each in (plan, reference):
            each.append([(7 * i + count) % 512 for i in range(count)])
        close(plan, reference, 2e-5 if dtype == 'float32' else 4e-2)


def test_the_capacity_decides_no_bit(monkeypatch):
    """Also where dead tokens of a bucket lie behind it: a capsule may go to another context."""
    monkeypatch.setattr('flashrt_ros.cuda.chunk_attention.LEAST', 32)
    monkeypatch.setattr('flashrt_ros.cuda.chunk_attention.MOST', 4)
    monkeypatch.setitem(Qwen35.presets, 'short', {**Qwen35.presets['tiny'], 'num_hidden_layers': 2})
    states = []
    for capacity in (104, 512):
        plan = plans(monkeypatch, 'bfloat16', 'random:short', capacity)[0]
        plan.append([(7 * i) % 512 for i in range(98)])
        plan.append([(5 * i) % 512 for i in range(6)])
        states.append(plan.arena.fixed)
    assert torch.equal(*states)


def test_steps_agree_with_the_reference(monkeypatch):
    plan, reference = plans(monkeypatch, 'float32')
    for each in (plan, reference):
        each.append(list(range(1, 9)))
        sampling.write(each.arena, sampling.Sampling(0.8, 40, 0.9, 7), 3)
    seen = []
    for _ in range(6):
        assert plan.step(seen.append) == reference.step()
    assert len(seen) == 6
    close(plan, reference, 2e-5)


@pytest.fixture(scope='module', params=['float32', 'bfloat16'])
def short(request):
    """Return a plan of two layers, a delta rule and an attention."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Qwen35.presets, 'short', {**Qwen35.presets['tiny'], 'num_hidden_layers': 2})
        near(patch, 2)
        yield plans(patch, request.param, 'random:short')[0]


def rewind(plan, storage: torch.Tensor) -> None:
    plan.arena.storage.copy_(storage)
    plan.arena.mirror = None


@pytest.mark.parametrize('border', [1, 2])
def test_a_block_of_tokens_has_the_bits_of_as_many_steps(short, border):
    """Also across splits of the attention: of half of 128 rows (fp32: 64), later whole ones."""
    plan, ids = short, [(11 * i) % 512 for i in range(150)]
    assert plan.block == 4
    half = 64 if plan.arena['layers.1.k'].element_size() == 2 else 32
    plan.arena.reset()
    for start in range(0, border * half - 4, 128):
        plan.append(ids[start:min(start + 128, border * half - 4)])
    at, start = plan.arena.position, plan.arena.storage.clone()
    for count in (3, 4, 2):
        rewind(plan, start)
        for token in ids[at:at + count]:
            plan.append([token])
        one_by_one = plan.arena.storage.clone()
        rewind(plan, start)
        plan.append(ids[at:at + count])
        assert torch.equal(plan.arena.storage, one_by_one), count
        at, start = at + count, one_by_one


@pytest.mark.parametrize('room', [1, 2, 3])
def test_a_block_where_shared_memory_is_short_has_the_bits_of_steps(monkeypatch, room):
    """So it is with 12288 inner values and 163 KiB, or with 17408 and 227: three would fit."""
    from flashrt_ros.cuda import decode
    tiny = {**Qwen35.presets['tiny'], 'num_hidden_layers': 2}
    monkeypatch.setitem(Qwen35.presets, 'short', tiny)
    deepest = max(tiny['intermediate_size'], tiny['hidden_size'],
                  tiny['num_attention_heads'] * tiny['head_dim'],
                  tiny['linear_num_value_heads'] * tiny['linear_value_head_dim'])
    size = decode.block_size
    monkeypatch.setattr(decode, 'block_size',
                        lambda model, _: size(model, 1024 + room * 4 * deepest))
    plan = plans(monkeypatch, 'bfloat16', 'random:short')[0]
    plan.append(list(range(1, 9)))
    start, ids = plan.arena.storage.clone(), [5, 6, 7, 8]
    for token in ids:
        plan.append([token])
    one_by_one = plan.arena.storage.clone()
    rewind(plan, start)
    plan.append(ids)
    assert torch.equal(plan.arena.storage, one_by_one)


@pytest.mark.parametrize('settings', [(0.0, 0, 1.0), (0.9, 40, 0.95)])
def test_a_draft_leaves_what_steps_leave(short, settings):
    """Case 12 on the kernels of the device: of a block of four none to all guesses hold."""
    plan = short
    plan.arena.reset()
    plan.append([(7 * i) % 512 for i in range(31)])
    sampling.write(plan.arena, sampling.Sampling(*settings, seed=9), 5)
    start, true, after = plan.arena.storage.clone(), [], []
    for _ in range(4):
        true.append(plan.step())
        after.append([part.clone() for part in plan.arena.live_bytes()])
    for right in range(5):
        rewind(plan, start)
        draft = [*true[:right], *((token + 1) % 512 for token in true[right:])]
        said: list[int] = []
        taken = plan.verify(draft, said.append)
        assert taken == len(said) == max(1, right) and said == true[:taken]
        for ours, theirs in zip(plan.arena.live_bytes(), after[taken - 1], strict=True):
            assert torch.equal(ours, theirs), right
    rewind(plan, start)
    said.clear()
    assert plan.verify(true, lambda token: said.append(token) or token == true[1]) == 2
    assert plan.step() == true[2]  # ended by whoever takes the tokens; and it goes on from there
    for ours, theirs in zip(plan.arena.live_bytes(), after[2], strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture(scope='module', params=[4096, 24], ids=['listed', 'many'])
def sampling_plan(request):
    """With room for so many candidates; where they are more, all blocks select together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import cuda_emulator
        patch.setitem(cuda_emulator.SAMPLE, 'LIST', request.param)
        yield plans(patch, 'float32')[0]


@pytest.mark.parametrize('settings', [
    (0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (0.9, 40, 0.9), (2.0, 1, 1.0),
    (1.0, 3, 0.01), (0.05, 0, 0.999), (1.0, 600, 0.5)])
@pytest.mark.parametrize('ties', [False, True])
def test_the_sampler_agrees_with_the_reference(sampling_plan, settings, ties):
    plan, generator = sampling_plan, torch.Generator().manual_seed(1)
    for counter in range(8):
        logits = torch.randn(512, generator=generator) * 2
        if ties:
            logits = logits.round()
        plan.arena['logits'].copy_(logits)
        sampling.write(plan.arena, sampling.Sampling(*settings, seed=2 ** 63 + counter), counter)
        expected = sampling.sample(plan.arena)
        plan._sample()
        assert plan.arena['mailbox'].item() == expected
        assert int(plan.mail.box[0]) & 0xffffffff == expected


def test_the_copy_kernel_keeps_the_rule_of_the_lineage(monkeypatch):
    """Random writes, saves and restores through the page table against full copies."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import cuda_emulator

    from flashrt_ros.cuda.copies import Mover
    cuda_emulator.install(monkeypatch)
    manifest = Manifest([
        Buffer('ids', Role.ROWS, torch.int32, (1,)), Buffer('k', Role.ROWS, torch.bfloat16, (40,)),
        Buffer('v', Role.ROWS, torch.bfloat16, (40,)), Buffer('s', Role.RECURRENT, torch.float32,
                                                              (77,))])
    arena, pool = Arena(manifest, 333), Pool(manifest, 1 << 20)
    line = Lineage(arena, pool)
    line.mover = Mover(arena, pool)
    rng = random.Random(5)
    kept = []

    def fold(count: int) -> None:
        position = arena.position
        arena.will_write(position)
        for plane in arena.rows.planes:
            plane[:, position:position + count].random_(0, 256)
        arena.fixed[256:].random_(0, 256)
        arena.set_position(position + count)

    for _ in range(150):
        choice = rng.random()
        if choice < 0.5 and arena.position < 320:
            fold(rng.randrange(1, min(70, 333 - arena.position)))
        elif choice < 0.7 and len(kept) < 5:
            kept.append((line.save()[0], [part.clone() for part in arena.live_bytes()]))
        elif kept and choice < 0.9:
            frozen, copy = rng.choice(kept)
            line.restore(frozen)
            assert all(torch.equal(a, b) for a, b in zip(arena.live_bytes(), copy, strict=True))
        elif kept:
            pool.release(kept.pop(rng.randrange(len(kept)))[0])
    for frozen, copy in kept:
        arena.storage.random_(0, 256)
        arena.clean = 0
        line.restore(frozen)
        assert all(torch.equal(a, b) for a, b in zip(arena.live_bytes(), copy, strict=True))
