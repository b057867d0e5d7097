"""Causal depthwise convolutions over a few tokens, with the window of past inputs in place."""

from __future__ import annotations

import torch
from torch import Tensor


def short_convolution(x: Tensor, window: Tensor, taps: Tensor) -> Tensor:
    """
    Return the causal depthwise convolution of ``x [T, C]``, fp32; moves ``window`` on.

    :param window: ``[K - 1, C]`` the last inputs, oldest first; in place.
    :param taps: fp32 ``[K, C]``, oldest tap first.
    """
    count, tokens = taps.shape[0], x.shape[0]
    history = torch.cat((window, x))
    window.copy_(history[tokens:])
    if tokens == 1:
        return (history * taps).sum(0, True)
    history = history.float()
    out = history[:tokens] * taps[0]
    for tap in range(1, count):
        out.addcmul_(history[tap:tap + tokens], taps[tap])
    return out


def gated_short_convolution(mixed: Tensor, window: Tensor, taps: Tensor) -> Tensor:
    """
    Return ``c * conv(b * x)``, the double-gated short convolution of LFM2 (arXiv 2511.23404).

    :param mixed: ``[T, 3 C]``: ``b``, ``c`` and ``x``, as the stacked projection leaves them.
    :param window: ``[K - 1, C]`` the last ``b * x``, oldest first; in place.
    :param taps: fp32 ``[K, C]``, oldest tap first.
    :return: ``[T, C]`` in the type of ``mixed``.
    """
    b, c, x = mixed.chunk(3, -1)
    return short_convolution(b * x, window, taps).mul_(c).to(mixed.dtype)
