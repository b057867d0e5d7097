"""
Weights in memory: canonical names outside, stacked matrices inside.

A checkpoint names every projection; a fast layer multiplies all projections of one input at once.
:class:`Parameters` allocates the stacked matrices and hands out *views* of them under the
canonical names, so weights lie in memory once, loading copies straight into place, and whoever
hashes or saves weights sees what the checkpoint had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Param:
    """
    One tensor of a checkpoint.

    :param name: canonical Hugging Face name of the text model, ``model.layers.0...``.
    :param shape: shape in the checkpoint.
    :param init: how ``random:`` weights fill it, see :mod:`flashrt_ros.models.random_weights`.
    :param stack: name of the matrix whose next rows this is; None for a tensor of its own.
    :param wide: keep in fp32 whatever the model type: small and sensitive.
    :param lookup: a table whose rows are picked, so kept row by row.
    :param taps: a depthwise kernel ``[C, 1, K]`` that is kept as ``[K, C]``.
    """

    name: str
    shape: tuple[int, ...]
    init: str = 'linear'
    stack: str | None = None
    wide: bool = False
    taps: bool = False
    lookup: bool = False


class Parameters:
    """All weights of a model, allocated but not yet filled."""

    def __init__(self, params: Iterable[Param], dtype: torch.dtype,
                 device: torch.device | str) -> None:
        self.params = {param.name: param for param in params}
        self.dtype = dtype
        self.device = torch.empty(0, device=device).device  # with its index
        stacks: dict[str, list[Param]] = {}
        for param in self.params.values():
            stacks.setdefault(param.stack or param.name, []).append(param)
        self._stored: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}
        for name, members in stacks.items():
            self._allocate(name, members)

    def _allocate(self, name: str, members: list[Param]) -> None:
        first = members[0]
        dtype = torch.float32 if first.wide else self.dtype
        if first.taps:
            channels, _, taps = first.shape
            stored = torch.empty(taps, channels, dtype=dtype, device=self.device)
            self._views[first.name] = stored.t().unsqueeze(1)
        else:
            rows = sum(member.shape[0] for member in members)
            stored = torch.empty(rows, *first.shape[1:], dtype=dtype, device=self.device)
            if self.by_columns(stored) and not first.lookup:
                stored = torch.empty_like(stored.t(), memory_format=torch.contiguous_format).t()
            parts = stored.split([member.shape[0] for member in members])
            self._views.update(zip((member.name for member in members), parts, strict=True))
        self._stored[name] = stored

    def by_columns(self, matrix: Tensor) -> bool:
        """
        Whether one token's product reads ``matrix [N, K]`` faster when columns are contiguous.

        On a CPU in fp32 a short ``K`` makes the dot product a row the slower form by 1.3 x
        (7168 x 1024) to 3.4 x (4096 x 256); in bf16, and where ``N <= K``, it is the faster one.
        """
        return (self.device.type == 'cpu' and matrix.dtype is torch.float32
                and matrix.dim() == 2 and matrix.shape[0] > matrix.shape[1])

    def __getitem__(self, name: str) -> Tensor:
        """Tensor as it is stored: a stack, ``[K, C]`` taps, or a tensor of its own."""
        return self._stored[name]

    def __contains__(self, name: str) -> bool:
        return name in self.params

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in self._stored.values())

    def view(self, name: str) -> Tensor:
        """View in the shape of the checkpoint; writing to it fills the stored tensor."""
        return self._views[name]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors under their canonical names, in the order the family lists them."""
        return ((name, self._views[name]) for name in self.params)
