"""Gated MLP (SwiGLU, Shazeer 2020, arXiv 2002.05202) with its norm and residual."""

from __future__ import annotations

from torch import Tensor
import torch.nn.functional as F

from flashrt_ros.kernels.linear import linear_residual, normed_linear
from flashrt_ros.kernels.norm import Norm


def gated_mlp(x: Tensor, norm: Norm, gate_up: Tensor, down: Tensor) -> Tensor:
    """
    Return ``x + down(silu(gate(n)) * up(n))`` with ``n = rms_norm(x)``.

    :param x: ``[T, K]`` residual stream.
    :param gate_up: ``[2 M, K]``, gate rows above up rows.
    :param down: ``[K, M]``.
    :return: ``[T, K]``.
    """
    gate, up = normed_linear(x, norm, gate_up).chunk(2, dim=-1)
    return linear_residual(F.silu(gate).mul_(up), down, x)
