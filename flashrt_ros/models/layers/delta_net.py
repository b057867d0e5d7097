"""Gated delta net block: short convolution, gated delta rule, gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashrt_ros.arena import Buffer, Role
from flashrt_ros.kernels.delta import DeltaWeights, gated_delta_net
from flashrt_ros.kernels.linear import linear_residual, normed_linear
from flashrt_ros.kernels.norm import Norm
from flashrt_ros.models.model import Block, State
from flashrt_ros.models.parameters import Param, Parameters


@dataclass(frozen=True)
class GatedDeltaNet:
    """
    ``x + out_proj(gated_norm(delta_rule(conv(norm(x)))))``.

    Keeps ``layers.<index>.conv``, the last ``K - 1`` inputs of the convolution as
    ``(K - 1, channels)``, oldest first (a tap is one contiguous line, so a step moves whole
    lines), and ``layers.<index>.recurrent``, fp32 ``(value_heads, key_dim, value_dim)``.
    The input norm stores ``w`` and uses ``1 + w``; the gated norm uses its weight plainly.
    """

    index: int
    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float

    @property
    def channels(self) -> int:
        """Width of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def parameters(self) -> list[Param]:
        """All projections of the input are one stacked matrix: conv channels, z, b, a."""
        base = f'model.layers.{self.index}'
        mixer = f'{base}.linear_attn'
        values = self.value_heads * self.value_dim
        rows = {'qkv': self.channels, 'z': values, 'b': self.value_heads, 'a': self.value_heads}
        return [
            Param(f'{base}.input_layernorm.weight', (self.hidden,), init='zeros', wide=True),
            Param(f'{mixer}.dt_bias', (self.value_heads,), init='ones', wide=True),
            Param(f'{mixer}.A_log', (self.value_heads,), init='decay', wide=True),
            Param(f'{mixer}.conv1d.weight', (self.channels, 1, self.kernel), wide=True,
                  taps=True),
            *(Param(f'{mixer}.in_proj_{name}.weight', (count, self.hidden), stack=f'{mixer}.in')
              for name, count in rows.items()),
            Param(f'{mixer}.norm.weight', (self.value_dim,), init='ones', wide=True),
            Param(f'{mixer}.out_proj.weight', (self.hidden, values)),
        ]

    def buffers(self, dtype: torch.dtype) -> list[Buffer]:
        """Convolution window and recurrent state."""
        name = f'layers.{self.index}'
        state = (self.value_heads, self.key_dim, self.value_dim)
        return [Buffer(f'{name}.conv', Role.CONV, dtype, (self.kernel - 1, self.channels)),
                Buffer(f'{name}.recurrent', Role.RECURRENT, torch.float32, state)]

    def bind(self, weights: Parameters, state: State, tables: object) -> Block:
        """Return the block as a function of the residual stream and the position."""
        base = f'model.layers.{self.index}'
        mixer = f'{base}.linear_attn'
        norm = Norm.of(weights[f'{base}.input_layernorm.weight'] + 1, self.eps)
        inner, outer = weights[f'{mixer}.in'], weights[f'{mixer}.out_proj.weight']
        rule = DeltaWeights.of(
            weights[f'{mixer}.conv1d.weight'], weights[f'{mixer}.A_log'],
            weights[f'{mixer}.dt_bias'], Norm.of(weights[f'{mixer}.norm.weight'], self.eps),
            self.key_dim)
        window = state.take(f'layers.{self.index}.conv')
        recurrent = state.take(f'layers.{self.index}.recurrent')
        key_heads = self.key_heads

        def block(x: Tensor, position: int) -> Tensor:
            mixed = normed_linear(x, norm, inner)
            out = gated_delta_net(mixed, window, recurrent, rule, key_heads)
            return linear_residual(out, outer, x)

        return block
