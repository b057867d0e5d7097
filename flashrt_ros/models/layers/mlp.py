"""Gated MLP (SwiGLU) blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flashrt_ros.arena import Buffer
from flashrt_ros.kernels.mlp import gated_mlp
from flashrt_ros.kernels.norm import Norm
from flashrt_ros.models.model import Block, State
from flashrt_ros.models.parameters import Param, Parameters


class MLPNames(NamedTuple):
    """What a checkpoint calls the tensors of the block, without ``.weight``."""

    norm: str = 'post_attention_layernorm'
    gate: str = 'mlp.gate_proj'
    up: str = 'mlp.up_proj'
    down: str = 'mlp.down_proj'


@dataclass(frozen=True)
class SwiGLU:
    """``x + down(silu(gate(norm(x))) * up(norm(x)))``; the norm uses its weight plainly."""

    index: int
    hidden: int
    intermediate: int
    eps: float
    names: MLPNames = MLPNames()

    _plus: ClassVar[int] = 0  # the norm stores w and uses this much more

    def parameters(self) -> list[Param]:
        """Gate and up projections are one stacked matrix."""
        base, names = f'model.layers.{self.index}', self.names
        inner = (self.intermediate, self.hidden)
        return [
            Param(f'{base}.{names.norm}.weight', (self.hidden,),
                  init='zeros' if self._plus else 'ones', wide=True),
            Param(f'{base}.{names.gate}.weight', inner, stack=f'{base}.mlp.in'),
            Param(f'{base}.{names.up}.weight', inner, stack=f'{base}.mlp.in'),
            Param(f'{base}.{names.down}.weight', (self.hidden, self.intermediate)),
        ]

    def buffers(self, dtype: torch.dtype) -> list[Buffer]:
        """No state."""
        return []

    def bind(self, weights: Parameters, state: State, tables: object) -> Block:
        """Return the block as a function of the residual stream; the position is not used."""
        base, names = f'model.layers.{self.index}', self.names
        norm = Norm.of(weights[f'{base}.{names.norm}.weight'] + self._plus, self.eps)
        gate_up, down = weights[f'{base}.mlp.in'], weights[f'{base}.{names.down}.weight']

        def block(x: Tensor, position: int) -> Tensor:
            return gated_mlp(x, norm, gate_up, down)

        return block


@dataclass(frozen=True)
class GatedMLP(SwiGLU):
    """As :class:`SwiGLU` with a norm that stores ``w`` and uses ``1 + w``."""

    _plus: ClassVar[int] = 1
