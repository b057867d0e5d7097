"""Double-gated short convolution block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashrt_ros.arena import Buffer, Role
from flashrt_ros.kernels.convolution import gated_short_convolution
from flashrt_ros.kernels.linear import linear_residual, normed_linear
from flashrt_ros.kernels.norm import Norm
from flashrt_ros.models.model import Block, State
from flashrt_ros.models.parameters import Param, Parameters


@dataclass(frozen=True)
class ShortConv:
    """
    ``x + out_proj(c * conv(b * u))`` with ``b, c, u = in_proj(norm(x))``.

    Keeps ``layers.<index>.conv``, the last ``K - 1`` inputs ``b * u`` of the convolution as
    ``(K - 1, hidden)`` in the model type, oldest first. The norm uses its weight plainly.
    """

    index: int
    hidden: int
    kernel: int
    eps: float

    def parameters(self) -> list[Param]:
        """The input projection is one matrix in the checkpoint already."""
        base = f'model.layers.{self.index}'
        return [
            Param(f'{base}.operator_norm.weight', (self.hidden,), init='ones', wide=True),
            Param(f'{base}.conv.in_proj.weight', (3 * self.hidden, self.hidden)),
            Param(f'{base}.conv.conv.weight', (self.hidden, 1, self.kernel), wide=True, taps=True),
            Param(f'{base}.conv.out_proj.weight', (self.hidden, self.hidden)),
        ]

    def buffers(self, dtype: torch.dtype) -> list[Buffer]:
        """Convolution window."""
        return [Buffer(f'layers.{self.index}.conv', Role.CONV, dtype,
                       (self.kernel - 1, self.hidden))]

    def bind(self, weights: Parameters, state: State, tables: object) -> Block:
        """Return the block as a function of the residual stream; the position is not used."""
        base = f'model.layers.{self.index}'
        norm = Norm.of(weights[f'{base}.operator_norm.weight'], self.eps)
        inner = weights[f'{base}.conv.in_proj.weight']
        outer = weights[f'{base}.conv.out_proj.weight']
        taps = weights[f'{base}.conv.conv.weight']
        window = state.take(f'layers.{self.index}.conv')

        def block(x: Tensor, position: int) -> Tensor:
            mixed = normed_linear(x, norm, inner)
            return linear_residual(gated_short_convolution(mixed, window, taps), outer, x)

        return block
