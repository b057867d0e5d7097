"""RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467), computed in fp32."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """
    A norm made ready: constants are folded, so that one token costs four small operations.

    ``x / sqrt(mean(x^2) + eps) * w  =  x * gain / hypot(|x|, floor)`` with
    ``gain = w sqrt(D)`` and ``floor = sqrt(eps D)``.
    """

    gain: Tensor  # fp32 [D], or [H, D] for another factor a head
    floor: Tensor  # fp32 scalar

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> Norm:
        """
        Return the norm with the *effective* factor ``weight [..., D]`` in fp32.

        Families that store ``w`` and use ``1 + w`` add the one before.
        """
        dim = weight.shape[-1]
        return cls(weight.float() * math.sqrt(dim),
                   torch.tensor(math.sqrt(eps * dim), device=weight.device))


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Norm ``x [..., D]`` over the last axis; the result is fresh and of the type of ``x``."""
    wide = x.float()
    length = torch.linalg.vector_norm(wide, 2, -1, True).hypot_(norm.floor)
    return wide.mul(norm.gain).div_(length).to(x.dtype)
