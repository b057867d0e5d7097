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

from collections.abc import Callable
from urllib.parse import parse_qsl

import torch

from flashrt_ros.errors import Capacity, DeviceFault, Incompatible, InvalidArgument
from flashrt_ros.models.checkpoint import Checkpoint
from flashrt_ros.models.config import Fields
from flashrt_ros.models.lfm2 import Lfm2
from flashrt_ros.models.locate import EMBEDDED, locate
from flashrt_ros.models.model import Binding, Model, Source
from flashrt_ros.models.parameters import Parameters
from flashrt_ros.models.qwen3 import Qwen3
from flashrt_ros.models.qwen3_5 import Qwen35
from flashrt_ros.models.random_weights import fill

__all__ = ['Binding', 'DTYPES', 'FAMILIES', 'Model', 'Source', 'load_model']

#: one line a family
FAMILIES: tuple[type[Model], ...] = (
    Qwen35,
    Lfm2,
    Qwen3,
)
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16}


def load_model(spec: str = EMBEDDED, dtype: str = 'auto', device: str = 'cpu') -> Model:
    """
    Load the model that ``spec`` names.

    :param dtype: ``float32``, ``bfloat16``, or ``auto`` for the type the checkpoint declares.
    :raises InvalidArgument: for a spec, dtype or device that makes no sense.
    :raises Storage: when files are missing or cannot be read.
    :raises Corrupt: when files are cut, altered or incomplete.
    :raises Incompatible: when the checkpoint is of a kind that is not supported.
    :raises Capacity: when the memory of the device cannot hold the weights.
    """
    if dtype != 'auto' and dtype not in DTYPES:
        raise InvalidArgument(f'dtype {dtype!r} is unknown; choose auto, {", ".join(DTYPES)}')
    place = _device(device)
    if spec.startswith('random:'):
        return _random(spec, dtype, place)
    checkpoint = Checkpoint(locate(spec))
    family = _family(checkpoint)
    config = family.config_class.from_fields(checkpoint.fields)
    source = Source(spec, checkpoint.directory, checkpoint.weight_files)
    # a skeleton without memory: the checkpoint is judged before anything is allocated
    skeleton = family(config, torch.float32, 'meta', source)
    checkpoint.check(skeleton.parameters.params, config.tied)
    chosen = checkpoint.dtype() if dtype == 'auto' else DTYPES[dtype]
    return _build(family, config, chosen, place, source,
                  lambda parameters: checkpoint.read_into(parameters, config.tied))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f'device {name!r} is unknown; choose cpu or cuda') from error
    if device.type not in ('cpu', 'cuda'):
        raise InvalidArgument(f'device {name!r} is not supported; choose cpu or cuda')
    if device.type == 'cuda' and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceFault(f'this machine has no CUDA device {name!r} that torch can use; choose '
                          'cpu, or install a CUDA build of torch and a driver')
    return device


def _family(checkpoint: Checkpoint) -> type[Model]:
    for family in FAMILIES:
        if checkpoint.model_type in family.model_types:
            return family
    supported = ', '.join(kind for family in FAMILIES for kind in family.model_types)
    raise Incompatible(f'{checkpoint.fields.where}: model_type {checkpoint.model_type!r} is not '
                       f'supported; supported are {supported}')


def _random(spec: str, dtype: str, device: torch.device) -> Model:
    name, _, query = spec.removeprefix('random:').partition('?')
    presets = {preset: family for family in FAMILIES for preset in family.presets}
    options = dict(parse_qsl(query, keep_blank_values=True))
    seed = options.pop('seed', '0')
    if name not in presets or options or not seed.isdecimal() or int(seed) >= 2 ** 63:
        raise InvalidArgument(f'{spec!r} is no random model; write random:<preset> or '
                              f'random:<preset>?seed=<n> with a preset of {", ".join(presets)}')
    family = presets[name]
    raw = family.presets[name]
    config = family.config_class.from_fields(Fields(raw, where=spec))
    chosen = DTYPES[raw['dtype'] if dtype == 'auto' else dtype]
    return _build(family, config, chosen, device, Source(spec),
                  lambda parameters: fill(parameters, int(seed)))


def _build(family: type[Model], config: object, dtype: torch.dtype, device: torch.device,
           source: Source, filler: Callable[[Parameters], None]) -> Model:
    need = family(config, dtype, 'meta', source).parameters.nbytes
    free = _free_memory(device)
    if free is not None and need > free:
        raise Capacity(f'{source.spec} needs {need / 1e9:.1f} GB for its weights in {dtype} but '
                       f'{device} has {free / 1e9:.1f} GB free; choose a smaller model')
    model = family(config, dtype, device, source)
    with torch.no_grad():
        filler(model.parameters)
    return model


def _free_memory(device: torch.device) -> int | None:
    """Bytes that an allocation can count on; None where the system does not tell."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open('/proc/meminfo', encoding='ascii') as lines:
            fields = dict(line.split(':', 1) for line in lines)
        return int(fields['MemAvailable'].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
