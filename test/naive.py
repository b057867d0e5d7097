"""
A reference that copies everything: no pages, no trail, no ring, no tiers, one more arena.

It keeps full copies of the live bytes for each session, each capsule and each position a session
has stood at, and folds in an arena of its own that is filled with garbage before every verb.
"""

from dataclasses import dataclass, field, replace

import torch

from flashrt_ros import sampling
from flashrt_ros.arena import Arena
from flashrt_ros.plan import EagerPlan


@dataclass(frozen=True)
class Full:
    """All live bytes."""

    position: int
    fixed: torch.Tensor
    planes: tuple

    @classmethod
    def of(cls, arena) -> 'Full':
        position = arena.position
        return cls(position, arena.fixed.clone(),
                   tuple(plane[:, :position].clone() for plane in arena.rows.planes))

    def same(self, arena) -> bool:
        return (self.position == arena.position and torch.equal(self.fixed, arena.fixed)
                and all(torch.equal(mine, plane[:, :self.position])
                        for mine, plane in zip(self.planes, arena.rows.planes, strict=True)))


@dataclass
class Path:
    """A conversation: where it stands, and where it has stood on the way there."""

    now: Full
    past: dict = field(default_factory=dict)  # position -> Full

    def copy(self) -> 'Path':
        return Path(self.now, dict(self.past))

    def moved(self, full: Full) -> None:
        self.now = full
        self.past[full.position] = full

    def write_from(self, position: int) -> None:
        self.past = {p: full for p, full in self.past.items() if p <= position}

    def back(self, position: int) -> None:
        self.write_from(position)
        self.now = self.past[position]


class Naive:
    """Append and generate on an arena of its own."""

    def __init__(self, engine) -> None:
        self.arena = Arena(engine.arena.manifest, engine.arena.capacity)
        self.plan = EagerPlan(engine.model, self.arena)
        self.eos = set(engine.model.config.eos_token_ids)
        self.empty = Full.of(engine.arena)
        assert self.empty.position == 0

    def start(self) -> Path:
        return Path(self.empty, {0: self.empty})

    def _load(self, full: Full) -> None:
        self.arena.storage.fill_(0xA5)
        self.arena.scratch.fill_(0xA5)
        self.arena.fixed.copy_(full.fixed)
        for plane, rows in zip(self.arena.rows.planes, full.planes, strict=True):
            plane[:, :full.position].copy_(rows)

    def append(self, path: Path, ids: list) -> None:
        self._load(path.now)
        path.write_from(path.now.position)
        done = 0
        while done < len(ids):
            room = self.plan.grid - self.arena.position % self.plan.grid
            count = min(room, len(ids) - done)
            self.plan.append(ids[done:done + count])
            done += count
        path.moved(Full.of(self.arena))

    def generate(self, path: Path, count: int, **chosen) -> tuple:
        self._load(path.now)
        path.write_from(path.now.position)
        settings, counter = sampling.read(self.arena)
        sampling.write(self.arena, replace(settings, **chosen),
                       0 if 'seed' in chosen else counter)
        tokens: list = []
        while len(tokens) < count and self.arena.position < self.arena.capacity:
            tokens.append(self.plan.step())
            path.moved(Full.of(self.arena))
            if tokens[-1] in self.eos:
                break
        if not tokens:
            path.now = Full.of(self.arena)
        return tuple(tokens)
