"""Checkpoint layouts that load, and every refusal with its type and what its message names."""

import json
import logging

import pytest
from safetensors.torch import load_file, save_file
import torch

from flashrt_ros.arena import Arena, Manifest
from flashrt_ros.errors import (
    Capacity,
    Corrupt,
    DeviceFault,
    FlashrtError,
    Incompatible,
    InvalidArgument,
    Storage,
)
from flashrt_ros.models import load_model
from flashrt_ros.models.locate import hub_cache, locate
from flashrt_ros.models.qwen3_5 import Qwen35

SHARDED = 'model-0000{}-of-00002.safetensors'


def write(path, config=None, weights=None, generation=None):
    """Write a checkpoint of the tiny preset; the arguments replace what it would hold."""
    path.mkdir(parents=True, exist_ok=True)
    raw = {'model_type': 'qwen3_5_text', **Qwen35.presets['tiny'], 'eos_token_id': 7}
    (path / 'config.json').write_text(json.dumps(raw if config is None else config))
    if weights is None:
        weights = tensors()
    save_file(weights, path / 'model.safetensors')
    if generation is not None:
        (path / 'generation_config.json').write_text(json.dumps(generation))
    return path


def tensors():
    return {name: tensor.clone().contiguous()
            for name, tensor in load_model('random:tiny').weights()}


def config(**changes):
    raw = {'model_type': 'qwen3_5_text', **Qwen35.presets['tiny'], **changes}
    return {key: value for key, value in raw.items() if value is not None}


def logits(model):
    arena = Arena(Manifest(model.buffers()), 64)
    return model.bind(arena).fold(torch.arange(40), 0)


@pytest.fixture(autouse=True, scope='module')
def one_thread():
    """Keep tiny shapes from waiting for a second thread on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope='module')
def expected():
    return logits(load_model('random:tiny'))


def shard(path):
    """Split the checkpoint in ``path`` into two files with an index."""
    weights = load_file(path / 'model.safetensors')
    names = sorted(weights)
    parts = names[::2], names[1::2]
    places = {}
    for number, part in enumerate(parts, 1):
        places.update(dict.fromkeys(part, SHARDED.format(number)))
        save_file({name: weights[name] for name in part}, path / SHARDED.format(number))
    (path / 'model.safetensors').unlink()
    (path / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': places}))
    return path


def test_plain_directory(tmp_path, expected):
    model = load_model(str(write(tmp_path)))
    assert torch.equal(logits(model), expected)
    assert model.source_dir == tmp_path
    assert model.weight_files == (tmp_path / 'model.safetensors',)
    assert model.spec == str(tmp_path)
    assert model.config.eos_token_ids == (7,)


def test_sharded_directory(tmp_path, expected):
    model = load_model(str(shard(write(tmp_path))))
    assert torch.equal(logits(model), expected)
    assert [path.name for path in model.weight_files] == [SHARDED.format(1), SHARDED.format(2)]


@pytest.mark.parametrize('prefix, head', [
    ('model.language_model.', 'lm_head.'), ('language_model.model.', 'language_model.lm_head.')])
def test_multimodal_layout(tmp_path, expected, caplog, prefix, head):
    weights = {}
    for name, tensor in tensors().items():
        target = name.replace('model.', prefix, 1) if name.startswith('model.') \
            else name.replace('lm_head.', head, 1)
        weights[target] = tensor
    weights |= {f'model.visual.blocks.{i}.attn.qkv.weight': torch.ones(3) for i in range(5)}
    weights |= {'mtp.fc.weight': torch.ones(2), 'mtp.layers.0.mlp.up_proj.weight': torch.ones(2)}
    outer = {'model_type': 'qwen3_5', 'text_config': config(), 'vision_config': {'depth': 1},
             'tie_word_embeddings': False}
    with caplog.at_level(logging.INFO):
        model = load_model(str(write(tmp_path, outer, weights)))
    assert torch.equal(logits(model), expected)
    lines = [record.getMessage() for record in caplog.records if 'skipped' in record.getMessage()]
    assert len(lines) == 1 and 'skipped 7 tensors' in lines[0]


def test_saved_by_transformers_in_shards(tmp_path):
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(1)
    reference = transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(**{**config(), 'dtype': 'float32'})).eval()
    reference.save_pretrained(tmp_path, max_shard_size='200KB')
    model = load_model(str(tmp_path))
    assert len(model.weight_files) > 1
    with torch.inference_mode():
        assert torch.allclose(logits(model), reference(torch.arange(40)[None]).logits[0, -1],
                              atol=1e-4)


def test_saved_by_transformers_as_multimodal(tmp_path):
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(1)
    vision = {'depth': 1, 'hidden_size': 32, 'intermediate_size': 32, 'num_heads': 2,
              'out_hidden_size': 64, 'num_position_embeddings': 16}
    text = {**config(), 'dtype': 'float32',
            'rope_parameters': {**config()['rope_parameters'], 'mrope_section': [2, 1, 1],
                                'mrope_interleaved': True}}
    reference = transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=text, vision_config=vision)).eval()
    reference.save_pretrained(tmp_path)
    with torch.inference_mode():
        there = reference(torch.arange(40)[None]).logits[0, -1]
    assert torch.allclose(logits(load_model(str(tmp_path))), there, atol=1e-4)


@pytest.mark.parametrize('extra_head', [False, True])
def test_tied_head(tmp_path, extra_head):
    weights = tensors()
    table = weights['model.embed_tokens.weight']
    del weights['lm_head.weight']
    if extra_head:
        weights['lm_head.weight'] = table.clone()
    model = load_model(str(write(tmp_path, config(tie_word_embeddings=True), weights)))
    assert 'lm_head.weight' not in dict(model.weights())
    assert torch.isfinite(logits(model)).all()


def test_what_the_outer_model_says_about_tying_counts(tmp_path):
    weights = tensors()
    del weights['lm_head.weight']
    outer = {'model_type': 'qwen3_5', 'tie_word_embeddings': True,
             'text_config': config(tie_word_embeddings=False)}
    assert load_model(str(write(tmp_path, outer, weights))).config.tied


@pytest.mark.parametrize('generation, ids', [
    (None, (7,)), ({'eos_token_id': 3}, (3,)), ({'eos_token_id': [5, 9, 5]}, (5, 9)),
    ({'temperature': 1.0}, (7,))])
def test_end_tokens(tmp_path, generation, ids):
    model = load_model(str(write(tmp_path, generation=generation)))
    assert model.config.eos_token_ids == ids


@pytest.mark.parametrize('rope', [
    {'rope_parameters': None, 'rope_theta': 1e7, 'partial_rotary_factor': 0.25},
    {'rope_parameters': None, 'rope_theta': 10000000},  # the fraction of this family by default
    {'rope_parameters': None, 'rope_theta': 1e7, 'partial_rotary_factor': 0.25,
     'rope_scaling': {'type': 'mrope', 'mrope_section': [2, 1, 1]}},
    {'rope_parameters': {'rope_theta': 1e7}, 'partial_rotary_factor': 0.25}])
def test_older_places_of_rope(tmp_path, expected, rope):
    assert torch.equal(logits(load_model(str(write(tmp_path, config(**rope))))), expected)


def test_dtypes(tmp_path, expected):
    half = {name: tensor.bfloat16() for name, tensor in tensors().items()}
    path = str(write(tmp_path, config(dtype='bfloat16'), half))
    model = load_model(path)
    assert model.dtype is torch.bfloat16
    assert {b.dtype for b in model.buffers()} == {torch.bfloat16, torch.float32}
    wide = load_model(path, 'float32')
    assert wide.dtype is torch.float32
    assert torch.nn.functional.cosine_similarity(logits(wide), expected, dim=0) > 0.99


def test_stored_type_counts_where_none_is_declared(tmp_path):
    half = {name: tensor.bfloat16() for name, tensor in tensors().items()}
    assert load_model(str(write(tmp_path, config(dtype=None), half))).dtype is torch.bfloat16


@pytest.mark.parametrize('changes, error, named', [
    ({'model_type': 'llama'}, Incompatible, 'llama.*qwen3_5_text'),
    ({'model_type': None}, Incompatible, 'qwen3_5_text'),
    ({'model_type': 'qwen3_5_moe_text', 'num_experts': 8}, Incompatible, 'qwen3_5_moe_text'),
    ({'num_experts': 8}, Incompatible, 'mixture-of-experts.*num_experts'),
    ({'hidden_act': 'gelu'}, Incompatible, 'gelu.*silu'),
    ({'attention_bias': True}, Incompatible, 'attention_bias'),
    ({'attn_output_gate': False}, Incompatible, 'attn_output_gate'),
    ({'dtype': 'float8_e4m3fn'}, Incompatible, 'float8_e4m3fn.*bfloat16'),
    ({'quantization_config': {'quant_method': 'fp8'}}, Incompatible, 'fp8'),
    ({'layer_types': ['sliding_attention'] * 4}, Incompatible, 'sliding_attention'),
    ({'layer_types': ['full_attention']}, Corrupt, 'layer_types.*4 entries'),
    ({'rope_parameters': {'rope_type': 'yarn', 'rope_theta': 1e7, 'factor': 4}}, Incompatible,
     'yarn'),
    ({'rope_parameters': {'rope_type': 'default'}}, Corrupt, 'rope_theta'),
    ({'rope_parameters': 'default'}, Corrupt, 'rope_parameters'),
    ({'rope_parameters': {'rope_theta': 1e7, 'partial_rotary_factor': 1.5}}, Corrupt,
     'partial_rotary_factor'),
    ({'rope_parameters': {'rope_theta': -1}}, Corrupt, 'rope_theta'),
    ({'hidden_size': None}, Corrupt, 'hidden_size'),
    ({'hidden_size': 64.5}, Corrupt, 'hidden_size'),
    ({'hidden_size': True}, Corrupt, 'hidden_size'),
    ({'hidden_size': 10 ** 30}, Corrupt, 'hidden_size'),
    ({'hidden_size': 128}, Corrupt, 'do not belong together'),
    ({'num_hidden_layers': 0}, Corrupt, 'num_hidden_layers'),
    ({'num_hidden_layers': 10 ** 9}, Corrupt, 'num_hidden_layers'),
    ({'num_hidden_layers': 6}, Corrupt, r'lacks \d+ of \d+ tensors.*layers\.4'),
    ({'num_hidden_layers': 3}, Incompatible, r'layers\.3'),
    ({'linear_num_value_heads': 3}, Corrupt, 'linear_num_value_heads.*multiple'),
    ({'rms_norm_eps': 'small'}, Corrupt, 'rms_norm_eps'),
    ({'eos_token_id': 512}, Corrupt, 'eos_token_id.*512'),
    ({'eos_token_id': 'end'}, Corrupt, 'eos_token_id'),
    ({'tie_word_embeddings': 'yes'}, Corrupt, 'tie_word_embeddings'),
    ({'tie_word_embeddings': True}, Corrupt, 'lm_head.weight that differs'),
])
def test_config_refusals(tmp_path, changes, error, named):
    write(tmp_path, config(**changes))
    with pytest.raises(error, match=named):
        load_model(str(tmp_path))


@pytest.mark.parametrize('text', [
    '', '{', '[]', '{"hidden_size": NaN}', '{"rms_norm_eps": Infinity}', '"\\ud800"', '[' * 9999])
def test_config_that_is_no_json(tmp_path, text):
    write(tmp_path)
    (tmp_path / 'config.json').write_text(text)
    with pytest.raises(Corrupt, match=r'config\.json'):
        load_model(str(tmp_path))


def test_config_of_other_bytes(tmp_path):
    write(tmp_path)
    (tmp_path / 'config.json').write_bytes(b'\xff\xfe\x00')
    with pytest.raises(Corrupt, match=r'config\.json'):
        load_model(str(tmp_path))


def lose(weights):
    del weights['model.layers.2.mlp.up_proj.weight']


def reshape(weights):
    weights['model.norm.weight'] = torch.zeros(63)


def add(weights):
    weights['model.layers.0.mlp.experts.0.up_proj.weight'] = torch.zeros(2)


def quantise(weights):
    name = 'model.layers.0.mlp.up_proj.weight'
    weights[name] = weights[name].to(torch.int8)


def double(weights):
    weights['model.language_model.norm.weight'] = weights['model.norm.weight'].clone()


def poison(weights):
    weights['model.layers.1.self_attn.o_proj.weight'][3, 5] = float('nan')


@pytest.mark.parametrize('change, error, named', [
    (lose, Corrupt, r'lacks 1 of .*layers\.2\.mlp\.up_proj'),
    (reshape, Corrupt, r'model\.norm\.weight is \[63\].*\[64\]'),
    (add, Incompatible, 'experts'),
    (quantise, Incompatible, 'I8.*BF16'),
    (double, Corrupt, 'second time'),
    (poison, Corrupt, r'layers\.1\.self_attn\.o_proj\.weight holds NaN'),
])
def test_weight_refusals(tmp_path, change, error, named):
    weights = tensors()
    change(weights)
    write(tmp_path, weights=weights)
    with pytest.raises(error, match=named):
        load_model(str(tmp_path))


def test_untied_config_without_head(tmp_path):
    weights = tensors()
    del weights['lm_head.weight']
    write(tmp_path, weights=weights)
    with pytest.raises(Corrupt, match='lm_head'):
        load_model(str(tmp_path))


@pytest.mark.parametrize('keep', [0, 5, 100, 0.5, -1])
def test_truncated_weights(tmp_path, keep):
    file = write(tmp_path) / 'model.safetensors'
    data = file.read_bytes()
    file.write_bytes(data[:int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(Corrupt, match=r'model\.safetensors is cut'):
        load_model(str(tmp_path))


def test_missing_shard(tmp_path):
    (shard(write(tmp_path)) / SHARDED.format(2)).unlink()
    with pytest.raises(Storage, match='model-00002-of-00002'):
        load_model(str(tmp_path))


@pytest.mark.parametrize('places', [
    {}, [], {'weight_map': {}}, {'weight_map': {'a': 3}},
    {'weight_map': {'a': '../model.safetensors'}}, {'weight_map': {'a': 'weights.bin'}}])
def test_bad_index(tmp_path, places):
    write(tmp_path)
    (tmp_path / 'model.safetensors.index.json').write_text(json.dumps(places))
    with pytest.raises(Corrupt, match=r'index\.json'):
        load_model(str(tmp_path))


def test_pickled_weights_are_not_read(tmp_path):
    (write(tmp_path) / 'model.safetensors').rename(tmp_path / 'pytorch_model.bin')
    with pytest.raises(Incompatible, match=r'pytorch_model\.bin.*safetensors'):
        load_model(str(tmp_path))


def test_directory_without_weights_or_config(tmp_path):
    write(tmp_path)
    (tmp_path / 'model.safetensors').unlink()
    with pytest.raises(Storage, match=r'model\.safetensors'):
        load_model(str(tmp_path))
    (tmp_path / 'config.json').unlink()
    with pytest.raises(Storage, match=r'config\.json'):
        load_model(str(tmp_path))


@pytest.mark.parametrize('spec', ['/nowhere/at/all', 'nowhere', './a/b/c', 'a/b', 'x' * 5000,
                                  'a\0b'])
def test_wrong_path(spec, monkeypatch, tmp_path):
    monkeypatch.setenv('HF_HUB_CACHE', str(tmp_path))
    with pytest.raises(Storage):
        load_model(spec)


def test_file_instead_of_directory(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(Storage):
        load_model(str(tmp_path / 'file'))


@pytest.mark.parametrize('arguments, error', [
    ({'spec': ''}, InvalidArgument), ({'spec': ' '}, InvalidArgument),
    ({'spec': 'random:tiny', 'dtype': 'int4'}, InvalidArgument),
    ({'spec': 'random:tiny', 'device': 'toaster'}, InvalidArgument),
    ({'spec': 'random:tiny', 'device': 'meta'}, InvalidArgument),
    ({'spec': 'random:tiny', 'device': 'cuda:63'}, DeviceFault)])
def test_bad_arguments(arguments, error):
    with pytest.raises(error):
        load_model(**arguments)


def test_too_large_for_this_machine(monkeypatch):
    monkeypatch.setattr('flashrt_ros.models._free_memory', lambda device: 10 ** 6)
    with pytest.raises(Capacity, match='random:tiny needs'):
        load_model('random:tiny')


def test_every_refusal_is_typed_and_whole():
    for error in (Capacity, Corrupt, DeviceFault, Incompatible, InvalidArgument, Storage):
        assert issubclass(error, FlashrtError)


@pytest.mark.parametrize('by', ['HF_HUB_CACHE', 'HF_HOME', 'XDG_CACHE_HOME'])
def test_hub_id_from_the_local_cache(tmp_path, monkeypatch, expected, by):
    for name in ('HF_HUB_CACHE', 'HF_HOME', 'XDG_CACHE_HOME'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(by, str(tmp_path))
    cache = tmp_path / {'HF_HUB_CACHE': '', 'HF_HOME': 'hub',
                        'XDG_CACHE_HOME': 'huggingface/hub'}[by]
    assert hub_cache() == cache
    home = cache / 'models--Qwen--Qwen3.5-tiny'
    write(home / 'snapshots' / 'abc123')
    (home / 'refs').mkdir()
    (home / 'refs' / 'main').write_text('abc123\n')
    model = load_model('Qwen/Qwen3.5-tiny')
    assert torch.equal(logits(model), expected)
    assert model.spec == 'Qwen/Qwen3.5-tiny'
    assert locate('Qwen/Qwen3.5-tiny@abc123') == home / 'snapshots' / 'abc123'
    with pytest.raises(Storage, match='hf download Qwen/Qwen3.5-other'):
        load_model('Qwen/Qwen3.5-other')
    with pytest.raises(Storage, match='v2'):
        load_model('Qwen/Qwen3.5-tiny@v2')
    (home / 'refs' / 'main').write_text('../../..')
    with pytest.raises(Storage):
        load_model('Qwen/Qwen3.5-tiny')
