"""
A grid chunk: library matrix products with our own kernels between them.

A bucket of fixed size is always run whole; how many of its tokens are live is a device scalar, so
one captured graph serves every length at every position. Dead tokens are computed and dropped:
rows, windows and states see live tokens alone. A result depends on the bucket, the live count,
the position and the state, and bucket follows from count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashrt_ros.arena import Arena, POSITION
from flashrt_ros.cuda import chunk_attention, delta_rule
from flashrt_ros.cuda.chunk_attention import ChunkAttention
from flashrt_ros.cuda.decode import Decode, Weights
from flashrt_ros.cuda.delta_rule import DeltaRule
from flashrt_ros.cuda.driver import Launch, Toolbox
from flashrt_ros.cuda.short_product import (
    AHEAD,
    MOST_PARTS,
    ours,
    PARTIAL,
    queue,
    STORE,
    SWIGLU,
)
from flashrt_ros.models.layers.attention import GatedAttention
from flashrt_ros.models.layers.delta_net import GatedDeltaNet
from flashrt_ros.models.layers.mlp import GatedMLP
from flashrt_ros.plan import TOKENS


class Room:
    """Work space that all buckets share, by name; grown while plans are built, never after."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._store: dict[str, Tensor] = {}

    def plan(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Note that ``name`` must hold this much."""
        count = 1
        for size in shape:
            count *= size
        have = self._store.get(name)
        if have is None or have.numel() < count:
            self._store[name] = torch.zeros(count, dtype=dtype, device=self._device)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a contiguous view of what was planned."""
        count = 1
        for size in shape:
            count *= size
        return self._store[name][:count].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all work space."""
        return sum(tensor.nbytes for tensor in self._store.values())


def plan_room(room: Room, model, capacity: int, size: int) -> None:
    """Note what a bucket of ``size`` tokens needs of the work space."""
    dtype, hidden, mlp = model.dtype, model.config.hidden, _mlp_width(model)
    wide, joined = 0, 0
    for layer in model.layers:
        if isinstance(layer, GatedDeltaNet):
            values = layer.value_heads * layer.value_dim
            wide = max(wide, layer.channels + values + 2 * layer.value_heads)
            joined = max(joined, values)
            DeltaRule(layer, dtype, size).plan(room)
        elif isinstance(layer, GatedAttention):
            wide = max(wide, 2 * (layer.heads + layer.kv_heads) * layer.head_dim)
            joined = max(joined, layer.heads * layer.head_dim)
            ChunkAttention(layer, dtype, size, capacity).plan(room)
    room.plan('x', (size, hidden), torch.float32)
    room.plan('h', (size, hidden), dtype)
    if ours(model, size):
        room.plan('parts', (MOST_PARTS, size, hidden), torch.float32)
    else:
        room.plan('y', (size, hidden), dtype)
    room.plan('mixed', (size, max(wide, 2 * mlp)), dtype)
    room.plan('joined', (size, max(joined, mlp)), dtype)


def _mlp_width(model) -> int:
    return next(layer.intermediate for layer in model.layers if isinstance(layer, GatedMLP))


class Prefill:
    """
    The launches of one bucket.

    :param inbox: int32 ids ``[>= size]`` on the device; ``count`` int64 scalar beside them.
    """

    def __init__(self, model, arena: Arena, weights: Weights, tools: Toolbox, decode: Decode,
                 room: Room, size: int, inbox: Tensor, count: Tensor) -> None:
        self.model, self.arena, self.weights, self.tools = model, arena, weights, tools
        self.room, self.size, self.count = room, size, count
        config = model.config
        self._hidden = config.hidden
        self._mlp_width = _mlp_width(model)
        self.ops: list[Callable[[], None]] = []
        self._products: list[Callable[[], None]] = []
        plan_room(room, model, arena.capacity, size)
        x = room.take('x', size, config.hidden)
        self._h = room.take('h', size, config.hidden)
        self._ours = ours(model, size)
        self._y = room.take(*(('parts', MOST_PARTS) if self._ours else ('y',)), size, config.hidden)
        self._x = x
        #: what waits in y to be added to x: fp32 parts, 0 for one in the type of the model
        self._waiting: int | None = None
        self._launch('chunk.cu', 'embed_rows', (size,), 256, (
            inbox, count, arena[POSITION], weights.table, x, arena[TOKENS]), **self._dense())
        for layer in model.layers:
            if isinstance(layer, GatedDeltaNet):
                self._delta(layer)
            elif isinstance(layer, GatedAttention):
                self._attention(layer)
            else:
                self._mlp(layer)
        self._norm(None, 0.0, None)
        self.ops.append(decode.head(None, rows=x, shift=count))
        self._look_ahead()

    def run(self) -> None:
        """Queue the whole chunk."""
        for op in self.ops:
            op()

    def warm_up(self) -> None:
        """Run the library products once, in work space only, so that a capture finds them."""
        for product in self._products:
            product()

    def _dense(self) -> dict[str, int]:
        return {'HIDDEN': self._hidden, 'MLP': self._mlp_width}

    def _launch(self, source: str, name: str, grid: tuple[int, ...], block: int, args: tuple,
                shared: int = 0, **defines: int) -> None:
        kernel = self.tools.kernel(source, name, **defines)
        self.ops.append(Launch(kernel, grid, block, args, shared))

    def _product(self, x: Tensor, weight: Tensor, out: Tensor, epilogue: int = STORE) -> None:
        if self._ours:
            queue(self._launch, self.tools, weight, x, out, self.size, epilogue)
        else:
            self._library_product(x, weight, out)

    def _residual(self, x: Tensor, weight: Tensor) -> None:
        """Queue a product that the next norm adds to the residual stream."""
        if self._ours:
            self._waiting = queue(self._launch, self.tools, weight, x, self._y, self.size, PARTIAL)
        else:
            self._library_product(x, weight, self._y)
            self._waiting = 0

    def _library_product(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        turned = weight.t()

        def product() -> None:
            torch.mm(x, turned, out=out)

        self.ops.append(product)
        self._products.append(product)

    def _look_ahead(self) -> None:
        """Let each of our products ask for weights of the next one, which wait in L2 then."""
        products = [op for op in self.ops
                    if isinstance(op, Launch) and op.kernel.name == 'chunk_product']
        for launch, after in zip(products, products[1:], strict=False):
            launch.ask_ahead(after.args[0], AHEAD)

    def _norm(self, norm: Tensor | None, eps: float, out: Tensor | None) -> None:
        """Add what the last block left to the residual stream and norm it."""
        parts = {'PARTS': self._waiting} if self._waiting else {}
        self._launch('chunk.cu', 'norm_rows', (self.size,), 256, (
            self._x, None if self._waiting is None else self._y, norm, float(eps), out),
            **self._dense(), **parts)

    def _rule(self, layer: GatedDeltaNet) -> DeltaRule:
        return DeltaRule(layer, self.model.dtype, self.size, self.tools.shared,
                         self.tools.clusters)

    def _delta(self, layer: GatedDeltaNet) -> None:
        room, size, arena, weights = self.room, self.size, self.arena, self.weights
        parameters = self.model.parameters
        base = f'model.layers.{layer.index}'
        mixer = f'{base}.linear_attn'
        inner = weights.matrix(f'{mixer}.in')
        mixed = room.take('mixed', size, inner.shape[0])
        self._norm(weights.one_plus(f'{base}.input_layernorm.weight'), layer.eps, self._h)
        self._product(self._h, inner, mixed)
        out = room.take('joined', size, layer.value_heads * layer.value_dim)
        self._rule(layer).queue(self._launch, room, delta_rule.Operands(
            mixed, self.count, arena[f'layers.{layer.index}.conv'],
            parameters[f'{mixer}.conv1d.weight'],
            weights.made(f'{mixer}.A_log', lambda a: -a.exp()), parameters[f'{mixer}.dt_bias'],
            arena[f'layers.{layer.index}.recurrent'], parameters[f'{mixer}.norm.weight'],
            float(layer.eps), out))
        self._residual(out, weights.matrix(f'{mixer}.out_proj.weight'))

    def _attention(self, layer: GatedAttention) -> None:
        room, size, arena, weights = self.room, self.size, self.arena, self.weights
        base = f'model.layers.{layer.index}'
        mixer = f'{base}.self_attn'
        inner = weights.matrix(f'{mixer}.in')
        mixed = room.take('mixed', size, inner.shape[0])
        out = room.take('joined', size, layer.heads * layer.head_dim)
        self._norm(weights.one_plus(f'{base}.input_layernorm.weight'), layer.eps, self._h)
        self._product(self._h, inner, mixed)
        ChunkAttention(layer, self.model.dtype, size, arena.capacity).queue(
            self._launch, room, chunk_attention.Operands(
                mixed, self.count, arena[POSITION], weights.qk_norm(layer), weights.cosine,
                weights.sine, arena[f'layers.{layer.index}.k'], arena[f'layers.{layer.index}.v'],
                out), self.tools.arch)
        self._residual(out, weights.matrix(f'{mixer}.o_proj.weight'))

    def _mlp(self, layer: GatedMLP) -> None:
        room, size, weights = self.room, self.size, self.weights
        base = f'model.layers.{layer.index}'
        width, vector = layer.intermediate, 16 // weights.table.element_size()
        inner = room.take('joined', size, width)
        self._norm(weights.one_plus(f'{base}.post_attention_layernorm.weight'), layer.eps, self._h)
        stacked = weights.matrix(f'{base}.mlp.in')
        if self._ours:
            self._product(self._h, stacked, inner, SWIGLU)
        else:
            mixed = room.take('mixed', size, 2 * width)
            self._product(self._h, stacked, mixed)
            self._launch('chunk.cu', 'swiglu_rows', (-(-width // (256 * vector)), size), 256,
                         (mixed, inner), **self._dense())
        self._residual(inner, weights.matrix(f'{base}.mlp.down_proj.weight'))
