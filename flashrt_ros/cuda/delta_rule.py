"""
The gated delta rule of a bucket: tensor cores for bfloat16, token after token otherwise.

All forms read the stacked projection ``mixed [size, WIDTH]`` and leave the normed and gated
output, the recurrent state and the window of the convolution in place; see
``sources/chunk_delta.cuh``, ``sources/short_delta.cu`` and ``sources/chunk.cu``. Which form runs
follows from the model and the bucket alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashrt_ros.models.layers.delta_net import GatedDeltaNet

COLUMNS = 16  # of the state that a block scans; twice as many where heads alone fill a device
MANY_HEADS = 32
DIMENSIONS = (32, 64, 128)  # of heads, that tensor cores take
ROOMY = 200 << 10  # bytes of shared memory
SUB = 64  # tokens of a block of the chunked form
SHORT = 32  # tokens of the bucket that takes one kernel
SLICES = 4  # of a head's state, each a block of a cluster; half of it where there are many heads


@dataclass(frozen=True)
class Operands:
    """What the rule of one layer reads and writes."""

    mixed: Tensor
    count: Tensor
    window: Tensor
    taps: Tensor
    neg_a: Tensor
    dt_bias: Tensor
    state: Tensor
    norm: Tensor
    eps: float
    out: Tensor


class DeltaRule:
    """
    The launches of one layer's convolution and delta rule.

    :param shared: bytes of shared memory a block may have.
    :param clusters: whether blocks may form clusters. No bit of a result depends on either, nor
        the work space.
    """

    def __init__(self, layer: GatedDeltaNet, dtype: torch.dtype, size: int,
                 shared: int = 0, clusters: bool = False) -> None:
        self.layer, self.size = layer, size
        tensor = (dtype is torch.bfloat16 and layer.key_dim in DIMENSIONS
                  and layer.value_dim in DIMENSIONS)
        self.short = tensor and size == SHORT
        self.chunked = tensor and not size % SUB
        self._shared = shared
        self.columns = min(32, layer.value_dim)
        if self.chunked and layer.value_heads < MANY_HEADS:
            self.columns = COLUMNS
        wanted = SLICES if layer.value_heads < MANY_HEADS else SLICES // 2
        self.slices = min(wanted, layer.value_dim // 16) if clusters else 1
        self.sizes = {'CHANNELS': layer.channels, 'TAPS': layer.kernel, 'HK': layer.key_heads,
                      'HV': layer.value_heads, 'DK': layer.key_dim, 'DV': layer.value_dim,
                      'DVS': self.columns}

    def plan(self, room) -> None:
        """Note what is needed of the work space, a :class:`flashrt_ros.cuda.prefill.Room`."""
        layer, size = self.layer, self.size
        if self.short:
            room.plan('delta.sharers', (layer.key_heads,), torch.int32)
            return
        room.plan('read', (size, layer.value_heads * layer.value_dim), torch.float32)
        if not self.chunked:
            room.plan('conv', (size, layer.channels), torch.float32)
            return
        for name, shape, dtype in self._spaces():
            room.plan(name, shape, dtype)

    def _spaces(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        layer, sub = self.layer, SUB
        blocks = self.size // sub
        heads, keys, half = layer.value_heads, layer.key_heads * layer.key_dim, torch.bfloat16
        return [('delta.q', (blocks, sub, keys), half), ('delta.k', (blocks, sub, keys), half),
                ('delta.w', (blocks, sub, heads * layer.key_dim), half),
                ('delta.p', (blocks, heads, sub, sub), half),
                ('delta.u', (blocks, sub, heads * layer.value_dim), torch.float32),
                ('delta.factors', (blocks, heads, sub // 2 + 1, 4), torch.float32)]

    def queue(self, launch: Callable[..., None], room, of: Operands) -> None:
        """
        Queue the launches.

        :param launch: takes source, name, grid, block, arguments, shared bytes and macros.
        """
        layer, heads = self.layer, self.layer.value_heads
        if self.short:
            columns, split = layer.value_dim // self.slices, self._split()
            launch('short_delta.cu', 'short_delta', (self.slices, heads), 2 * columns * split + 32,
                   (of.mixed, of.count, of.window, of.taps, of.neg_a, of.dt_bias, of.state,
                    room.take('delta.sharers', layer.key_heads), of.norm, of.eps, of.out),
                   self.short_bytes, **{**self.sizes, 'DVS': columns, 'SPLIT': split})
            return
        read = room.take('read', self.size, heads * layer.value_dim)
        if self.chunked:
            self._queue_chunked(launch, room, of, read)
        else:
            conv = room.take('conv', self.size, layer.channels)
            launch('chunk.cu', 'conv_rows', (-(-layer.channels // 256), -(-self.size // 16)), 256,
                   (of.mixed, of.count, of.window, of.taps, conv), **self.sizes)
            launch('chunk.cu', 'delta_rows', (layer.value_dim // self.columns, heads),
                   self.columns * 4,
                   (conv, of.mixed, of.count, of.neg_a, of.dt_bias, of.state, read), **self.sizes)
        launch('chunk.cu', 'gate_rows', (-(-heads // 8), self.size), 256,
               (read, of.mixed, of.count, of.norm, of.eps, of.out), **self.sizes)

    def _queue_chunked(self, launch: Callable[..., None], room, of: Operands,
                       read: Tensor) -> None:
        heads, sizes = self.layer.value_heads, {**self.sizes, 'SUB': SUB}
        q, k, w, p, u, factors = (room.take(name, *shape) for name, shape, _ in self._spaces())
        blocks = self.size // SUB
        # Two blocks to a multiprocessor only where one to each is not enough: spread is faster.
        resident = 2 if blocks * heads > 128 and self._shared >= ROOMY else 1
        launch('chunk_delta.cu', 'delta_prepare', (blocks, heads), 8 * SUB,
               (of.mixed, of.count, of.window, of.taps, of.neg_a, of.dt_bias, q, k, w, p, u,
                factors), self._prepare_bytes(), **sizes, RESIDENT=resident)
        stages = 2 if self._scan_bytes(2) <= self._shared else 1
        launch('chunk_scan.cu', 'delta_scan', (self.layer.value_dim // self.columns, heads),
               8 * self.columns,
               (q, k, w, p, u, factors, of.mixed, of.count, of.window, of.state, read),
               self._scan_bytes(stages), **sizes, STAGES=stages)

    def _split(self) -> int:
        """Return how many warps share 16 columns of the state: 8 or 16 a block, or 4."""
        return 1 if self.layer.value_dim // self.slices > 64 else 4

    @property
    def short_bytes(self) -> int:
        """Bytes of shared memory of a block of the one kernel of a short bucket."""
        layer, columns = self.layer, self.layer.value_dim // self.slices
        units = columns * ((4 * layer.key_dim if self._split() > 1 else 0) + 10 * SHORT)
        rows = 2 * SHORT * (2 * (layer.key_dim + 8) + columns + 8 + SHORT + 8)
        return units + rows + 4 * SHORT * (2 * (SHORT + 4) + layer.value_dim // 16 + 5) + 16

    def _prepare_bytes(self) -> int:
        sub, layer = SUB, self.layer
        rows = 2 * sub * (max(layer.key_dim, sub) + layer.key_dim + layer.value_dim + 24)
        return rows + 4 * sub * (sub + 4) + 4 * sub * (sub + 8) + 4 * 32 * 36

    def _scan_bytes(self, stages: int) -> int:
        sub, layer, sides = SUB, self.layer, self.columns // 16
        keys, pasts, tiles = layer.key_dim // 32, sub // 32, sub // 8
        seen = tiles + (pasts - 1) * (tiles - 4)
        units = tiles * (2 * keys + sides) + seen + layer.key_dim // 8 * pasts
        return 512 * stages * units + 64 * sides * layer.key_dim + 96 * sides * sub
