"""
The plan: a whole forward pass bound to one arena.

A plan does two things and both leave a committed boundary behind:

* ``append(ids)`` folds known tokens into the state, one chunk of the grid at most;
* ``step()`` *samples first*: it takes the logits in the state, chooses a token, hands it out, and
  then folds it. So there is never a pending token, and a restored capsule's first token needs the
  sampler alone.

``append`` of up to ``block`` tokens folds exactly as steps do, which is what replays rely on. Where
that is more than one, ``verify(draft)`` takes the steps that a draft foresees in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from flashrt_ros import sampling
from flashrt_ros.arena import Arena, Buffer, Manifest, Role
from flashrt_ros.errors import DeviceFault, Internal, InvalidArgument

GRID = 512  # tokens; prefill appends are cut at absolute multiples of this
TOKENS = 'tokens'
MAILBOX = 'mailbox'


class Bound(Protocol):
    """
    A model bound to an arena: it reads and writes the arena's buffers in place.

    ``aside``, where not None, is called now and then within a fold.
    """

    aside: Callable[[], None] | None

    def fold(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Fold int64 ids ``[T]`` at rows ``[position, position + T)``; fp32 logits ``[vocab]``."""


class Foldable(Protocol):
    """What a plan needs of a model family."""

    def buffers(self) -> list[Buffer]:
        """State buffers of all layers."""

    def bind(self, arena: Arena) -> Bound:
        """Bind to the buffers of an arena."""


def manifest_of(model: Foldable, vocab_size: int) -> Manifest:
    """Return the closed list of state buffers of a language model, in canonical order."""
    return Manifest([
        Buffer(TOKENS, Role.ROWS, torch.int32, (1,)),
        *sampling.buffers(vocab_size),
        *model.buffers(),
        Buffer(MAILBOX, Role.SCRATCH, torch.int32, (1,)),
    ])


class Plan(Protocol):
    """The captured forward pass over one arena."""

    arena: Arena
    grid: int
    block: int  # tokens that an append folds with the bits of as many steps
    aside: Callable[[], None] | None  # called within a fold, or while a device is at it

    @property
    def settings(self) -> sampling.Settings:
        """Those of the sampler; what is chosen holds from the next step on, or sooner."""

    def append(self, ids: Sequence[int]) -> None:
        """Fold up to ``grid`` known tokens."""

    def step(self, emit: Callable[[int], object] | None = None) -> int:
        """Sample, emit, fold; return the token."""

    def verify(self, draft: Sequence[int], emit: Callable[[int], object]) -> int:
        """Take the steps that a draft foresees, at least one; return how many."""


def _ignore(token: int) -> None:
    pass


class EagerPlan:
    """
    The plan of a CPU: the model's operations run one after another, in place over the arena.

    :raises DeviceFault: from both verbs, if the arena was marked invalid by an earlier fault.
    """

    block = 1  # library products give other bits for another number of rows

    def __init__(self, model: Foldable, arena: Arena, grid: int = GRID) -> None:
        self.arena = arena
        self.grid = grid
        for buffer in (*sampling.buffers(1), Buffer(TOKENS, Role.ROWS, torch.int32, (1,)),
                       Buffer(MAILBOX, Role.SCRATCH, torch.int32, (1,))):
            if buffer.name not in arena.manifest.by_name:
                raise Internal(f'the buffer {buffer.name!r} is missing from the manifest of this '
                               'arena; build the manifest with manifest_of()')
        self._bound = model.bind(arena)
        self._logits = arena[sampling.LOGITS]
        self._tokens = arena[TOKENS].view(-1)
        self._mailbox = arena[MAILBOX]
        self._counter = arena['sampler.counter']
        self.settings = sampling.HostSettings(arena)

    @torch.inference_mode()
    def append(self, ids: Sequence[int]) -> None:
        """
        Fold ``1..grid`` tokens; an exception leaves the fixed block undefined (see ``guard``).

        :raises InvalidArgument: for a chunk of another length or beyond the arena's capacity.
        """
        position = self._ready()
        if not 1 <= len(ids) <= min(self.grid, self.arena.capacity - position):
            raise InvalidArgument(
                f'an append takes 1 to {self.grid} tokens within the context of '
                f'{self.arena.capacity}; this one has {len(ids)} at position {position}.')
        self._fold(torch.tensor(ids, dtype=torch.int64), position)

    @torch.inference_mode()
    def step(self, emit: Callable[[int], object] | None = None) -> int:
        """
        Sample a token, hand it to ``emit``, fold it; position and counter rise by one.

        :raises InvalidArgument: at position 0, where there are no logits, and at the capacity.
        """
        position = self._may_step()
        token = sampling.sample(self.arena)
        self._take(token, position, emit or _ignore)
        return token

    def _may_step(self) -> int:
        position = self._ready()
        if not 0 < position < self.arena.capacity:
            raise InvalidArgument(
                f'a step needs at least one folded token and a free row; the position is '
                f'{position} of {self.arena.capacity}. Append a prompt, or roll back.')
        return position

    def _take(self, token: int, position: int, emit: Callable[[int], object]) -> bool:
        self._mailbox.fill_(token)
        ended = bool(emit(token))
        self._fold(self._mailbox.to(torch.int64), position)
        self._counter.add_(1)
        return ended

    @torch.inference_mode()
    def verify(self, draft: Sequence[int], emit: Callable[[int], object]) -> int:
        """
        Take the steps that a draft foresees, at least one, one by one.

        :param draft: guesses of the next tokens.
        :param emit: takes each token; True ends it with that token.
        :return: number of steps taken.
        :raises InvalidArgument, DeviceFault: as :meth:`step`.
        """
        position, taken, ended = self._may_step(), 0, False
        limit = max(1, min(len(draft), self.arena.capacity - position))
        while taken < limit and not ended:
            token = sampling.sample(self.arena)
            if taken and token != draft[taken]:
                break
            ended = self._take(token, position + taken, emit)
            taken += 1
        return taken

    @property
    def aside(self) -> Callable[[], None] | None:
        """What a fold calls now and then, None for nothing; it must leave the arena alone."""
        return self._bound.aside

    @aside.setter
    def aside(self, function: Callable[[], None] | None) -> None:
        self._bound.aside = function

    def _ready(self) -> int:
        if not self.arena.valid:
            raise DeviceFault('the live state was invalidated by an earlier fault; restore a '
                              'capsule or reset the session before going on.')
        return self.arena.position

    def _fold(self, ids: torch.Tensor, position: int) -> None:
        self.arena.will_write(position)
        self._tokens[position:position + ids.numel()] = ids
        self._logits.copy_(self._bound.fold(ids, position))
        self.arena.set_position(position + ids.numel())
