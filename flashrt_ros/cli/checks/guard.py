"""
Watching a replay for writes outside the manifest.

Three nets, because each has holes that another closes:

* a ``TorchDispatchMode`` sees every operator and, from the schema, which arguments it mutates
  (``out=`` included): a write to memory that is older than the replay and lies outside arena and
  scratch is recorded. It does not see native code that writes through a bare pointer;
* a hash of all older memory that Python can reach (weights included) before and after. It does not
  see a state that was moved to *new* memory;
* a list of tensors that the replay left alive: state that is rebound instead of written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
import gc
import hashlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_key(tensor: torch.Tensor) -> int:
    """Identify the memory behind a tensor, whatever view of it this is."""
    return tensor.untyped_storage().data_ptr()


def reachable() -> dict[int, torch.Tensor]:
    """Return one tensor for each storage that Python can reach right now."""
    gc.collect()
    found: dict[int, torch.Tensor] = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            try:
                size = item.untyped_storage().nbytes()
            except (RuntimeError, NotImplementedError):  # sparse, fake or meta tensors
                continue
            if size and item.device.type != 'meta':
                found.setdefault(storage_key(item), item)
    return found


def memory_digest(tensor: torch.Tensor) -> str:
    """Hash the whole storage behind a tensor."""
    storage = tensor.detach().untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return hashlib.blake2b(whole.cpu().numpy().data, digest_size=16).hexdigest()


class WriteGuard(TorchDispatchMode):
    """Records every operator that mutates memory which is neither allowed nor its own."""

    def __init__(self, allowed: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.allowed = {storage_key(tensor) for tensor in allowed}
        self.young: set[int] = set()
        self.written: set[int] = set()
        self.operators = 0
        self.offences: list[str] = []
        self._held: dict[int, torch.Tensor] = {}
        self._older: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operators += 1
        schema = func._schema
        inputs = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if _dense(leaf)}
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            for leaf in tree_leaves(value):
                if _dense(leaf) and leaf.numel():
                    self._judge(str(func), storage_key(leaf), leaf)
        result = func(*args, **kwargs)
        # Memory that comes out without having gone in was allocated by this operator. An older
        # storage keeps its address as long as it lives, so this can only name new memory.
        fresh = {storage_key(leaf) for leaf in tree_leaves(result) if _dense(leaf)} - inputs
        self.young |= fresh - self.allowed - self._older
        if str(func).startswith('aten.lift_fresh'):  # torch.tensor(): made outside, lifted here
            self.young |= inputs - self.allowed - self._older
        return result

    def __enter__(self) -> WriteGuard:
        self._held = reachable()  # alive, so that no new memory gets an older one's address
        self._older = set(self._held)
        return super().__enter__()

    def _judge(self, operator: str, key: int, leaf: torch.Tensor) -> None:
        if key in self.allowed:
            self.written.add(key)
        elif key not in self.young:
            self.offences.append(f'{operator} wrote {tuple(leaf.shape)} {leaf.dtype}')


def _dense(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


@dataclass
class Verdict:
    """What a watched replay did."""

    operators: int = 0
    offences: list[str] = field(default_factory=list)  #: operators that wrote older memory
    changed: list[str] = field(default_factory=list)   #: older memory whose bytes changed
    survivors: list[str] = field(default_factory=list)  #: new memory that was left alive
    hashed_bytes: int = 0

    @property
    def total(self) -> int:
        """Number of findings."""
        return len(self.offences) + len(self.changed) + len(self.survivors)


def watch(replay: Any, allowed: list[torch.Tensor]) -> Verdict:
    """
    Run ``replay()`` twice and tell what it did outside ``allowed``.

    Once for the hashes, once under the dispatch mode, so that the mode's own records are not taken
    for state that the replay keeps.
    """
    keys = {storage_key(tensor) for tensor in allowed}
    before = {key: (memory_digest(tensor), tensor) for key, tensor in reachable().items()
              if key not in keys}
    verdict = Verdict(hashed_bytes=sum(t.untyped_storage().nbytes() for _, t in before.values()))
    kept = replay()
    for key, tensor in reachable().items():
        if key not in keys and key not in before:
            verdict.survivors.append(f'{tuple(tensor.shape)} {tensor.dtype} outlived the replay')
    for digest, tensor in before.values():
        if memory_digest(tensor) != digest:
            verdict.changed.append(f'{tuple(tensor.shape)} {tensor.dtype} changed')
    del kept, before
    guard = WriteGuard(allowed)
    with guard:
        replay()
    verdict.operators = guard.operators
    verdict.offences = guard.offences
    return verdict
