"""
Hugging Face directories: config, safetensors, possibly sharded, possibly of a multimodal model.

Everything is checked against the family's list of tensors from the file headers before memory is
allocated: names, shapes, types, shards. Pickled weights are never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import json
import logging
from pathlib import Path
import re
from typing import Any

from safetensors import safe_open, SafetensorError
import torch

from flashrt_ros.errors import Corrupt, Incompatible, Storage
from flashrt_ros.models.config import Fields
from flashrt_ros.models.parameters import Param, Parameters

log = logging.getLogger(__name__)

FLOATS = {'F32': torch.float32, 'BF16': torch.bfloat16, 'F16': torch.float16}
#: prefixes of published layouts -> canonical prefix, first match counts
PREFIXES = (
    ('model.language_model.', 'model.'),
    ('language_model.model.', 'model.'),
    ('language_model.lm_head.', 'lm_head.'),
)
#: parts of a checkpoint that a text model does without
SKIPPED = re.compile(r'(model\.)?(visual|vision_tower|mtp)\.')
HEAD, TABLE = 'lm_head.weight', 'model.embed_tokens.weight'


def read_json(path: Path) -> dict:
    """
    Read a JSON object.

    :raises Storage: when the file cannot be read.
    :raises Corrupt: when it is no JSON object, or holds NaN or Infinity.
    """
    def refuse(name: str) -> None:
        raise ValueError(f'it holds {name}')

    try:
        value = json.loads(path.read_text(encoding='utf-8'), parse_constant=refuse)
    except OSError as error:
        raise Storage(f'cannot read {path}: {error.strerror}; check the path and its '
                      'permissions') from error
    except (ValueError, RecursionError) as error:
        raise Corrupt(f'{path} is no valid JSON ({error}); fetch it again') from error
    if not isinstance(value, dict):
        raise Corrupt(f'{path} holds no JSON object; fetch it again')
    return value


def canonical(name: str) -> str:
    """Return the name of a tensor as the text model alone would have it."""
    for prefix, target in PREFIXES:
        if name.startswith(prefix):
            return target + name.removeprefix(prefix)
    return name


def _few(names: list[str]) -> str:
    rest = len(names) - 3
    return ', '.join(names[:3]) + (f' and {rest} more' if rest > 0 else '')


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework='pt') as file:
            yield file
    except FileNotFoundError as error:
        raise Storage(f'the weight file {path} is missing; fetch the checkpoint again') from error
    except OSError as error:
        raise Storage(f'cannot read {path}: {error}; check its permissions') from error
    except SafetensorError as error:
        raise Corrupt(f'{path} is cut or altered ({error}); fetch it again') from error


class Checkpoint:
    """
    A checkpoint directory whose configuration has been read.

    :raises Storage: for a missing directory, config or weight file.
    :raises Corrupt: for files that are cut or malformed.
    :raises Incompatible: for quantised or pickled weights.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not directory.is_dir():
            raise Storage(f'{directory} is no directory; give a directory with config.json and '
                          '*.safetensors')
        try:
            there = (directory / 'config.json').is_file()
        except OSError as error:  # a directory that may not be searched
            raise Storage(f'cannot look into {directory}: {error.strerror}; check its '
                          'permissions') from error
        if not there:
            raise Storage(f'{directory} holds no config.json; give the directory of a Hugging '
                          'Face checkpoint')
        if (directory / 'adapter_config.json').is_file():
            raise Incompatible(f'{directory} holds an adapter (adapter_config.json), which would '
                               'be left out; merge it into the weights, or give the directory of '
                               'the model without it')
        outer = read_json(directory / 'config.json')
        text = outer.get('text_config', outer)
        if not isinstance(text, dict):
            raise Corrupt(f'{directory}/config.json: text_config is no object; fetch it again')
        generation = directory / 'generation_config.json'
        self.fields = Fields(text, outer, read_json(generation) if generation.is_file() else {},
                             where=f'{directory}/config.json')
        for source in (outer, text):
            quantised = source.get('quantization_config') or source.get('compression_config')
            if quantised:
                method = quantised.get('quant_method') if isinstance(quantised, dict) else ''
                raise Incompatible(f'{directory} is quantised ({method or quantised}); supported '
                                   'are float32, bfloat16 and float16 weights: choose the '
                                   'checkpoint that is not quantised')
        self.weight_files = self._find_weight_files()
        #: canonical name -> (file, name in the file, shape, safetensors type)
        self.tensors: dict[str, tuple[Path, str, tuple[int, ...], str]] = {}
        self._scan()

    @property
    def model_type(self) -> str:
        """``model_type`` of the text part."""
        return str(self.fields.get('model_type', ''))

    def dtype(self) -> torch.dtype:
        """
        Return the type to run in when none is asked for: the declared one, else the stored one.

        float16 runs as float32: the ranges of the delta rule are not made for it.
        """
        declared = None
        for source in (self.fields.text, self.fields.outer):
            declared = declared or source.get('dtype') or source.get('torch_dtype')
        if declared is None:
            declared = str(FLOATS[self.tensors[TABLE][3]])
        name = str(declared).removeprefix('torch.')
        known = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float32}
        if name not in known:
            raise Incompatible(f'{self.fields.where}: dtype {declared!r} is not supported, only '
                               f'{", ".join(known)}')
        return known[name]

    def _find_weight_files(self) -> tuple[Path, ...]:
        index = self.directory / 'model.safetensors.index.json'
        single = self.directory / 'model.safetensors'
        if single.is_file() and not index.is_file():
            return (single,)
        if not index.is_file():
            pickled = [*self.directory.glob('*.bin'), *self.directory.glob('*.pth')]
            if pickled:
                raise Incompatible(f'{self.directory} holds pickled weights only '
                                   f'({pickled[0].name}); convert them to safetensors')
            raise Storage(f'{self.directory} holds neither model.safetensors nor its index; fetch '
                          'the checkpoint again')
        shards = read_json(index).get('weight_map')
        if not isinstance(shards, dict) or not shards or not all(
                isinstance(name, str) and name.endswith('.safetensors') and Path(name).name == name
                for name in shards.values()):
            raise Corrupt(f'{index} maps no tensors to files beside it; fetch it again')
        if single.is_file() and single.name not in shards.values():
            # transformers would take the one file, other engines the index: nobody can tell
            raise Corrupt(f'{self.directory} holds both {single.name} and an {index.name} of '
                          'other files; remove the weights that are out of date')
        return tuple(self.directory / name for name in sorted(set(shards.values())))

    def _scan(self) -> None:
        """List all tensors from the headers of the files."""
        skipped = 0
        for path in self.weight_files:
            with _opened(path) as file:
                for stored in file.keys():  # noqa: SIM118 (no mapping)
                    if SKIPPED.match(stored):
                        skipped += 1
                        continue
                    name = canonical(stored)
                    if name in self.tensors:
                        raise Corrupt(f'{path} holds {name} a second time (first in '
                                      f'{self.tensors[name][0].name}); fetch the checkpoint again')
                    header = file.get_slice(stored)
                    self.tensors[name] = (
                        path, stored, tuple(header.get_shape()), header.get_dtype())
        if skipped:
            log.info('%s: skipped %d tensors of the vision tower and of the multi-token '
                     'predictor; only the text model runs', self.directory, skipped)

    def check(self, params: dict[str, Param], tied: bool) -> None:
        """
        Compare the headers with what the family needs.

        :raises Corrupt: for a tensor that is missing or of another shape.
        :raises Incompatible: for a tensor that the family does not know, or of another type.
        """
        missing = [name for name in params if name not in self.tensors]
        if missing:
            raise Corrupt(f'{self.directory} lacks {len(missing)} of {len(params)} tensors: '
                          f'{_few(missing)}; fetch the checkpoint again')
        for name, (path, stored, shape, dtype) in self.tensors.items():
            if name == HEAD and tied:
                continue
            if name not in params:
                extra = [other for other in self.tensors if other not in params]
                raise Incompatible(f'{self.directory} holds tensors this family does not know: '
                                   f'{_few(extra)}; choose a plain, dense text checkpoint')
            if dtype not in FLOATS:
                raise Incompatible(f'{path.name}: {stored} is of type {dtype}; supported are '
                                   f'{", ".join(FLOATS)}: choose the checkpoint that is not '
                                   'quantised')
            if shape != params[name].shape:
                raise Corrupt(f'{path.name}: {stored} is {list(shape)} but config.json makes it '
                              f'{list(params[name].shape)}; config and weights do not belong '
                              'together')

    def read_into(self, parameters: Parameters, tied: bool) -> None:
        """
        Copy all tensors into place, converted to the type they run in.

        :raises Corrupt: for NaN or infinite weights, or a separate head where config says tied.
        """
        by_file: dict[Path, list[str]] = {}
        for name, (path, *_) in self.tensors.items():
            by_file.setdefault(path, []).append(name)
        for path, names in by_file.items():
            with _opened(path) as file:
                for name in names:
                    if name in parameters:
                        tensor = file.get_tensor(self.tensors[name][1])
                        if not torch.isfinite(tensor.sum(dtype=torch.float32)):
                            raise Corrupt(f'{path.name}: {name} holds NaN or infinite values; '
                                          'fetch the checkpoint again')
                        parameters.view(name).copy_(tensor)
        if tied and HEAD in self.tensors:
            self._check_tied_head(parameters)

    def _check_tied_head(self, parameters: Parameters) -> None:
        path, stored, shape, _ = self.tensors[HEAD]
        table = parameters.view(TABLE)
        with _opened(path) as file:
            if shape != tuple(table.shape) or not torch.equal(
                    file.get_tensor(stored).to(table.dtype), table.cpu()):
                raise Corrupt(f'{path.name} holds a {HEAD} that differs from the embedding, but '
                              'config.json says tie_word_embeddings; correct one of them')
