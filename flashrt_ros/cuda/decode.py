"""
One token, or a block of a few: the launches that run a model over an arena, in order.

Five launches a layer pair (normed product, mixer, product with residual, gated product, product
with residual), each the CUDA form of a cut in ``kernels/``. The residual stream and everything
between two launches is fp32 in work space that belongs to no state.

A block reads the weights once for all its tokens, and each token gets the bits of a step: sums run
in the same order. With a :class:`Ladder` the state stays as it is, and the ladder takes the fixed
block as it would be after each token; a row that turns out to be wrong lies behind the position.
"""

from __future__ import annotations

from collections.abc import Callable
import ctypes
import math

import torch
from torch import Tensor

from flashrt_ros.arena import Arena, POSITION
from flashrt_ros.cuda.driver import Launch, Toolbox
from flashrt_ros.errors import Incompatible
from flashrt_ros.models.layers.attention import GatedAttention
from flashrt_ros.models.layers.delta_net import GatedDeltaNet
from flashrt_ros.models.layers.mlp import GatedMLP

#: rows of a block of the attention in bfloat16, half as many in fp32
SPLIT = 128
#: blocks that a device runs at once: each has half of those rows for as long as that is enough for
#: all heads. So the model and the position alone decide the bits.
WAVE = 144
COLUMNS = 16  # of a head's state that a block of the delta rule has
BLOCK = 4  # tokens of a block where shared memory has room for their inputs
#: bytes of the product to come that are asked for while the memory would idle; from here on more
#: gains nothing (`tools/gpu/check.py --sections ahead`)
AHEAD = 2 << 20
NOTHING = (None, ctypes.c_int64(0))
PLAIN, NORMED, GATED = 0, 1, 2
STORE, RESIDUAL, CONV, SWIGLU, LOGITS = 0, 1, 2, 3, 4


def check_sizes(model) -> None:
    """
    Refuse sizes that the kernels are not cut for, before anything is allocated.

    :raises Incompatible: naming the size.
    """
    def need(ok: bool, what: str) -> None:
        if not ok:
            raise Incompatible(f'{model.spec} has {what}, which the CUDA kernels do not take; '
                               'configure device cpu.')

    def power(size: int) -> bool:
        return size & (size - 1) == 0

    vector = 16 // model.dtype.itemsize
    need(model.config.hidden % vector == 0, f'a hidden size of {model.config.hidden}')
    need(model.config.vocab_size < 1 << 22, f'a vocabulary of {model.config.vocab_size}')
    for layer in model.layers:
        if isinstance(layer, GatedDeltaNet):
            need(power(layer.value_dim) and 16 <= layer.value_dim <= 256,
                 f'value heads of {layer.value_dim}')
            need(power(layer.key_dim) and 16 <= layer.key_dim <= 128,
                 f'key heads of {layer.key_dim}')
            need(layer.channels % vector == 0, f'{layer.channels} convolution channels')
        elif isinstance(layer, GatedAttention):
            need(power(layer.head_dim) and 16 <= layer.head_dim <= 256,
                 f'attention heads of {layer.head_dim}')
            need(layer.heads // layer.kv_heads <= 8,
                 f'{layer.heads} query heads over {layer.kv_heads}')
        elif isinstance(layer, GatedMLP):
            need(layer.intermediate % vector == 0, f'an MLP of {layer.intermediate}')
        else:
            need(False, f'a {type(layer).__name__} layer')


class Weights:
    """Everything read-only of a model that kernels take, made once and kept alive."""

    def __init__(self, model, capacity: int) -> None:
        self.model = model
        self._matrices: dict[str, Tensor] = {}
        self.table = self.matrix(model.embedding_name)
        self.head = self.table if model.config.tied else self.matrix(model.head_name)
        self.final_norm = (model.final_norm().gain / math.sqrt(model.config.hidden)).contiguous()
        cosine, sine = model.tables(capacity)
        self.cosine, self.sine = cosine.contiguous(), sine.contiguous()
        self._made: dict[str, Tensor] = {}

    def matrix(self, name: str) -> Tensor:
        """Return a parameter with contiguous rows, as kernels read it."""
        if name not in self._matrices:
            self._matrices[name] = self.model.parameters[name].contiguous()
        return self._matrices[name]

    def made(self, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a tensor derived from the parameter ``name``, made on first use."""
        if name not in self._made:
            self._made[name] = make(self.model.parameters[name]).float().contiguous()
        return self._made[name]

    def one_plus(self, name: str) -> Tensor:
        """Effective factor of a norm that stores ``w`` and uses ``1 + w``."""
        return self.made(name, lambda w: w + 1)

    def qk_norm(self, layer: GatedAttention) -> Tensor:
        """Effective factors ``[heads + kv_heads, D]`` of the query and key norms."""
        base = f'model.layers.{layer.index}.self_attn'
        k = self.model.parameters[f'{base}.k_norm.weight'] + 1
        return self.made(f'{base}.q_norm.weight', lambda q: torch.cat((
            (q + 1).expand(layer.heads, -1), k.expand(layer.kv_heads, -1))))


class Ladder:
    """Fixed blocks as they would be after each token of a block; no part of any state."""

    def __init__(self, arena: Arena, tokens: int) -> None:
        self.blocks = torch.zeros(tokens, arena.manifest.fixed_bytes, dtype=torch.uint8,
                                  device=arena.device)
        self._arena = arena

    def at(self, name: str) -> tuple[Tensor, ctypes.c_int64]:
        """Return a buffer of the first block, and how many of its elements a block is apart."""
        like, offset = self._arena[name], self._arena.manifest.offsets[name]
        first = self.blocks[0, offset:offset + like.nbytes].view(like.dtype).view(like.shape)
        return first, ctypes.c_int64(self.blocks.shape[1] // like.element_size())


class Decode:
    """
    The launches of one token, or of a block.

    :param tokens: of a block; 1 for a step.
    :param count: int64 scalar on the device, the live tokens of a block.
    :param ladder: takes the fixed block after each token; else the state moves on in place.
    :ivar x: ``[tokens, hidden]`` fp32 residual stream; whoever embeds writes it first.
    """

    def __init__(self, model, arena: Arena, weights: Weights, tools: Toolbox, tokens: int = 1,
                 count: Tensor | None = None, ladder: Ladder | None = None,
                 like: Decode | None = None) -> None:
        self.arena, self.weights, self.tools = arena, weights, tools
        self.tokens, self.count, self.ladder = tokens, count, ladder
        self._room: list[Tensor] = like._room if like else [
            torch.zeros(size, device=arena.device)
            for size in room_sizes(model, arena.capacity, tokens)]
        self.x, self._wide, self._mixed, self._squares = self._room[:4]
        self.layers: list[Launch] = []
        for layer in model.layers:
            if isinstance(layer, GatedDeltaNet):
                self._delta(layer)
            elif isinstance(layer, GatedAttention):
                self._attention(layer)
            else:
                self._mlp(layer)
        self._look_ahead()

    def _look_ahead(self) -> None:
        """
        Let every launch ask for the start of a later product's weights.

        Between two products the memory idles for about as long as a small one takes; what is
        asked for meanwhile waits in L2. A product asks for the next one; what stands between two
        products asks for the one after.
        """
        products = [launch for launch in self.layers if launch.kernel.name == 'gemv']
        weights = [launch.args[0] for launch in products] + [self.weights.head] * 2
        seen = 0
        for launch in self.layers:
            product = launch.kernel.name == 'gemv'
            seen += product
            if product or launch.kernel.name in ('delta', 'attend'):
                launch.ask_ahead(weights[seen if product else min(seen + 1, len(weights) - 1)],
                                 AHEAD)
        self.first = weights[0]

    def run(self) -> None:
        """Queue all layers; ``x`` holds the embedding before and the last residual after."""
        for launch in self.layers:
            launch()

    def head(self, counter: Tensor | None, rows: Tensor | None = None,
             shift: Tensor | None = None) -> Launch:
        """
        Return the launch of final norm and head: logits; the position moves on.

        :param counter: the sampler's counter, if it moves on too.
        :param rows: ``[T, hidden]`` residual streams to take the last live one of.
        :param shift: int64 number of live rows.
        """
        weights, arena = self.weights, self.arena
        return self.product(
            weights.head, self.x if rows is None else rows, arena['logits'], NORMED, LOGITS,
            norm=weights.final_norm, eps=weights.model.config.norm_eps, position=arena[POSITION],
            counter=counter, count=shift)

    def heads(self) -> Launch:
        """Return the launch of final norm and head for all tokens of a block: ladder logits."""
        assert self.ladder is not None
        logits, pitch = self.ladder.at('logits')
        weights = self.weights
        return self.product(weights.head, self.x, logits, NORMED, LOGITS, pitch=pitch.value,
                            norm=weights.final_norm, eps=weights.model.config.norm_eps,
                            tokens=self.tokens, count=self.count)

    def product(self, weight: Tensor, x: Tensor, out: Tensor, prologue: int, epilogue: int, *,
                norm: Tensor | None = None, eps: float = 0.0, window: str = '',
                taps: Tensor | None = None, position: Tensor | None = None,
                counter: Tensor | None = None, count: Tensor | None = None, head: int = 1,
                pitch: int = 0, tokens: int = 1) -> Launch:
        """Return a launch of ``gemv.cu``; see there."""
        rows, depth = weight.shape
        vector = 16 // weight.element_size()
        together, unroll, blocks, threads = tiling(rows, depth, vector, epilogue, tokens)
        defines = {'K': depth, 'N': rows // 2 if epilogue == SWIGLU else rows, 'ROWS': together,
                   'UNROLL': unroll, 'BLOCKS': blocks, 'PROLOGUE': prologue,
                   'EPILOGUE': epilogue}
        if tokens > 1:
            defines.update(TOKENS=tokens, THREADS=threads)
        if prologue == GATED:
            assert norm is not None
            defines.update(HEAD=head, PARTS=norm.numel() // tokens * head // depth)
        steps, steps_pitch = self.ladder.at(window) if window and self.ladder else NOTHING
        if epilogue == CONV and taps is not None:
            defines.update(CHANNELS=taps.shape[1], TAPS=taps.shape[0])
        kernel = self.tools.kernel('gemv.cu', 'gemv', **defines)
        tasks = -(-rows // together)
        grid = spread(-(-tasks // (threads // 32)), self.tools.multiprocessors * blocks)
        return Launch(kernel, (grid,), threads, (
            weight, x, norm, float(eps), out, ctypes.c_int64(pitch or defines['N']),
            self.arena[window] if window else None, steps, steps_pitch, taps, position, counter,
            count, *NOTHING), shared=tokens * depth * 4)

    def _layer_product(self, *args, **named) -> None:
        self.layers.append(self.product(*args, tokens=self.tokens, count=self.count, **named))

    def _kernel(self, source: str, name: str, **sizes: int):
        return self.tools.kernel(source, name, **sizes,
                                 **({'TOKENS': self.tokens} if self.tokens > 1 else {}))

    def _delta(self, layer: GatedDeltaNet) -> None:
        weights, arena, tokens = self.weights, self.arena, self.tokens
        parameters = weights.model.parameters
        base = f'model.layers.{layer.index}'
        mixer = f'{base}.linear_attn'
        inner, values = weights.matrix(f'{mixer}.in'), layer.value_heads * layer.value_dim
        mixed = self._wide[:tokens * inner.shape[0]]
        state = f'layers.{layer.index}.recurrent'
        self._layer_product(
            inner, self.x, mixed, NORMED, CONV,
            norm=weights.one_plus(f'{base}.input_layernorm.weight'), eps=layer.eps,
            window=f'layers.{layer.index}.conv', taps=parameters[f'{mixer}.conv1d.weight'])
        columns = min(COLUMNS, layer.value_dim)
        kernel = self._kernel(
            'delta.cu', 'delta', HK=layer.key_heads, HV=layer.value_heads, DK=layer.key_dim,
            DV=layer.value_dim, DVS=columns)
        out, slices = self._mixed[:tokens * values], layer.value_dim // columns
        squares = self._squares[:tokens * layer.value_heads * slices]
        self.layers.append(Launch(
            kernel, (slices, layer.value_heads), 256, (
                mixed, arena[state], *(self.ladder.at(state) if self.ladder else NOTHING),
                self.count, weights.made(f'{mixer}.A_log', lambda a: -a.exp()),
                parameters[f'{mixer}.dt_bias'], parameters[f'{mixer}.norm.weight'], out, squares,
                *NOTHING)))
        self._layer_product(
            weights.matrix(f'{mixer}.out_proj.weight'), out, self.x, GATED, RESIDUAL,
            norm=squares, eps=layer.eps, head=layer.value_dim)

    def _attention(self, layer: GatedAttention) -> None:
        weights, arena, tokens = self.weights, self.arena, self.tokens
        base = f'model.layers.{layer.index}'
        mixer = f'{base}.self_attn'
        inner, dim = weights.matrix(f'{mixer}.in'), layer.head_dim
        mixed = self._wide[:tokens * inner.shape[0]]
        self._layer_product(
            inner, self.x, mixed, NORMED, STORE,
            norm=weights.one_plus(f'{base}.input_layernorm.weight'), eps=layer.eps)
        group = layer.heads // layer.kv_heads
        split, near = _split(weights.model), _near(weights.model, layer)
        splits = _splits(weights.model, layer, arena.capacity)
        size = weights.table.element_size()
        slots = 256 // (dim * size // 16)
        sizes = {'HK': layer.kv_heads, 'GROUP': group, 'D': dim, 'SPLIT': split,
                 'NEAR': near, 'ROTARY': weights.cosine.shape[-1]}
        out, position = self._mixed[:tokens * layer.heads * dim], arena[POSITION]
        rows = (arena[f'layers.{layer.index}.k'], arena[f'layers.{layer.index}.v'], position,
                self.count, weights.qk_norm(layer), float(layer.eps), weights.cosine, weights.sine)
        if tokens > 1:
            self.layers.append(Launch(self._kernel('attend.cu', 'append_rows', **sizes),
                                      (layer.kv_heads, tokens), 32, (mixed, *rows)))
        self.layers.append(Launch(
            self._kernel('attend.cu', 'attend', **sizes), (splits, layer.kv_heads, tokens), 256,
            (mixed, *rows, *self._room[4:], *NOTHING),
            shared=4 * (group * (dim + split) + dim)
            + max(4 * slots * group * dim, split * dim * size)))
        self.layers.append(Launch(
            self._kernel('attend.cu', 'join', **sizes), (layer.heads, tokens), 1024 // dim * dim, (
                mixed, position, self.count, *self._room[4:], splits, out)))
        self._layer_product(
            weights.matrix(f'{mixer}.o_proj.weight'), out, self.x, PLAIN, RESIDUAL)

    def _mlp(self, layer: GatedMLP) -> None:
        weights = self.weights
        base = f'model.layers.{layer.index}'
        inner = self._wide[:self.tokens * layer.intermediate]
        self._layer_product(
            weights.matrix(f'{base}.mlp.in'), self.x, inner, NORMED, SWIGLU,
            norm=weights.one_plus(f'{base}.post_attention_layernorm.weight'), eps=layer.eps)
        self._layer_product(
            weights.matrix(f'{base}.mlp.down_proj.weight'), inner, self.x, PLAIN, RESIDUAL)


def room_sizes(model, capacity: int, tokens: int) -> list[int]:
    """Return how many floats each of the work spaces of a block has."""
    widest, joined, partial, marks = model.config.hidden, 1, 0, 0
    for layer in model.layers:
        if isinstance(layer, GatedDeltaNet):
            values = layer.value_heads * layer.value_dim
            widest = max(widest, layer.channels + values + 2 * layer.value_heads)
            joined = max(joined, values)
        elif isinstance(layer, GatedAttention):
            widest = max(widest, 2 * (layer.heads + layer.kv_heads) * layer.head_dim)
            joined = max(joined, layer.heads * layer.head_dim)
            splits = _splits(model, layer, capacity)
            partial = max(partial, splits * layer.heads * layer.head_dim)
            marks = max(marks, splits * layer.heads * 2)
        elif isinstance(layer, GatedMLP):
            widest = max(widest, layer.intermediate)
    squares = joined // 16  # a slice has 16 columns or more
    return [tokens * size
            for size in (model.config.hidden, widest, joined, squares, partial, marks)]


def _split(model) -> int:
    return SPLIT * 2 // model.dtype.itemsize


def _near(model, layer: GatedAttention) -> int:
    """Return the first position whose rows are split into whole splits."""
    return WAVE // layer.kv_heads * (_split(model) // 2)


def _splits(model, layer: GatedAttention, capacity: int) -> int:
    split = _split(model)
    return max(-(-min(capacity, _near(model, layer)) // (split // 2)), -(-capacity // split))


def block_size(model, shared: int) -> int:
    """
    Return how many tokens a block has where ``shared`` bytes of shared memory are there.

    One or an even number: two teams of a block in ``gemv.cu`` prepare half of its tokens each.
    """
    deepest = max(
        layer.value_heads * layer.value_dim if isinstance(layer, GatedDeltaNet)
        else layer.heads * layer.head_dim if isinstance(layer, GatedAttention)
        else layer.intermediate for layer in model.layers)
    room = min(BLOCK, (shared - 1024) // (4 * max(deepest, model.config.hidden)))
    return room // 2 * 2 if room > 1 else 1


def tiling(rows: int, depth: int, vector: int, epilogue: int,
           tokens: int = 1) -> tuple[int, int, int, int]:
    """
    Return rows a warp takes at once, vectors a batch, blocks a multiprocessor, and their threads.

    Eight to sixteen 16-byte loads a lane stay in flight; narrow outputs leave multiprocessors to
    the next kernel, which asks for its first weights there. Measured on an H200; the choice is by
    shape alone, never by timing at run time. It decides no bits: a row's sum runs in one order.
    """
    steps, threads = -(-depth // (vector * 32)), 256
    if tokens > 1:
        if epilogue == SWIGLU or (rows > 4096 and steps <= 4):
            together, unroll, blocks = 4, 2, 2
        elif rows > 2048:
            together, unroll, blocks, threads = 2, 4, 1, 512
        else:
            together, unroll, blocks = 1, 4, 1
    elif epilogue == SWIGLU or rows > 4096:
        together, unroll, blocks = (4, 2, 2) if steps <= 4 else (2, 4, 2)
    elif rows > 2048:
        together, unroll, blocks = (2, 4, 2)
    else:
        together, unroll, blocks = (2, 8, 1) if steps >= 8 else (1, 8, 2)
    return together, min(unroll, steps), blocks, threads


def spread(blocks: int, slots: int) -> int:
    """Return a grid of at most ``slots`` blocks that share ``blocks`` of work evenly."""
    rounds = -(-blocks // slots)
    return -(-blocks // rounds)
