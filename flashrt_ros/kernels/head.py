"""The vocabulary head: logits of what comes after the last token."""

from __future__ import annotations

from torch import Tensor

from flashrt_ros.kernels.linear import normed_linear


def head(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """
    Return fp32 logits ``[V]`` of the last token of ``x``.

    :param x: ``[T, K]`` residual stream; only its last row is read.
    :param norm: ``[K]`` fp32 effective factor of the final norm.
    :param weight: ``[V, K]`` (the embedding table itself where the head is tied).
    """
    return normed_linear(x[-1:], norm, eps, weight)[0].float()
