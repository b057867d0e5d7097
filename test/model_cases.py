"""What the tests of model families share: binding, folding, and the closed world of a fold."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashrt_ros.arena import Arena, Manifest

GRID = 512
TOLERANCE = 1e-4


def bound(model, capacity=2048):
    """Return arena and binding of a model."""
    arena = Arena(Manifest(model.buffers()), capacity)
    return arena, model.bind(arena)


def prefill(binding, ids, position=0, grid=GRID):
    """Fold on the grid; return the last logits."""
    logits = None
    for start in range(0, len(ids), grid):
        part = ids[start:start + grid]
        logits = binding.fold(part, position + start)
    return logits


def tokens(count, vocab=256, seed=1):
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed))


def without(model, role):
    """Return how far the logits of one more token go where the buffers of a role are lost."""
    arena, binding = bound(model)
    binding.fold(tokens(100, 512), 0)
    state = arena.storage.clone()
    expected = binding.fold(tokens(1, 512), 100)
    arena.storage.copy_(state)
    for buffer in model.buffers():
        if buffer.role is role:
            arena[buffer.name].zero_()
    return (binding.fold(tokens(1, 512), 100) - expected).abs().max()


class ClosedWorld(TorchDispatchMode):
    """Refuse writes to any storage that is older than this mode, but for the arena's."""

    def __init__(self, arena):
        super().__init__()
        self.allowed = {arena.storage.untyped_storage().data_ptr(),
                        arena.scratch.untyped_storage().data_ptr()}
        self.fresh = {}
        self.writes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for index, argument in enumerate(function._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor) and value.numel():
                pointer = value.untyped_storage().data_ptr()
                assert pointer in self.allowed or pointer in self.fresh, function
                self.writes += 1
        given = {value.untyped_storage().data_ptr() for value in tree_leaves((args, kwargs))
                 if isinstance(value, torch.Tensor)}
        out = function(*args, **kwargs)
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                pointer = value.untyped_storage().data_ptr()
                if pointer not in given:  # no view: kept alive, so that no address comes twice
                    self.fresh[pointer] = value
        return out
