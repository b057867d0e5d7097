"""
Products of a short bucket: ``sources/chunk_product.cu``, and how one is dealt out to blocks.

A library's products of so few tokens leave the memory idle between two launches, and round in
between. Ours ask for weights before their inputs are there, and hand fp32 sums to the norm behind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashrt_ros.cuda.decode import NOTHING
from flashrt_ros.cuda.driver import Toolbox

SHORT = 32  # tokens of the longest bucket whose products are ours
STORE, SWIGLU, PARTIAL = 0, 1, 2
MOST_PARTS = 8
AHEAD = 4 << 20  # bytes of the product to come that are asked for while something else runs
#: columns that a block takes at once, and the bytes that they take in shared memory
SPAN, PITCH = 256, 576
STAGES = {96: 3, 64: 4, 32: 6}  # of the ring by rows, where shared memory has room


def ours(model, size: int) -> bool:
    """Tell whether the products of a bucket run in ``chunk_product.cu``."""
    return model.dtype is torch.bfloat16 and size <= SHORT


class ShortProduct:
    """
    One product's blocks, by its shape and the device's shared memory; measured on an H200.

    :param weight: ``[rows, depth]``.
    :param size: tokens of the bucket.
    :param room: bytes of shared memory that a block may have.
    :ivar rows: of the weight, that a block has.
    :ivar parts: of the depth, each of them a block's; these alone decide any bits.
    :ivar stages: of the ring in shared memory.
    """

    def __init__(self, weight: Tensor, size: int, epilogue: int, room: int) -> None:
        rows, depth = weight.shape
        self._outputs = rows // 2 if epilogue == SWIGLU else rows
        self._depth, self._size, self._epilogue = depth, size, epilogue
        if epilogue == PARTIAL:
            wanted = 64 if rows > 2048 else 32
        else:
            wanted = 96 if rows > 9216 else 64 if rows > 4096 else 32
        self.rows = next(r for r in STAGES
                         if r <= wanted and (r == 32 or 2 * self._stage(r) <= room))
        self.parts = 1
        if epilogue == PARTIAL:  # by the rows that are wanted: shared memory decides no bit
            self.parts = max(1, min(MOST_PARTS, 128 // -(-rows // wanted), -(-depth // 32)))
        self.grid = (-(-rows // self.rows), self.parts)
        self.stages = min(STAGES[self.rows], room // self._stage(self.rows),
                          -(-depth // (self.parts * SPAN)))

    def _stage(self, rows: int) -> int:
        return (rows + self._size) * PITCH

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: the ring, then the sums of four warps a row."""
        return max(self.stages * self._stage(self.rows), 16 * self._size * (self.rows + 8))

    @property
    def defines(self) -> dict[str, int]:
        """Macros of the kernel."""
        return {'K': self._depth, 'N': self._outputs, 'ROWS': self.rows, 'SIZE': self._size,
                'PARTS': self.parts, 'STAGES': self.stages, 'EPILOGUE': self._epilogue}


def queue(launch, tools: Toolbox, weight: Tensor, x: Tensor, out: Tensor, size: int,
          epilogue: int) -> int:
    """
    Queue a product; return how many parts its output has.

    :param launch: takes source, name, grid, block, arguments, shared bytes and macros.
    """
    product = ShortProduct(weight, size, epilogue, tools.shared)
    launch('chunk_product.cu', 'chunk_product', product.grid, 256, (weight, x, out, *NOTHING),
           product.shared, **product.defines)
    return product.parts
