"""
Models: from a spec to weights in memory and a description of their state.

=========================== ===================================================================
spec                        meaning
=========================== ===================================================================
``embedded``                the small model that ships with the package
``/path/to/dir``            a Hugging Face directory: config.json, safetensors, tokenizer
``owner/name[@revision]``   a hub id, from the local cache only; nothing is downloaded
``random:<preset>[?seed=n]`` seeded random weights at the true size of a preset, no file
=========================== ===================================================================
"""

from __future__ import annotations

from urllib.parse import parse_qsl

import torch

from flashrt_ros.errors import InvalidArgument
from flashrt_ros.models.config import Fields
from flashrt_ros.models.model import Binding, Model, Source
from flashrt_ros.models.qwen3_5 import Qwen35
from flashrt_ros.models.random_weights import fill

__all__ = ['Binding', 'FAMILIES', 'Model', 'Source', 'load_model']

#: one line a family
FAMILIES: tuple[type[Model], ...] = (
    Qwen35,
)
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16}


def load_model(spec: str = 'embedded', dtype: str = 'auto', device: str = 'cpu') -> Model:
    """
    Load the model that ``spec`` names.

    :param dtype: ``float32``, ``bfloat16``, or ``auto`` for the type the checkpoint declares.
    :raises InvalidArgument: for a spec, dtype or device that makes no sense.
    :raises Storage: when files are missing or cannot be read.
    :raises Corrupt: when files are cut, altered or incomplete.
    :raises Incompatible: when the checkpoint is of a kind that is not supported.
    """
    if spec.startswith('random:'):
        return _random(spec, dtype, device)
    raise InvalidArgument(f'unknown model spec {spec!r}')


def _random(spec: str, dtype: str, device: str) -> Model:
    name, _, query = spec.removeprefix('random:').partition('?')
    presets = {preset: family for family in FAMILIES for preset in family.presets}
    options = dict(parse_qsl(query, keep_blank_values=True))
    seed = options.pop('seed', '0')
    if name not in presets or options or not seed.isdecimal():
        raise InvalidArgument(f'{spec!r} is no random model; write random:<preset> or '
                              f'random:<preset>?seed=<n> with a preset of {", ".join(presets)}')
    family = presets[name]
    raw = family.presets[name]
    config = family.config_class.from_fields(Fields(raw, where=spec))
    chosen = DTYPES[raw['dtype'] if dtype == 'auto' else dtype]
    model = family(config, chosen, device, Source(spec))
    fill(model.parameters, int(seed))
    return model
