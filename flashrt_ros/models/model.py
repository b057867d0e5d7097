"""
What the plan and the engine see of a model: its buffers, its binding, its identity.

A family subclasses :class:`Model` and lists its layers; binding, state checks and the fold loop
are the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
import torch.nn.functional as F

from flashrt_ros.arena import Arena, Buffer
from flashrt_ros.errors import Internal, InvalidArgument
from flashrt_ros.kernels.attention import rope_tables
from flashrt_ros.kernels.head import head
from flashrt_ros.kernels.norm import Norm
from flashrt_ros.models.parameters import Param, Parameters

TIED_COPY = 64 * 2 ** 20  # bytes up to which a tied table is also held as a head
Block = Callable[[Tensor, int], Tensor]  # (residual [T, K], position) -> residual [T, K]


@dataclass(frozen=True)
class Source:
    """Where a model came from: the spec asked for and the files behind it."""

    spec: str
    directory: Path | None = None  # holds tokenizer files too; None for random weights
    weight_files: tuple[Path, ...] = ()


class State:
    """
    The buffers that one layer declared, taken from an arena by name.

    A layer gets its state nowhere else, so what it keeps is what it declared: asking for an
    undeclared buffer, or leaving a declared one untaken, is a fault.
    """

    def __init__(self, arena: Arena, buffers: list[Buffer]) -> None:
        self._arena = arena
        self._untaken = {buffer.name: buffer for buffer in buffers}

    def take(self, name: str) -> Tensor:
        """Return the arena's view of a declared buffer; ``[capacity, *shape]`` for rows."""
        buffer = self._untaken.pop(name, None)
        if buffer is None:
            raise Internal(f'a layer asked for the state buffer {name!r} that it did not declare '
                           'or already took; list it in its buffers()')
        found = self._arena.manifest.by_name.get(name)
        if found is None:
            raise Internal(f'the model buffer {name!r} is missing from the manifest of this '
                           'arena; build the manifest from model.buffers()')
        if found != buffer:
            raise Internal(f'the arena holds {name!r} as {found.describe()} but the model needs '
                           f'{buffer.describe()}; build the manifest from model.buffers()')
        return self._arena[name]

    def finish(self) -> None:
        """Refuse when a declared buffer was not taken."""
        if self._untaken:
            raise Internal(f'layers declared {sorted(self._untaken)} but do not use them')


class Layer(Protocol):
    """One residual block of a family: what it holds, what it keeps, how it runs."""

    def parameters(self) -> list[Param]:
        """Return the tensors of a checkpoint that this block reads."""

    def buffers(self, dtype: torch.dtype) -> list[Buffer]:
        """Return the state this block keeps; ``dtype`` is the type of the model."""

    def bind(self, weights: Parameters, state: State, tables: Any) -> Block:
        """Take the declared state and return the block ready to run."""


class Model(ABC):
    """
    A loaded model: read-only weights, and the description of the state that folding needs.

    :ivar config: dataclass of the family with at least ``vocab_size``, ``hidden``, ``layers``,
        ``norm_eps``, ``tied``, ``rotary_dim``, ``rope_theta``, ``eos_token_ids`` and
        ``max_positions``.
    :ivar dtype: type of weights, activations and K/V rows; recurrent states are fp32.
    """

    family: ClassVar[str]
    published: ClassVar[str]  # class of ``transformers`` that computes the same
    model_types: ClassVar[tuple[str, ...]]
    presets: ClassVar[dict[str, dict]]
    config_class: ClassVar[Any]
    embedding_name: ClassVar[str] = 'model.embed_tokens.weight'
    norm_name: ClassVar[str] = 'model.norm.weight'
    norm_init: ClassVar[str] = 'ones'  # what random weights fill the last norm with
    head_name: ClassVar[str] = 'lm_head.weight'

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device | str,
                 source: Source) -> None:
        self.config = config
        self.source = source
        self.layers = self.build_layers(config)
        self.parameters = Parameters(self.list_parameters(), dtype, device)
        self.dtype = dtype
        self.device = self.parameters.device

    @property
    def spec(self) -> str:
        """The spec this model was loaded by."""
        return self.source.spec

    @property
    def source_dir(self) -> Path | None:
        """Directory with config and tokenizer files; None for random weights."""
        return self.source.directory

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that the weights were read from, in reading order."""
        return self.source.weight_files

    @classmethod
    @abstractmethod
    def build_layers(cls, config: Any) -> list[Layer]:
        """Return the residual blocks in the order they run."""

    def tables(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Return the read-only rotary tables that all layers share, for ``capacity`` positions."""
        return rope_tables(capacity, self.config.rotary_dim, self.config.rope_theta, self.device)

    def final_norm(self) -> Norm:
        """Return the last norm, ready to run; here one that uses its weights plainly."""
        return Norm.of(self.parameters[self.norm_name], self.config.norm_eps)

    def architecture(self) -> dict:
        """
        Return the JSON-able description of everything that shapes the function.

        Family and configuration, without the end tokens: they shape no logits.
        """
        fields = {name: list(value) if isinstance(value, tuple) else value
                  for name, value in asdict(self.config).items() if name != 'eos_token_ids'}
        return {'family': self.family, **fields}

    @cached_property
    def head_weight(self) -> Tensor:
        """
        The head ``[V, K]`` in the memory order that one token's product reads fastest.

        A small tied table is held a second time for it: looking up wants rows, the product on a
        CPU in fp32 wants columns.
        """
        table = self.parameters[self.embedding_name if self.config.tied else self.head_name]
        if self.config.tied and table.nbytes <= TIED_COPY and self.parameters.by_columns(table):
            return table.t().contiguous().t()
        return table

    def list_parameters(self) -> list[Param]:
        """Return all parameters in canonical order."""
        config = self.config
        table = (config.vocab_size, config.hidden)
        params = [Param(self.embedding_name, table, init='embedding', lookup=True)]
        for layer in self.layers:
            params += layer.parameters()
        params.append(Param(self.norm_name, (config.hidden,), init=self.norm_init, wide=True))
        if not config.tied:
            params.append(Param(self.head_name, table, init='embedding'))
        return params

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights in canonical order: checkpoint names and shapes, views of what runs."""
        return self.parameters.items()

    def buffers(self) -> list[Buffer]:
        """The state of all layers, in the order of the layers."""
        return [buffer for layer in self.layers for buffer in layer.buffers(self.dtype)]

    def bind(self, arena: Arena) -> Binding:
        """
        Attach the model to the buffers of ``arena``.

        :raises Internal: for a buffer of the model that the manifest lacks or holds otherwise.
        """
        if arena.device != self.device:
            raise Internal(f'the arena lies on {arena.device} but the model on {self.device}; '
                           'put both on one device')
        tables = self.tables(arena.capacity)
        blocks = []
        for layer in self.layers:
            state = State(arena, layer.buffers(self.dtype))
            blocks.append(layer.bind(self.parameters, state, tables))
            state.finish()
        return Binding(self, blocks, arena.capacity)


class Binding:
    """A model attached to one arena; :meth:`fold` is all that runs."""

    def __init__(self, model: Model, blocks: list[Block], capacity: int) -> None:
        self.capacity = capacity
        self._blocks = blocks
        self._table = model.parameters[model.embedding_name]
        self._norm = model.final_norm()
        self._head = model.head_weight
        #: called after each block: work of others that leaves the arena alone, see the worker
        self.aside: Callable[[], None] | None = None

    @torch.inference_mode()
    def fold(self, ids: Tensor, position: int) -> Tensor:
        """
        Run ``T`` tokens through the model into the state.

        Writes rows ``[position, position + T)`` and moves recurrent states and convolution
        windows on, in place; reads no row from ``position + T`` on. The result depends on the
        ids, ``T``, ``position`` and the live state alone, to the last bit.

        :param ids: int64 ``[T]``, ``T >= 1``.
        :param position: number of tokens folded so far.
        :return: fp32 ``[vocab_size]`` logits of what follows the last token, a fresh tensor.
        :raises InvalidArgument: when the tokens do not fit; nothing has been written then.
        """
        end = position + ids.shape[0]
        if not 0 <= position < end <= self.capacity:
            raise InvalidArgument(f'tokens [{position}, {end}) do not fit an arena of '
                                  f'{self.capacity} rows; fold one to capacity - position tokens')
        x = F.embedding(ids, self._table)
        for block in self._blocks:
            x = block(x, position)
            if self.aside is not None:
                self.aside()
        return head(x, self._norm, self._head)
