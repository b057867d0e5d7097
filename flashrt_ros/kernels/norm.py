"""RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467), computed in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """
    Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last axis.

    :param x: ``[..., D]``, any float type.
    :param weight: ``[D]`` (or anything that broadcasts against ``x``) fp32, the *effective*
        factor: families that store ``w`` and use ``1 + w`` add the one when they bind.
    :return: ``[..., D]`` in the type of ``x``.
    """
    wide = x.float()
    scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * weight).mul_(scale.unsqueeze(-1)).to(x.dtype)
