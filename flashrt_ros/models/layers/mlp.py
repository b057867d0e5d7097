"""Gated MLP block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashrt_ros.arena import Buffer
from flashrt_ros.kernels.mlp import gated_mlp
from flashrt_ros.kernels.norm import Norm
from flashrt_ros.models.model import Block, State
from flashrt_ros.models.parameters import Param, Parameters


@dataclass(frozen=True)
class GatedMLP:
    """``x + down(silu(gate(norm(x))) * up(norm(x)))``; keeps no state."""

    index: int
    hidden: int
    intermediate: int
    eps: float

    def parameters(self) -> list[Param]:
        """Gate and up projections are one stacked matrix."""
        base = f'model.layers.{self.index}'
        inner = (self.intermediate, self.hidden)
        return [
            Param(f'{base}.post_attention_layernorm.weight', (self.hidden,), init='zeros',
                  wide=True),
            Param(f'{base}.mlp.gate_proj.weight', inner, stack=f'{base}.mlp.in'),
            Param(f'{base}.mlp.up_proj.weight', inner, stack=f'{base}.mlp.in'),
            Param(f'{base}.mlp.down_proj.weight', (self.hidden, self.intermediate)),
        ]

    def buffers(self, dtype: torch.dtype) -> list[Buffer]:
        """No state."""
        return []

    def bind(self, weights: Parameters, state: State, tables: object) -> Block:
        """Return the block as a function of the residual stream; the position is not used."""
        base = f'model.layers.{self.index}'
        norm = Norm.of(weights[f'{base}.post_attention_layernorm.weight'] + 1, self.eps)
        gate_up, down = weights[f'{base}.mlp.in'], weights[f'{base}.mlp.down_proj.weight']

        def block(x: Tensor, position: int) -> Tensor:
            return gated_mlp(x, norm, gate_up, down)

        return block
