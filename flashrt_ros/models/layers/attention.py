"""Gated attention block with QK norm and partial rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashrt_ros.arena import Buffer, Role
from flashrt_ros.kernels.attention import gated_attention
from flashrt_ros.kernels.linear import linear_residual, normed_linear
from flashrt_ros.kernels.norm import Norm
from flashrt_ros.models.model import Block, State
from flashrt_ros.models.parameters import Param, Parameters


@dataclass(frozen=True)
class GatedAttention:
    """
    ``x + o_proj(sigmoid(gate) * attention(norm(x)))``; norms store ``w`` and use ``1 + w``.

    Keeps the rows ``layers.<index>.k`` and ``.v``, ``(kv_heads, head_dim)`` in the model type.
    """

    index: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    def parameters(self) -> list[Param]:
        """Projections of queries with gates, keys and values are one stacked matrix."""
        base = f'model.layers.{self.index}'
        mixer = f'{base}.self_attn'
        rows = {'q': 2 * self.heads, 'k': self.kv_heads, 'v': self.kv_heads}
        return [
            Param(f'{base}.input_layernorm.weight', (self.hidden,), init='zeros', wide=True),
            *(Param(f'{mixer}.{name}_proj.weight', (count * self.head_dim, self.hidden),
                    stack=f'{mixer}.in') for name, count in rows.items()),
            Param(f'{mixer}.o_proj.weight', (self.hidden, self.heads * self.head_dim)),
            Param(f'{mixer}.q_norm.weight', (self.head_dim,), init='zeros', wide=True),
            Param(f'{mixer}.k_norm.weight', (self.head_dim,), init='zeros', wide=True),
        ]

    def buffers(self, dtype: torch.dtype) -> list[Buffer]:
        """Key and value rows."""
        row = (self.kv_heads, self.head_dim)
        return [Buffer(f'layers.{self.index}.{name}', Role.ROWS, dtype, row) for name in 'kv']

    def bind(self, weights: Parameters, state: State, tables: tuple[Tensor, Tensor]) -> Block:
        """Return the block as a function of the residual stream and the position."""
        base = f'model.layers.{self.index}'
        mixer = f'{base}.self_attn'
        norm = Norm.of(weights[f'{base}.input_layernorm.weight'] + 1, self.eps)
        inner, outer = weights[f'{mixer}.in'], weights[f'{mixer}.o_proj.weight']
        qk_norm = Norm.of(torch.cat((
            (weights[f'{mixer}.q_norm.weight'] + 1).expand(self.heads, -1),
            (weights[f'{mixer}.k_norm.weight'] + 1).expand(self.kv_heads, -1))), self.eps)
        k_rows, v_rows = (state.take(f'layers.{self.index}.{name}') for name in 'kv')
        cos, sin = tables

        def block(x: Tensor, position: int) -> Tensor:
            mixed = normed_linear(x, norm, inner)
            out = gated_attention(mixed, k_rows, v_rows, position, qk_norm, cos, sin)
            return linear_residual(out, outer, x)

        return block
