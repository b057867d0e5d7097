"""
Fingerprints: who may restore what.

A readable identity in three parts. *Hard* fields refuse on mismatch (weights, architecture,
dtypes, manifest, tokenizer, adapter); *soft* fields load, but the future of the state is then not
promised to be bit-exact (device kind, sources of the kernels, library versions, threads, grid);
*recorded* fields are only warned about (chat template: history is token ids).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
import importlib.metadata
from pathlib import Path
import platform
from typing import Any, Protocol

from blake3 import blake3
import torch

import flashrt_ros
from flashrt_ros.arena import Manifest
from flashrt_ros.capsule.header import dump_json
from flashrt_ros.capsule.weights import ModelLike, weights_digest
from flashrt_ros.errors import Corrupt, Incompatible

__all__ = ['Fingerprint', 'build', 'weights_digest']

LAYOUT_VERSION = 1  # of fixed block and rows; raise when the meaning of saved bytes changes
_ABSENT = '(absent)'
_SHOWN = 60  # characters of a value in a message


class TextLike(Protocol):
    """What :func:`build` needs of the tokenizer."""

    def digest(self) -> str:
        """Return a digest of what decides ids and text."""

    def chat_digest(self) -> str:
        """Return a digest of the chat template, '' without one."""


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a state; all values are JSON."""

    hard: dict[str, Any]
    soft: dict[str, Any]
    recorded: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Short hexadecimal name of the hard part: equal means that capsules may be exchanged."""
        return self.hard_digest[:16]

    @cached_property  # every answer about a capsule names it
    def hard_digest(self) -> str:
        """blake3 of the hard part, 64 hexadecimal digits."""
        return _digest(self.hard)

    @property
    def full_digest(self) -> str:
        """blake3 of hard and soft parts, 64 hexadecimal digits."""
        return _digest({'hard': self.hard, 'soft': self.soft})

    def to_json(self) -> dict[str, dict]:
        """Return the three parts as they stand in a capsule header."""
        return {'hard': self.hard, 'soft': self.soft, 'recorded': self.recorded}

    @classmethod
    def from_json(cls, data: Any) -> Fingerprint:
        """
        Read the parts back.

        :raises Corrupt: when they are not objects.
        """
        if not isinstance(data, dict) or not {'hard', 'soft'} <= data.keys() <= {
                'hard', 'soft', 'recorded'} or not all(isinstance(v, dict) for v in data.values()):
            raise Corrupt('The fingerprint of the capsule is malformed.')
        return cls(data['hard'], data['soft'], data.get('recorded', {}))

    def refuse_unless_compatible(self, saved: Fingerprint | dict) -> list[str]:
        """
        Compare ``saved`` with this, the present one; return the soft differences in words.

        :param saved: a fingerprint, or its JSON as it stands in a header.
        :raises Incompatible: when hard fields differ, naming each with both values.
        """
        saved = _of(saved)
        hard = differences(saved.hard, self.hard)
        if hard:
            raise Incompatible(
                'The capsule was saved by something else: ' + '; '.join(hard) + '. Load the model '
                'it was saved with, or save it again with this one.')
        return differences(saved.soft, self.soft)

    def exact_future(self, saved: Fingerprint | dict) -> bool:
        """Tell whether a state of ``saved`` continues here bit for bit."""
        return not differences(_of(saved).soft, self.soft)

    def warnings(self, saved: Fingerprint | dict) -> list[str]:
        """Return differences that change nothing for the state but are worth a word."""
        return differences(_of(saved).recorded, self.recorded)


def _of(saved: Fingerprint | dict) -> Fingerprint:
    return saved if isinstance(saved, Fingerprint) else Fingerprint.from_json(saved)


def _digest(value: Any) -> str:
    return blake3(dump_json(value).encode('ascii')).hexdigest()


def _flatten(value: Any, path: str, into: dict[str, Any]) -> None:
    if isinstance(value, dict) and (value or not path):
        for key, item in value.items():
            _flatten(item, f'{path}.{key}' if path else str(key), into)
    else:
        into[path] = value


def _show(value: Any) -> str:
    text = value if value is _ABSENT else dump_json(value)
    return text if len(text) <= _SHOWN else f'{text[:_SHOWN - 16]}...{text[-12:]}'


def differences(saved: dict, present: dict) -> list[str]:
    """List the fields that differ, by dotted path, with the saved and the present value."""
    if dump_json(saved) == dump_json(present):
        return []  # by far the most frequent case
    old: dict[str, Any] = {}
    new: dict[str, Any] = {}
    _flatten(saved, '', old)
    _flatten(present, '', new)
    result = []
    for path in [*new, *(p for p in old if p not in new)]:
        a, b = old.get(path, _ABSENT), new.get(path, _ABSENT)
        if a is _ABSENT or b is _ABSENT or dump_json(a) != dump_json(b):
            result.append(f'{ascii(path)[1:-1]} is {_show(a)} in the capsule and {_show(b)} here')
    if not result and dump_json(saved) != dump_json(present):  # dots within keys
        result.append('the nesting of the fields differs')
    return result


# -- building -------------------------------------------------------------------------------------

def describe_manifest(manifest: Manifest) -> dict[str, Any]:
    """Describe each buffer in one readable line, and the order by a digest."""
    described = manifest.describe()
    fields = {d['name']: f'{d["role"]} {d["dtype"]} {d["shape"]}' for d in described}
    return {'buffers': fields, 'order': _digest([d['name'] for d in described])[:16]}


def sources_digest(*parts: str) -> str:
    """Digest the sources under the given paths of this package (files or directories)."""
    root = Path(flashrt_ros.__file__).parent
    digest = blake3()
    for part in parts:
        path = root / part
        files = [path] if path.is_file() else sorted(
            f for s in ('*.py', '*.cu', '*.cuh', '*.h') for f in path.rglob(s))
        for file in files:
            content = file.read_bytes()
            digest.update(f'{file.relative_to(root).as_posix()} {len(content)}\n'.encode())
            digest.update(content)
    return digest.hexdigest()[:32]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_kind(device: torch.device) -> str:
    if device.type == 'cuda':
        major, minor = torch.cuda.get_device_capability(device)
        return f'cuda {torch.cuda.get_device_name(device)} sm_{major}{minor}'
    return f'{device.type} {platform.machine()}'


def build(model: ModelLike, manifest: Manifest, text: TextLike | None = None,
          device: str | torch.device = 'cpu', grid: int = 512, *,
          adapter: str | None = None, soft: dict[str, Any] | None = None) -> Fingerprint:
    """
    Take the fingerprint of a loaded model.

    :param text: tokenizer; None for a program that is no language model.
    :param grid: tokens of a prefill append.
    :param adapter: digest of an adapter, None for none.
    :param soft: further soft fields, for instance pinned autotuner choices.
    """
    device = torch.device(device)
    return Fingerprint(
        hard={
            'weights': weights_digest(model),
            'architecture': model.architecture(),
            'dtype': str(model.dtype).removeprefix('torch.'),
            'manifest': describe_manifest(manifest),
            'layout_version': LAYOUT_VERSION,
            'tokenizer': text.digest() if text is not None else None,
            'adapter': adapter,
        },
        soft={
            'device': _device_kind(device),
            'kernel_sources': sources_digest('kernels'),
            'model_sources': sources_digest('models', 'plan.py', 'sampling.py'),
            'package': flashrt_ros.__version__,
            'torch': str(torch.__version__),
            'numpy': _version('numpy'),
            'threads': torch.get_num_threads(),
            'cpu_capability': torch.backends.cpu.get_cpu_capability(),
            'grid': grid,
            **(soft or {}),
        },
        recorded={
            'chat_template': text.chat_digest() if text is not None else None,
        })
