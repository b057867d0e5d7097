"""Qwen3.5 text against ``transformers`` on the same weights, and the contract of its state."""

import json
from pathlib import Path
import sys

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from model_cases import bound, ClosedWorld, prefill, tokens, TOLERANCE, without  # noqa: E402

from flashrt_ros.arena import Arena, Buffer, Manifest, Role  # noqa: E402
from flashrt_ros.errors import Internal, InvalidArgument  # noqa: E402
from flashrt_ros.models import load_model  # noqa: E402

LENGTHS = (1, 63, 64, 65, 511, 512, 513, 1100)

BASE = {
    'vocab_size': 256, 'hidden_size': 64, 'intermediate_size': 96, 'num_hidden_layers': 4,
    'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 32,
    'linear_num_key_heads': 2, 'linear_num_value_heads': 4, 'linear_key_head_dim': 16,
    'linear_value_head_dim': 16, 'linear_conv_kernel_dim': 4, 'tie_word_embeddings': False,
    'max_position_embeddings': 4096, 'rms_norm_eps': 1e-6, 'eos_token_id': None,
    'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e6, 'partial_rotary_factor': 0.25},
}
SHAPES = {
    'grouped values': {},
    'tied, equal heads': {'tie_word_embeddings': True, 'linear_num_value_heads': 2,
                          'num_hidden_layers': 5},
    'one kv head, full rotary, three values a key': {
        'num_attention_heads': 3, 'num_key_value_heads': 1, 'linear_num_value_heads': 6,
        'linear_value_head_dim': 24, 'linear_conv_kernel_dim': 3,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4,
                            'partial_rotary_factor': 1.0}},
    'no grouping, half rotary, all attention but one': {
        'num_key_value_heads': 4, 'hidden_size': 48,
        'layer_types': ['full_attention', 'linear_attention', 'full_attention', 'full_attention'],
        'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e7,
                            'partial_rotary_factor': 0.5}},
}


@pytest.fixture(autouse=True)
def one_thread():
    """Keep tiny shapes from waiting for a second thread on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def oracle(seed=0, **changes):
    """
    Build a transformers model whose weights are large enough for logits of order one.

    Larger gains and heads that forget at once make the function itself ill-conditioned (such a
    head hands on ``sign(q . k) v``): transformers in fp32 then departs from its own fp64 by more
    than the tolerance.
    """
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(seed)
    config = transformers.Qwen3_5TextConfig(**{**BASE, **changes})
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, weight.shape[1] ** -0.5)
            elif weight.dim() == 3:
                weight.normal_(0, 0.5)
            elif name.endswith('A_log'):
                weight.uniform_(-5, 0.5)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.2)
    return model


@pytest.fixture(scope='module', params=SHAPES, ids=lambda name: name.split(',')[0])
def pair(request, tmp_path_factory):
    """Return a transformers model and ours, loaded from what it saved."""
    reference = oracle(seed=len(request.param), **SHAPES[request.param])
    path = tmp_path_factory.mktemp('checkpoint')
    reference.save_pretrained(path)
    return reference, load_model(str(path))


@pytest.mark.parametrize('length', LENGTHS)
def test_prefill_agrees_with_transformers(pair, length):
    reference, model = pair
    _, binding = bound(model)
    ids = tokens(length, seed=length)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0, -1]
    assert 0.3 < expected.std() < 10
    assert (prefill(binding, ids) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize('length', [1, 65, 600])
def test_decode_agrees_with_transformers(pair, length):
    transformers = pytest.importorskip('transformers')
    reference, model = pair
    _, binding = bound(model)
    ids = tokens(length, seed=length + 7)
    cache = transformers.DynamicCache(config=reference.config)
    with torch.inference_mode():
        expected = reference(ids[None], past_key_values=cache, use_cache=True).logits[0, -1]
    logits = prefill(binding, ids)
    ours, theirs, worst = [], [], 0.0
    for step in range(64):
        ours.append(int(logits.argmax()))
        theirs.append(int(expected.argmax()))
        worst = max(worst, float((logits - expected).abs().max()))
        logits = binding.fold(torch.tensor(ours[-1:]), length + step)
        with torch.inference_mode():
            expected = reference(torch.tensor([theirs[-1:]]), past_key_values=cache,
                                 use_cache=True).logits[0, -1]
    assert ours == theirs
    assert worst <= TOLERANCE


@pytest.mark.parametrize('seed', [11, 12, 13])
def test_seeds_agree_with_transformers(tmp_path, seed):
    reference = oracle(seed=seed)
    reference.save_pretrained(tmp_path)
    _, binding = bound(load_model(str(tmp_path)))
    ids = tokens(777, seed=seed)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0, -1]
    assert (prefill(binding, ids) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize('cuts', [
    (512, 188), (1, 699), (64, 64, 64, 508), (63, 1, 65, 571), (2, 3, 5, 7, 11, 13, 659),
    (130, 129, 128, 127, 186), (300, 1, 1, 1, 397)])
def test_any_cut_gives_the_same_logits(cuts):
    model = load_model('random:tiny')
    _, whole = bound(model)
    ids = tokens(sum(cuts), 512)
    expected = whole.fold(ids, 0)
    arena, binding = bound(model)
    position = 0
    for cut in cuts:
        logits = binding.fold(ids[position:position + cut], position)
        position += cut
    assert (logits - expected).abs().max() <= TOLERANCE
    # and one more token tells that the state agrees too
    following = [b.fold(ids[:1], position) for b in (whole, binding)]
    assert (following[0] - following[1]).abs().max() <= TOLERANCE


def test_token_by_token_agrees_with_chunks():
    model = load_model('random:tiny?seed=5')
    one, first = bound(model)
    many, second = bound(model)
    ids = tokens(200, 512)
    for position in range(200):
        stepped = first.fold(ids[position:position + 1], position)
    assert (stepped - second.fold(ids, 0)).abs().max() <= TOLERANCE
    for buffer in model.buffers():
        live = slice(0, 200) if buffer.role is Role.ROWS else slice(None)
        assert torch.allclose(one[buffer.name][live], many[buffer.name][live], atol=1e-4)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_dead_rows_may_hold_nan(dtype):
    model = load_model('random:tiny', dtype)
    results = []
    for poison in (0.0, float('nan')):
        arena, binding = bound(model, 800)
        for buffer in model.buffers():
            if buffer.role is Role.ROWS:
                arena[buffer.name].fill_(poison)
        ids = tokens(700, 512)
        results.append([binding.fold(ids[:512], 0), binding.fold(ids[512:640], 512),
                        binding.fold(ids[640:641], 640)])
        assert all(torch.isfinite(logits).all() for logits in results[-1])
        for buffer in model.buffers():  # dead rows stay as they were
            if buffer.role is Role.ROWS:
                dead = arena[buffer.name][641:].float()
                assert dead.isnan().all() if poison != 0.0 else not dead.any()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_same_schedule_gives_the_same_bytes(dtype):
    model = load_model('random:tiny', dtype)
    runs = []
    for capacity in (700, 1500):  # capacity must not matter either
        arena, binding = bound(model, capacity)
        ids = tokens(600, 512)
        logits = [binding.fold(ids[:512], 0), binding.fold(ids[512:], 512)]
        logits += [binding.fold(ids[i:i + 1], 600 + i) for i in range(8)]
        arena.set_position(608)
        runs.append((torch.stack(logits), [block.clone() for block in arena.live_bytes()]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_fold_writes_state_and_fresh_storage_alone(dtype):
    model = load_model('random:tiny', dtype)
    arena, binding = bound(model)
    before = [tensor.clone() for _, tensor in model.weights()]
    ids = tokens(300, 512)
    for part, position in ((ids, 0), (ids[:70], 300), (ids[:1], 370)):
        with ClosedWorld(arena) as world:
            binding.fold(part, position)
        assert world.writes > 0
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, model.weights(), strict=True))


def test_logits_are_fresh():
    arena, binding = bound(load_model('random:tiny'))
    first = binding.fold(tokens(5, 512), 0)
    kept = first.clone()
    assert first.dtype is torch.float32 and first.shape == (512,)
    binding.fold(tokens(1, 512), 5)
    assert torch.equal(first, kept)


def test_every_state_class_matters():
    model = load_model('random:tiny')
    for role in (Role.ROWS, Role.RECURRENT, Role.CONV):
        assert without(model, role) > 1e-2, role


def test_tokens_that_do_not_fit_change_nothing():
    arena, binding = bound(load_model('random:tiny'), 16)
    binding.fold(tokens(10, 512), 0)
    before = arena.storage.clone()
    for ids, position in ((tokens(7, 512), 10), (tokens(0, 512), 10), (tokens(1, 512), -1)):
        with pytest.raises(InvalidArgument, match='16 rows'):
            binding.fold(ids, position)
    assert torch.equal(arena.storage, before)


def test_missing_buffer_is_named():
    model = load_model('random:tiny')
    buffers = model.buffers()
    for lost in buffers:
        manifest = Manifest(b for b in buffers if b is not lost)
        with pytest.raises(Internal, match=lost.name.replace('.', r'\.')):
            model.bind(Arena(manifest, 8))


def test_buffer_of_another_kind_is_refused():
    model = load_model('random:tiny')
    buffers = [Buffer(b.name, b.role, torch.float64, b.shape) for b in model.buffers()]
    with pytest.raises(Internal, match='float64'):
        model.bind(Arena(Manifest(buffers), 8))


def test_undeclared_state_is_refused(monkeypatch):
    from flashrt_ros.models.layers.attention import GatedAttention
    declare = GatedAttention.buffers
    monkeypatch.setattr(GatedAttention, 'buffers', lambda self, dtype: declare(self, dtype)[:1])
    model = load_model('random:tiny')
    with pytest.raises(Internal, match=r'layers\.1\.v'):
        model.bind(Arena(Manifest(model.buffers()), 8))


def test_two_arenas_of_one_model_do_not_mix():
    model = load_model('random:tiny')
    (_, a), (_, b) = bound(model), bound(model)
    ids = tokens(40, 512)
    expected = prefill(a, ids, grid=20)
    (_, a), (_, b) = bound(model), bound(model)
    a.fold(ids[:20], 0)
    b.fold(ids[20:], 0)
    assert torch.equal(a.fold(ids[20:], 20), expected)


def test_random_specs():
    first, again, other = (load_model(spec) for spec in (
        'random:tiny', 'random:tiny?seed=0', 'random:tiny?seed=3'))
    pairs = list(zip(first.weights(), again.weights(), other.weights(), strict=True))
    assert all(torch.equal(a[1], b[1]) for a, b, _ in pairs)
    assert any(not torch.equal(a[1], c[1]) for a, _, c in pairs)
    assert first.source_dir is None and first.weight_files == ()
    assert first.spec == 'random:tiny' and first.config.eos_token_ids == ()
    assert first.dtype is torch.float32 and first.device == torch.device('cpu')


@pytest.mark.parametrize('spec', [
    'random:', 'random:huge', 'random:tiny?seed=', 'random:tiny?seed=-1', 'random:tiny?sed=1',
    'random:tiny?seed=x', 'random:tiny?seed=99999999999999999999'])
def test_bad_random_specs(spec):
    with pytest.raises(InvalidArgument, match='tiny'):
        load_model(spec)


def test_true_sizes_follow_the_published_dimensions():
    """Fixed state and bytes a token as the design's table has them, without allocating."""
    from flashrt_ros.models.config import Fields
    from flashrt_ros.models.model import Source
    from flashrt_ros.models.qwen3_5 import Qwen35, Qwen35Config
    for name, fixed, row, weights in (
            ('qwen3.5-0.8b', 18.6 * 2 ** 20, 12 * 1024, 1.5e9),
            ('qwen3.5-9b', 49.1 * 2 ** 20, 32 * 1024, 18e9),
            ('qwen3.5-27b', 147 * 2 ** 20, 64 * 1024, 54e9)):
        config = Qwen35Config.from_fields(Fields(Qwen35.presets[name]))
        model = Qwen35(config, torch.bfloat16, 'meta', Source(name))
        manifest = Manifest(model.buffers())
        assert manifest.row_bytes == row
        assert manifest.fixed_bytes == pytest.approx(fixed, rel=0.03)
        assert model.parameters.nbytes == pytest.approx(weights, rel=0.06)


def test_architecture_is_json_and_tells_rope_apart(tmp_path):
    described = load_model('random:tiny').architecture()
    assert json.loads(json.dumps(described)) == described
    assert described['rope_theta'] == 1e7 and described['rotary_dim'] == 8
    assert 'eos_token_ids' not in described


def test_bfloat16_stays_near_float32():
    ids = tokens(300, 512)
    exact = bound(load_model('random:tiny'))[1].fold(ids, 0)
    _, binding = bound(load_model('random:tiny', 'bfloat16'))
    assert torch.nn.functional.cosine_similarity(exact, binding.fold(ids, 0), dim=0) > 0.99


def test_weights_are_canonical_views():
    model = load_model('random:tiny')
    names = [name for name, _ in model.weights()]
    assert names[0] == 'model.embed_tokens.weight' and names[-1] == 'lm_head.weight'
    shapes = {name: tuple(tensor.shape) for name, tensor in model.weights()}
    assert shapes['model.layers.0.linear_attn.conv1d.weight'] == (128, 1, 4)
    assert shapes['model.layers.1.self_attn.q_proj.weight'] == (256, 64)
    weights = dict(model.weights())
    gate, up = (weights[f'model.layers.0.mlp.{name}_proj.weight'] for name in ('gate', 'up'))
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
