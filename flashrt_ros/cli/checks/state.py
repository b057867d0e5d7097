"""
Small tools over the live state: snapshots, poison, traces of steps.

Comparisons are always of bytes: two states are equal when every byte of the fixed block and of the
live rows is, and two continuations are equal when the logits bytes before every step are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
import hashlib
from typing import TYPE_CHECKING

import torch

from flashrt_ros.arena import Arena
from flashrt_ros.errors import InvalidArgument
from flashrt_ros.sampling import LOGITS

if TYPE_CHECKING:
    from flashrt_ros.cli.checks.base import Sizes
    from flashrt_ros.engine import Engine

Snapshot = list[torch.Tensor]


def random_ids(arena: Arena, count: int, seed: int) -> list[int]:
    """Return seeded token ids of the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, arena[LOGITS].numel(), (count,), generator=generator).tolist()


def begin(engine: Engine, sizes: Sizes, *, length: int | None = None, salt: int = 0,
          tokens: int = 5) -> None:
    """Fold a prompt of ``length`` ids from nothing, then generate some tokens, greedily."""
    engine.reset()
    engine.append(token_ids=random_ids(engine.arena, length or sizes.prompt, sizes.seed + salt))
    generate(engine, tokens)


def generate(engine: Engine, count: int, session: str = 'default',
             between: Callable[[], None] | None = None, temperature: float = 0.0) -> list[int]:
    """Generate exactly ``count`` tokens through the facade; an end-of-text is continued."""
    from flashrt_ros.engine import GenerateRequest
    tokens: list[int] = []
    while len(tokens) < count:
        answer = engine.generate(
            GenerateRequest(session=session, max_tokens=count - len(tokens),
                            temperature=temperature), between=between)
        if between is not None:
            between()
        tokens += answer.token_ids
    return tokens


def snapshot(arena: Arena) -> Snapshot:
    """Copy exactly the live bytes."""
    return [part.clone() for part in arena.live_bytes()]


def live_size(parts: Snapshot) -> int:
    """Bytes of a snapshot."""
    return sum(part.numel() for part in parts)


def differing(left: Snapshot, right: Snapshot) -> int:
    """Count the bytes that differ; a byte without a counterpart differs."""
    count = 0
    for a, b in zip(left, right, strict=True):
        if a.shape != b.shape:
            count += max(a.numel(), b.numel())
        else:
            count += int((a != b).sum().item())
    return count


def digest(parts: Snapshot) -> str:
    """Hash of a snapshot or of ``arena.live_bytes()``, the same in every process."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part.contiguous().cpu().numpy().data)
    return state.hexdigest()


def poison(arena: Arena, pattern: str) -> None:
    """
    Overwrite every byte of arena and scratch: ``'nan'`` (0xFF, a NaN in every float) or random.

    This is a write like any other, so it announces itself to the clean watermark; without that a
    restore in the same family would rightly trust rows that nobody said had changed.
    """
    arena.will_write(0)
    for block in (arena.storage, arena.scratch):
        spoil(block, pattern)


def poison_dead(arena: Arena, pattern: str) -> int:
    """Overwrite every row at or above the position, and scratch; return the bytes spoilt."""
    position, count = arena.position, arena.scratch.numel()
    for plane in arena.rows.planes:
        dead = plane[:, position:]
        spoil(dead, pattern)
        count += dead.numel()
    spoil(arena.scratch, pattern)
    return count


def spoil(block: torch.Tensor, pattern: str) -> None:
    """Overwrite a block of bytes, as :func:`poison` does, announcing nothing."""
    if pattern == 'nan':
        block.fill_(0xFF)
    else:
        generator = torch.Generator(block.device).manual_seed(5)
        block.copy_(torch.randint(0, 256, block.shape, dtype=torch.uint8, device=block.device,
                                  generator=generator))


@dataclass
class Trace:
    """Tokens of some steps and the logits that stood before each, and after the last."""

    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    end: str = ''  #: digest of the live bytes after the last step
    refused: str = ''  #: why the plan would not go on from this state; equals nothing then

    def equal_steps(self, other: Trace) -> int:
        """Count the leading steps whose logits bytes and token are equal."""
        count = 0
        for a, b, s, t in zip(self.logits, other.logits, self.tokens, other.tokens, strict=False):
            if s != t or not same_bytes(a, b):
                break
            count += 1
        return count

    def equals(self, other: Trace) -> bool:
        """Tell whether all tokens, all logits bytes and the end state are the same."""
        return (not self.refused and not other.refused
                and self.tokens == other.tokens and self.end == other.end
                and len(self.logits) == len(other.logits)
                and all(map(same_bytes, self.logits, other.logits)))


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare as uint8, so that NaN equals NaN and -0.0 does not equal 0.0."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def steps(engine: Engine, count: int) -> Trace:
    """Run ``count`` steps of the plan, below sessions, and record all of them."""
    trace, arena = Trace(), engine.arena
    for _ in range(count):
        trace.logits.append(arena[LOGITS].clone())
        try:
            trace.tokens.append(engine.plan.step())
        except InvalidArgument as error:  # a position that no state has, say
            trace.refused = str(error)
            break
    trace.logits.append(arena[LOGITS].clone())
    trace.end = digest(arena.live_bytes())
    return trace


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute difference of two logits vectors; infinite where one is not finite."""
    difference = (left.double() - right.double()).abs().max().item()
    return difference if difference == difference else float('inf')
