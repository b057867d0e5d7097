"""LFM2 and Qwen3 against ``transformers`` on the same weights, and the contract of their state."""

import json
from pathlib import Path
import subprocess
import sys

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from engine_cases import build, digest, ids, poison, say  # noqa: E402
from model_cases import bound, ClosedWorld, prefill, tokens, TOLERANCE, without  # noqa: E402

from flashrt_ros.arena import Manifest, Role  # noqa: E402
from flashrt_ros.cuda import available  # noqa: E402
from flashrt_ros.errors import Corrupt, Incompatible  # noqa: E402
from flashrt_ros.models import FAMILIES, load_model  # noqa: E402
from flashrt_ros.models.config import Fields  # noqa: E402
from flashrt_ros.models.model import Source  # noqa: E402

TINY = ('lfm2-tiny', 'qwen3-tiny')
BASE = {'vocab_size': 256, 'hidden_size': 64, 'num_attention_heads': 4, 'num_key_value_heads': 2,
        'max_position_embeddings': 4096, 'eos_token_id': None, 'bos_token_id': None,
        'pad_token_id': None}
LFM2 = {**BASE, 'intermediate_size': 192, 'block_multiple_of': 32, 'num_hidden_layers': 5,
        'layer_types': ['conv', 'full_attention', 'conv', 'conv', 'full_attention']}
QWEN3 = {**BASE, 'intermediate_size': 96, 'num_hidden_layers': 3, 'head_dim': 32}
CASES = {
    'lfm2': ('Lfm2', LFM2),
    'lfm2, plain width, four taps, own head': ('Lfm2', {
        **LFM2, 'block_auto_adjust_ff_dim': False, 'conv_L_cache': 4,
        'tie_word_embeddings': False, 'num_attention_heads': 2, 'num_key_value_heads': 1}),
    'lfm2, wider, no attention': ('Lfm2', {
        **LFM2, 'block_ffn_dim_multiplier': 1.3, 'layer_types': ['conv'] * 5}),
    'qwen3': ('Qwen3', QWEN3),
    'qwen3, tied, no grouping': ('Qwen3', {
        **QWEN3, 'tie_word_embeddings': True, 'num_key_value_heads': 4, 'head_dim': 16}),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Keep tiny shapes from waiting for a second thread on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def oracle(name, fields, seed=0):
    """Build a transformers model whose weights are large enough for logits of order one."""
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(seed)
    config = getattr(transformers, f'{name}Config')(**fields)
    model = getattr(transformers, f'{name}ForCausalLM')(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, weight.shape[1] ** -0.5)
            elif weight.dim() == 3:
                weight.normal_(0, 0.5)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.2)
    return model


@pytest.fixture(scope='module', params=CASES, ids=lambda name: name)
def pair(request, tmp_path_factory):
    """Return a transformers model and ours, loaded from what it saved."""
    reference = oracle(*CASES[request.param], seed=len(request.param))
    path = tmp_path_factory.mktemp('checkpoint')
    reference.save_pretrained(path)
    return reference, load_model(str(path))


@pytest.mark.parametrize('length', [1, 2, 3, 64, 511, 512, 513, 1100])
def test_prefill_agrees_with_transformers(pair, length):
    reference, model = pair
    _, binding = bound(model)
    text = tokens(length, seed=length)
    with torch.inference_mode():
        expected = reference(text[None], use_cache=False).logits[0, -1]
    assert 0.3 < expected.std() < 10
    assert (prefill(binding, text) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize('length', [1, 600])
def test_decode_agrees_with_transformers(pair, length):
    reference, model = pair
    _, binding = bound(model)
    text = tokens(length, seed=length + 7)
    logits, ours = prefill(binding, text), []
    for step in range(64):
        ours.append(int(logits.argmax()))
        logits = binding.fold(torch.tensor(ours[-1:]), length + step)
    with torch.inference_mode():
        whole = reference(torch.cat((text, torch.tensor(ours)))[None], use_cache=False).logits[0]
    assert whole[length - 1:-1].argmax(-1).tolist() == ours
    assert (logits - whole[-1]).abs().max() <= TOLERANCE


@pytest.mark.parametrize('preset', TINY)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_fold_writes_state_alone_and_reads_no_dead_row(preset, dtype):
    model = load_model(f'random:{preset}', dtype)
    results = []
    for poisoned in (0.0, float('nan')):
        arena, binding = bound(model, 400)
        for buffer in model.buffers():
            if buffer.role is Role.ROWS:
                arena[buffer.name].fill_(poisoned)
        text, logits = tokens(371, 512), []
        for first, end in ((0, 300), (300, 370), (370, 371)):
            with ClosedWorld(arena) as world:
                logits.append(binding.fold(text[first:end], first))
            assert world.writes > 0
        results.append(torch.stack(logits))
    assert torch.equal(*results) and torch.isfinite(results[0]).all()


@pytest.mark.parametrize(('preset', 'roles'), [
    ('lfm2-tiny', (Role.ROWS, Role.CONV)), ('qwen3-tiny', (Role.ROWS,))])
def test_every_state_class_matters_and_there_is_no_other(preset, roles):
    model = load_model(f'random:{preset}')
    assert {buffer.role for buffer in model.buffers()} == set(roles)
    for role in roles:
        assert without(model, role) > 1e-3, role


@pytest.mark.parametrize('preset', TINY)
def test_a_capsule_of_any_family_is_the_whole_state(preset):
    engine = build(model=f'random:{preset}', device='cpu')
    try:
        engine.append(token_ids=ids(700))
        engine.save(name='here')
        engine.fork('here', sessions=['branch'])
        before = digest(engine)
        said = say(engine, 24, temperature=0.9, seed=5)
        poison(engine)
        engine.restore(capsule='here')
        assert digest(engine) == before
        assert say(engine, 24, temperature=0.9, seed=5) == said
        assert say(engine, 24, session='branch', temperature=0.9, seed=5) == said
        engine.rollback('default', to='tokens', value=24)
        assert say(engine, 24, temperature=0.9, seed=5) == said
    finally:
        engine.close()


@pytest.mark.parametrize(('name', 'millions', 'row', 'fixed'), [
    ('lfm2-350m', 354, 12 * 1024, 10 * 2 * 1024 * 2),
    ('lfm2-700m', 742, 12 * 1024, 10 * 2 * 1536 * 2),
    ('lfm2-1.2b', 1170, 12 * 1024, 10 * 2 * 2048 * 2),
    ('qwen3-0.6b', 596, 112 * 1024, 0), ('qwen3-1.7b', 1720, 112 * 1024, 0),
    ('qwen3-4b', 4022, 144 * 1024, 0)])
def test_true_sizes_follow_the_published_models(name, millions, row, fixed):
    family = next(f for f in FAMILIES if name in f.presets)
    config = family.config_class.from_fields(Fields(family.presets[name]))
    model = family(config, torch.bfloat16, 'meta', Source(name))
    parameters = sum(weight.numel() for _, weight in model.weights())
    assert parameters / 1e6 == pytest.approx(millions, rel=0.005)
    manifest = Manifest(model.buffers())
    assert manifest.row_bytes == row
    assert sum(b.nbytes for b in model.buffers() if b.role is Role.CONV) == fixed
    assert json.loads(json.dumps(model.architecture())) == model.architecture()


@pytest.mark.parametrize(('preset', 'change', 'error', 'words'), [
    ('lfm2-tiny', {'conv_bias': True}, Incompatible, 'conv_bias=True'),
    ('lfm2-tiny', {'block_use_swiglu': False}, Incompatible, 'block_use_swiglu'),
    ('lfm2-tiny', {'num_experts': 32}, Incompatible, 'mixture-of-experts'),
    ('lfm2-tiny', {'full_attn_idxs': [1, 4]}, Corrupt, 'from 0 to 3'),
    ('lfm2-tiny', {'full_attn_idxs': 'all'}, Corrupt, 'full_attn_idxs'),
    ('lfm2-tiny', {'layer_types': ['conv', 'mamba', 'conv', 'conv']}, Incompatible, 'mamba'),
    ('lfm2-tiny', {'block_ff_dim': None}, Corrupt, 'block_ff_dim'),
    ('lfm2-tiny', {'block_auto_adjust_ff_dim': 1}, Corrupt, 'true or false'),
    ('lfm2-tiny', {'tie_embedding': 'yes'}, Corrupt, 'tie_embedding'),
    ('lfm2-tiny', {'rope_scaling': {'rope_type': 'yarn'}}, Incompatible, 'yarn'),
    ('lfm2-tiny', {'partial_rotary_factor': 0.5}, Incompatible, 'whole heads'),
    ('qwen3-tiny', {'attention_bias': True}, Incompatible, 'attention_bias'),
    ('qwen3-tiny', {'use_sliding_window': True}, Incompatible, 'use_sliding_window'),
    ('qwen3-tiny', {'layer_types': ['sliding_attention'] * 3}, Incompatible, 'sliding_attention'),
    ('qwen3-tiny', {'rope_theta': None}, Corrupt, 'rope_theta')])
def test_variants_that_do_not_run_are_refused_by_name(preset, change, error, words):
    family = next(f for f in FAMILIES if preset in f.presets)
    with pytest.raises(error, match=words):
        family.config_class.from_fields(Fields({**family.presets[preset], **change}))


def test_an_older_name_of_a_tied_head_counts_first():
    family = next(f for f in FAMILIES if 'lfm2-tiny' in f.presets)
    raw = {**family.presets['lfm2-tiny'], 'tie_word_embeddings': False}
    assert family.config_class.from_fields(Fields(raw)).tied
    del raw['tie_embedding']
    assert not family.config_class.from_fields(Fields(raw)).tied
    del raw['tie_word_embeddings']
    assert family.config_class.from_fields(Fields(raw)).tied


@pytest.mark.parametrize('preset', TINY)
def test_where_the_kernels_of_a_device_are_not_cut_for_a_family_the_cpu_serves(
        preset, monkeypatch):
    monkeypatch.setattr(available, 'why_not', lambda: '')
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device=None: (1 << 40, 1 << 40))
    said = []
    engine = build(model=f'random:{preset}', device='auto', progress=said.append)
    engine.close()
    assert engine.arena.device.type == 'cpu'
    assert any('running on the CPU' in words and 'CUDA kernels do not take' in words
               for words in said)
    with pytest.raises(Incompatible, match='configure device cpu'):
        build(model=f'random:{preset}', device='cuda')


@pytest.mark.parametrize(('preset', 'missing'), [
    ('lfm2-tiny', ['ablation_no_recurrent']),
    ('qwen3-tiny', ['ablation_kv_only', 'ablation_no_recurrent', 'ablation_no_conv'])])
def test_verify_proves_what_the_family_has_and_claims_no_more(preset, missing):
    process = subprocess.run(
        [sys.executable, '-m', 'flashrt_ros.cli.main', 'verify', '--model', f'random:{preset}',
         '--device', 'cpu', '--quick', '--threads', '1', '--json', '--only',
         'byte_exact,closed_manifest,ablation_kv_only,ablation_no_recurrent,ablation_no_conv,'
         'ablation_no_boundary'],
        capture_output=True, text=True, timeout=100, check=False)
    found = json.loads(process.stdout)
    assert process.returncode == 0 and found['passed'] and found['not_applicable'] == missing
    assert found['ran'] == 6 - len(missing)
