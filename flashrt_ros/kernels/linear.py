"""Linear maps with what is fused around them: a norm in front, a residual behind."""

from __future__ import annotations

import torch
from torch import Tensor
import torch.nn.functional as F

from flashrt_ros.kernels.norm import Norm, rms_norm


def normed_linear(x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
    """
    Return ``rms_norm(x) @ weight.T``.

    :param x: ``[T, K]`` residual stream.
    :param weight: ``[N, K]``, several projections of the same input stacked by rows, in either
        memory order.
    :return: ``[T, N]``.
    """
    return F.linear(rms_norm(x, norm), weight)


def linear_residual(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """
    Return ``residual + x @ weight.T`` as a fresh tensor.

    :param x: ``[T, K]``.
    :param weight: ``[N, K]`` in either memory order.
    :param residual: ``[T, N]``.
    """
    return torch.addmm(residual, x, weight.t())
