"""Directories that say two things at once are read as transformers reads them, or refused."""

import json

import pytest
from safetensors.torch import load_file, save_file
import torch

from flashrt_ros.arena import Arena, Manifest
from flashrt_ros.errors import Corrupt, Incompatible
from flashrt_ros.models import load_model
from flashrt_ros.models.qwen3_5 import Qwen35

ROPE = {'rope_type': 'default', 'rope_theta': 1e7, 'partial_rotary_factor': 0.25}


def write(path, **changes):
    config = {'model_type': 'qwen3_5_text', **Qwen35.presets['tiny'], **changes}
    (path / 'config.json').write_text(json.dumps(config))
    save_file({name: tensor.clone().contiguous()
               for name, tensor in load_model('random:tiny').weights()},
              path / 'model.safetensors')
    return str(path)


def logits(model):
    arena = Arena(Manifest(model.buffers()), 64)
    return model.bind(arena).fold(torch.arange(40), 0)


@pytest.mark.parametrize('scaling', [
    {'type': 'yarn', 'factor': 4.0}, {'rope_type': 'linear', 'factor': 2.0}])
def test_length_scaling_beside_rope_parameters_is_refused(tmp_path, scaling):
    path = write(tmp_path, rope_parameters=ROPE, rope_scaling=scaling)
    with pytest.raises(Incompatible, match='rope_type .(yarn|linear)'):
        load_model(path)


def test_rope_scaling_counts_before_rope_parameters(tmp_path):
    path = write(tmp_path, rope_parameters={**ROPE, 'rope_theta': 100.0}, rope_scaling=ROPE)
    assert torch.equal(logits(load_model(path)), logits(load_model('random:tiny')))


def test_one_file_and_an_index_of_others(tmp_path):
    path = write(tmp_path)
    index = tmp_path / 'model.safetensors.index.json'
    weights = load_file(tmp_path / 'model.safetensors')
    save_file(weights, tmp_path / 'model-00001-of-00001.safetensors')
    index.write_text(json.dumps({'weight_map': dict.fromkeys(
        weights, 'model-00001-of-00001.safetensors')}))
    with pytest.raises(Corrupt, match='both'):
        load_model(path)
    index.write_text(json.dumps({'weight_map': dict.fromkeys(weights, 'model.safetensors')}))
    assert torch.equal(logits(load_model(path)), logits(load_model('random:tiny')))


def test_an_adapter_is_not_left_out_silently(tmp_path):
    path = write(tmp_path)
    (tmp_path / 'adapter_config.json').write_text('{}')
    with pytest.raises(Incompatible, match=r'adapter_config\.json'):
        load_model(path)
