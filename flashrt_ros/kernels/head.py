"""The vocabulary head: logits of what comes after the last token."""

from __future__ import annotations

from torch import Tensor

from flashrt_ros.kernels.linear import normed_linear
from flashrt_ros.kernels.norm import Norm


def head(x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
    """
    Return fp32 logits ``[V]`` of the last token of ``x``.

    :param x: ``[T, K]`` residual stream; only its last row is read.
    :param weight: ``[V, K]`` (the embedding table itself where the head is tied).
    """
    return normed_linear(x[-1:], norm, weight)[0].float()
