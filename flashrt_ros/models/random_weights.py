"""
Weights without a file: seeded, the same on every device, quick at true size.

Drawing billions of normal numbers takes minutes. Here one pool of normal numbers, its length a
prime so that the rows of no matrix coincide, is drawn on the CPU and copied out with another start
for each tensor: memory speed, and the same bits whichever device holds the model.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from flashrt_ros.models.parameters import Param, Parameters

POOL = 1_048_573  # the largest prime below 2**20
DECAY = (0.01, 16.0)  # range of A, as Mamba-like models are initialised


def fill(parameters: Parameters, seed: int) -> None:
    """
    Fill all weights from ``seed``.

    Scales keep activations near one and make the state matter: ``linear`` has deviation
    ``1 / sqrt(fan in)``; ``embedding`` is small, so that what the layers add, and not the last
    token alone, decides the logits even where the head is tied; ``decay`` (``A_log``) draws A
    log-uniformly from ``[0.01, 16]``, so that heads forget at all speeds.
    """
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(POOL, generator=generator).to(parameters.device)
    for name, view in parameters.items():
        _fill_one(parameters.params[name], view, pool, seed)


def _fill_one(param: Param, view: Tensor, pool: Tensor, seed: int) -> None:
    if param.init == 'zeros':
        view.zero_()
    elif param.init == 'ones':
        view.fill_(1.0)
    elif param.init == 'decay':
        uniform = 0.5 * (1 + torch.erf(_draw(param, pool, seed) / math.sqrt(2)))
        low, high = (math.log(bound) for bound in DECAY)
        view.copy_(low + (high - low) * uniform.view(param.shape))
    else:
        fan_in = math.prod(param.shape[1:])
        gain = {'linear': 1.0, 'norm': 0.1 * math.sqrt(fan_in), 'embedding': 1.5}[param.init]
        _copy_scaled(view, _start(param, seed), pool * (gain / math.sqrt(fan_in)))


def _start(param: Param, seed: int) -> int:
    return zlib.crc32(f'{seed}:{param.name}'.encode()) % POOL


def _draw(param: Param, pool: Tensor, seed: int) -> Tensor:
    count = math.prod(param.shape)
    start = _start(param, seed)
    return pool[torch.arange(start, start + count, device=pool.device) % POOL]


def _copy_scaled(view: Tensor, start: int, pool: Tensor) -> None:
    """Copy ``pool`` round and round into ``view``, starting at ``start``."""
    if not view.is_contiguous():
        flat = torch.empty(view.shape, dtype=view.dtype, device=view.device)
        _copy_scaled(flat, start, pool)
        view.copy_(flat)
        return
    flat, done = view.view(-1), 0
    while done < flat.numel():
        span = min(flat.numel() - done, POOL - start)
        flat[done:done + span].copy_(pool[start:start + span])
        done, start = done + span, 0
