"""
The sampler: its settings, counter and random numbers are part of the state.

A step samples from the ``logits`` buffer with the settings found in the arena, so a restored
capsule continues the same random sequence. The generator is counter based (Philox-4x32-10,
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): number *n* of seed *s* is a
pure function of *(s, n)*, which needs no hidden generator state and is the same on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
import math
import struct
from typing import Protocol

import torch

from flashrt_ros.arena import ALIGN, Arena, Buffer, Manifest, Role
from flashrt_ros.errors import InvalidArgument

LOGITS = 'logits'
_M0, _M1, _W0, _W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
_U32, _U64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
_LEAST = 2.0 ** -149  # below, the fp32 of the state is 0, which is no top_p


@dataclass(frozen=True)
class Sampling:
    """
    Settings of the sampler.

    :param temperature: 0 is greedy; otherwise logits are divided by it.
    :param top_k: keep the k largest logits; 0 keeps all.
    :param top_p: keep the smallest set of tokens whose probabilities reach this sum; 1 keeps all.
    :param seed: 64-bit key of the random sequence.
    :raises InvalidArgument: for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check(self.temperature, self.top_k, self.top_p, self.seed)


def check(temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> None:
    """
    Refuse what is no setting of a sampler.

    :raises InvalidArgument: for a value outside its range.
    """
    if not (math.isfinite(temperature) and 0.0 <= temperature <= 100.0):
        raise InvalidArgument(f'temperature must lie in [0, 100] (0 is greedy), not {temperature}.')
    if not (hasattr(top_k, '__index__') and hasattr(seed, '__index__')):
        raise InvalidArgument(f'top_k and seed must be integers, not {top_k!r} and {seed!r}.')
    if not 0 <= top_k < 2 ** 31:
        raise InvalidArgument(f'top_k must be 0 (off) or a positive count, not {top_k}.')
    if not (math.isfinite(top_p) and _LEAST <= top_p <= 1.0):
        raise InvalidArgument(f'top_p must lie in (0, 1] (1 is off), not {top_p}.')
    if not 0 <= seed <= _U64:
        raise InvalidArgument(f'seed must be an unsigned 64-bit number, not {seed}.')


def buffers(vocab_size: int) -> list[Buffer]:
    """Boundary buffers a sampler needs: next-token logits, settings, counter."""
    return [
        Buffer(LOGITS, Role.BOUNDARY, torch.float32, (vocab_size,)),
        Buffer('sampler.temperature', Role.BOUNDARY, torch.float32, (1,)),
        Buffer('sampler.top_p', Role.BOUNDARY, torch.float32, (1,)),
        Buffer('sampler.top_k', Role.BOUNDARY, torch.int32, (1,)),
        Buffer('sampler.seed', Role.BOUNDARY, torch.int64, (1,)),
        Buffer('sampler.counter', Role.BOUNDARY, torch.int64, (1,)),
    ]


SETTINGS = ('temperature', 'top_p', 'top_k', 'seed', 'counter')
#: settings and counter as they lie in a fixed block, each at the start of a cell
_LAYOUT = struct.Struct(f'=f{ALIGN - 4}xf{ALIGN - 4}xi{ALIGN - 4}xQ{ALIGN - 8}xq')


def write(arena: Arena, sampling: Sampling, counter: int) -> None:
    """Put settings and counter into the state; a device is not waited for."""
    choose(arena, {name: getattr(sampling, name) for name in SETTINGS[:-1]}, counter)


def choose(arena: Arena, chosen: Mapping[str, float], counter: int | None = None) -> None:
    """
    Change some settings of the state, by name, and leave the others; a device is not waited for.

    :param counter: where in the random sequence to go on; None leaves that too.
    """
    for name, value in chosen.items():
        arena[f'sampler.{name}'].fill_(_signed(int(value)) if name == 'seed' else value)
    if counter is not None:
        arena['sampler.counter'].fill_(counter)


def reseed(manifest: Manifest, fixed: torch.Tensor, seed: int) -> None:
    """Start another random sequence in a fixed block, the live one or a copy."""
    for name, value in (('sampler.seed', _signed(int(seed))), ('sampler.counter', 0)):
        offset = manifest.offsets[name]
        fixed[offset:offset + 8].view(torch.int64).fill_(value)


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >> 63 else seed  # two's complement


def read(arena: Arena) -> tuple[Sampling, int]:
    """Return settings and counter of the state; a device is waited for."""
    temperature, top_p, top_k, seed, counter = (
        arena[f'sampler.{name}'].item() for name in SETTINGS)
    return Sampling(temperature, int(top_k), top_p, int(seed) & _U64), int(counter)


class Settings(Protocol):
    """
    Changes the settings of a state and asks what they are then; a device goes on meanwhile.

    There is memory for one answer, so who asks takes it before anybody asks again.
    """

    def choose(self, chosen: Mapping[str, float], counter: int | None) -> None:
        """As :func:`choose`, and ask."""

    def answer(self) -> tuple[float, int, float, int, int]:
        """Return temperature, top_k, top_p, seed and counter as of when they were asked for."""


class HostSettings:
    """The :class:`Settings` of a state in the memory of the host."""

    def __init__(self, arena: Arena) -> None:
        start = arena.manifest.offsets['sampler.temperature']
        self._arena = arena
        self._live = arena.fixed[start:start + _LAYOUT.size]
        self._answer = (0.0, 0, 1.0, 0, 0)

    def choose(self, chosen: Mapping[str, float], counter: int | None) -> None:
        """See there."""
        choose(self._arena, chosen, counter)
        temperature, top_p, top_k, seed, count = _LAYOUT.unpack_from(
            self._live.cpu().numpy().data)
        self._answer = temperature, top_k, top_p, seed, count

    def answer(self) -> tuple[float, int, float, int, int]:
        """See there."""
        return self._answer


def uniform(seed: int, counter: int) -> float:
    """Return number ``counter`` of the sequence ``seed`` as a multiple of 2**-53 in [0, 1)."""
    x0, x1, x2, x3 = counter & _U32, (counter >> 32) & _U32, 0, 0
    k0, k1 = seed & _U32, (seed >> 32) & _U32
    for _ in range(10):
        p0, p1 = _M0 * x0, _M1 * x2
        x0, x1, x2, x3 = (p1 >> 32) ^ x1 ^ k0, p1 & _U32, (p0 >> 32) ^ x3 ^ k1, p0 & _U32
        k0, k1 = (k0 + _W0) & _U32, (k1 + _W1) & _U32
    return ((x0 << 21) | (x1 >> 11)) * 2.0 ** -53


def sample(arena: Arena) -> int:
    """
    Choose the next token from the ``logits`` buffer; changes nothing.

    Ties are broken by the lower id. With a temperature, the token is the first one, in id order,
    at which the cumulated probability of the kept tokens exceeds ``uniform(seed, counter)``.
    """
    logits = arena[LOGITS]
    temperature = arena['sampler.temperature'].item()
    if temperature == 0.0:
        return int(logits.argmax().item())
    settings, counter = read(arena)
    scores, ids = logits.double() / temperature, None
    if 0 < settings.top_k < scores.numel():
        ids = _largest(scores, settings.top_k)
        scores = scores[ids]
    weights = torch.softmax(scores, dim=0)
    if settings.top_p < 1.0:
        kept = _nucleus(weights, settings.top_p)
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    ladder = weights.cumsum(0)
    # A token of weight 0 is never chosen: its step on the ladder has no height.
    draw = uniform(settings.seed, counter) * ladder[-1].item()
    index = min(int(torch.searchsorted(ladder, draw, right=True).item()), ladder.numel() - 1)
    return index if ids is None else int(ids[index].item())


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the ``count`` largest scores in id order, ties to the lower id."""
    threshold = scores.topk(count).values[-1]
    above = (scores > threshold).nonzero()[:, 0]
    ties = (scores == threshold).nonzero()[:count - above.numel(), 0]
    return torch.cat([above, ties]).sort().values


def _nucleus(weights: torch.Tensor, mass: float) -> torch.Tensor:
    """Ids of the smallest set of largest weights whose sum reaches ``mass``, in id order."""
    ordered, order = weights.sort(descending=True, stable=True)
    count = int((ordered.cumsum(0) < mass).sum().item()) + 1
    return order[:count].sort().values
