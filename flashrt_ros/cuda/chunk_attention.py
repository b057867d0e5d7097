"""
The attention of a bucket: which kernel, and keys dealt out to how many blocks.

See ``sources/chunk_attend.cuh``. Which kernel runs follows from the model and the architecture;
how keys are split, from the model, the bucket and the position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from flashrt_ros.models.layers.attention import GatedAttention

LEAST = 128  # keys of a split on Hopper, where there is more than one; elsewhere twice as many
MOST = 64  # splits
#: blocks of the attention, each with ROWS query rows, that occupy a large device
WAVE, ROWS = 128, 128
HOPPER = 'sm_90a'


@dataclass(frozen=True)
class Operands:
    """What the attention of one layer reads and writes."""

    mixed: Tensor
    count: Tensor
    position: Tensor
    qk_norm: Tensor
    cosine: Tensor
    sine: Tensor
    k_rows: Tensor
    v_rows: Tensor
    out: Tensor


def splits(size: int, kv_heads: int, group: int) -> int:
    """Return how many splits there are at most: what fills a wave, or the first few it fills."""
    blocks = kv_heads * -(-size * group // ROWS)
    return min(MOST, next(n for waves in count(1)
                          if 10 * (n := waves * WAVE // blocks) * blocks >= 9 * waves * WAVE))


class ChunkAttention:
    """The launches of one layer's attention between its projections."""

    def __init__(self, layer: GatedAttention, dtype: torch.dtype, size: int,
                 capacity: int) -> None:
        self.layer, self.size, self._dtype = layer, size, dtype
        self._group = layer.heads // layer.kv_heads
        most = splits(size, layer.kv_heads, self._group)
        self._joiners = 4 if most > 4 else 1  # whatever the capacity: bits depend on it
        self.most = min(most, -(-(capacity + size) // LEAST))  # no position needs more

    def plan(self, room) -> None:
        """Note what is needed of the work space, a :class:`flashrt_ros.cuda.prefill.Room`."""
        for name, shape, dtype in self._spaces():
            room.plan(name, shape, dtype)

    def _spaces(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        heads, dim, size = self.layer.heads, self.layer.head_dim, self.size
        return [('q', (size, heads, dim), self._dtype),
                ('partial', (self.most, size, heads, dim), torch.float32),
                ('marks', (self.most, size, heads, 2), torch.float32)]

    def queue(self, launch: Callable[..., None], room, of: Operands, arch: str) -> None:
        """
        Queue the launches.

        :param launch: takes source, name, grid, block, arguments, shared bytes and macros.
        :param arch: what kernels are compiled for.
        """
        layer, size, dim = self.layer, self.size, self.layer.head_dim
        q, partial, marks = (room.take(name, *shape) for name, shape, _ in self._spaces())
        if self._dtype is torch.float32:
            source, rows, keys, block, least = 'chunk_attend.cu', 16, 32, 256, 2 * LEAST
            shared = 4 * (16 * dim + 32 * (2 * dim + 1) + 16 * 33)
        elif arch == HOPPER and dim == 256:
            source, rows, keys, block, least = 'chunk_attend_hopper.cu', ROWS, 80, 384, LEAST
            shared = 2 * dim * (ROWS + 4 * keys) + 9 * 8 + 1023  # where it begins is rounded up
        else:
            source, rows, keys, block, least = 'chunk_attend.cu', 64, 64, 128, 2 * LEAST
            shared = 2 * 3 * 64 * (dim + 8)
        sizes = {'HK': layer.kv_heads, 'GROUP': self._group, 'D': dim, 'SIZE': size,
                 'SPLIT': least, 'MOST': self.most, 'KEYS': keys, 'SHARED': self._joiners,
                 'ROTARY': of.cosine.shape[-1]}
        launch('chunk_attend.cu', 'qk_rows', (-(-(layer.heads + layer.kv_heads) // 8), size), 256,
               (of.mixed, of.count, of.position, of.qk_norm, float(layer.eps), of.cosine, of.sine,
                q, of.k_rows, of.v_rows), **sizes)
        launch(source, 'attend_rows', (-(-size * self._group // rows), layer.kv_heads, self.most),
               block, (q, of.k_rows, of.v_rows, of.count, of.position, partial, marks), shared,
               **sizes)
        together = 256 // max(32, dim // 4 * self._joiners)  # heads of a block
        launch('chunk_attend.cu', 'join_rows', (-(-layer.heads // together), size), 256,
               (partial, marks, of.mixed, of.count, of.position, of.out), **sizes)
