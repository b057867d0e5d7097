"""Attention blocks with QK norm and rotary embedding; plain, and with an output gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flashrt_ros.arena import Buffer, Role
from flashrt_ros.kernels.attention import attention, gated_attention
from flashrt_ros.kernels.linear import linear_residual, normed_linear
from flashrt_ros.kernels.norm import Norm
from flashrt_ros.models.model import Block, State
from flashrt_ros.models.parameters import Param, Parameters


class AttentionNames(NamedTuple):
    """What a checkpoint calls the tensors of the block, without ``.weight``."""

    norm: str = 'input_layernorm'
    out: str = 'self_attn.o_proj'
    q_norm: str = 'self_attn.q_norm'
    k_norm: str = 'self_attn.k_norm'


@dataclass(frozen=True)
class QKNormAttention:
    """
    ``x + o_proj(attention(norm(x)))``; norms use their weights plainly.

    Keeps the rows ``layers.<index>.k`` and ``.v``, ``(kv_heads, head_dim)`` in the model type.
    """

    index: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    names: AttentionNames = AttentionNames()

    _gates: ClassVar[int] = 0  # gates a query head, beside its query
    _plus: ClassVar[int] = 0  # norms store w and use this much more
    _attend = staticmethod(attention)

    def parameters(self) -> list[Param]:
        """Projections of queries with their gates, keys and values are one stacked matrix."""
        base, names = f'model.layers.{self.index}', self.names
        mixer, plain = f'{base}.self_attn', 'zeros' if self._plus else 'ones'
        rows = {'q': (1 + self._gates) * self.heads, 'k': self.kv_heads, 'v': self.kv_heads}
        return [
            Param(f'{base}.{names.norm}.weight', (self.hidden,), init=plain, wide=True),
            *(Param(f'{mixer}.{name}_proj.weight', (count * self.head_dim, self.hidden),
                    stack=f'{mixer}.in') for name, count in rows.items()),
            Param(f'{base}.{names.out}.weight', (self.hidden, self.heads * self.head_dim)),
            Param(f'{base}.{names.q_norm}.weight', (self.head_dim,), init=plain, wide=True),
            Param(f'{base}.{names.k_norm}.weight', (self.head_dim,), init=plain, wide=True),
        ]

    def buffers(self, dtype: torch.dtype) -> list[Buffer]:
        """Key and value rows."""
        row = (self.kv_heads, self.head_dim)
        return [Buffer(f'layers.{self.index}.{name}', Role.ROWS, dtype, row) for name in 'kv']

    def bind(self, weights: Parameters, state: State, tables: tuple[Tensor, Tensor]) -> Block:
        """Return the block as a function of the residual stream and the position."""
        base, names, plus = f'model.layers.{self.index}', self.names, self._plus
        norm = Norm.of(weights[f'{base}.{names.norm}.weight'] + plus, self.eps)
        inner, outer = weights[f'{base}.self_attn.in'], weights[f'{base}.{names.out}.weight']
        qk_norm = Norm.of(torch.cat((
            (weights[f'{base}.{names.q_norm}.weight'] + plus).expand(self.heads, -1),
            (weights[f'{base}.{names.k_norm}.weight'] + plus).expand(self.kv_heads, -1))), self.eps)
        k_rows, v_rows = (state.take(f'layers.{self.index}.{name}') for name in 'kv')
        cos, sin = tables
        attend = self._attend

        def block(x: Tensor, position: int) -> Tensor:
            mixed = normed_linear(x, norm, inner)
            out = attend(mixed, k_rows, v_rows, position, qk_norm, cos, sin)
            return linear_residual(out, outer, x)

        return block


@dataclass(frozen=True)
class GatedAttention(QKNormAttention):
    """``x + o_proj(sigmoid(gate) * attention(norm(x)))``; norms store ``w`` and use ``1 + w``."""

    _gates: ClassVar[int] = 1
    _plus: ClassVar[int] = 1
    _attend = staticmethod(gated_attention)
