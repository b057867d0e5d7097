"""
Capsules of a program that is no language model: a recurrent policy with a ring of observations.

It shares nothing with the engine but arena, pool and lineage, which know buffers and rows only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashrt_ros.arena import Arena, Buffer, Manifest, Role
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.capsule.pool import Pool
from flashrt_ros.cli.checks import state
from flashrt_ros.cli.checks.base import Check, Sizes

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine

OBSERVATION, HIDDEN, ACTION = 12, 32, 4


class Policy:
    """
    A small GRU policy that attends over the observations it has made; all state in an arena.

    Rows hold one observation and its value each; hidden state, last action and a step counter are
    the fixed part. Weights are seeded and only read.
    """

    def __init__(self, arena: Arena) -> None:
        generator = torch.Generator().manual_seed(1)

        def weights(*shape: int) -> torch.Tensor:
            made = torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
            return made.to(arena.device)

        self.arena = arena
        self.inputs = weights(3 * HIDDEN, OBSERVATION + HIDDEN)
        self.recurrent = weights(3 * HIDDEN, HIDDEN)
        self.value, self.query = weights(HIDDEN, OBSERVATION), weights(OBSERVATION, HIDDEN)
        self.head = weights(ACTION, HIDDEN)

    @staticmethod
    def manifest() -> Manifest:
        """Return the closed list of its buffers."""
        return Manifest([
            Buffer('observation', Role.ROWS, torch.float32, (OBSERVATION,)),
            Buffer('value', Role.ROWS, torch.float32, (HIDDEN,)),
            Buffer('hidden', Role.RECURRENT, torch.float32, (HIDDEN,)),
            Buffer('action', Role.BOUNDARY, torch.float32, (ACTION,)),
            Buffer('clock', Role.BOUNDARY, torch.int64, (1,)),
        ])

    def step(self, observation: torch.Tensor) -> torch.Tensor:
        """Observe, remember, act; return the action (the live buffer)."""
        arena, row = self.arena, self.arena.position
        hidden = arena['hidden']
        arena.will_write(row)
        arena['observation'][row] = observation
        arena['value'][row] = self.value @ observation
        scores = arena['observation'][:row + 1] @ (self.query @ hidden)
        seen = torch.softmax(scores, 0) @ arena['value'][:row + 1]
        gates = self.inputs @ torch.cat([observation, seen])
        update, reset, fresh = gates.chunk(3)
        u, r, f = (self.recurrent @ hidden).chunk(3)
        update, fresh = torch.sigmoid(update + u), torch.tanh(fresh + torch.sigmoid(reset + r) * f)
        hidden.copy_(update * hidden + (1 - update) * fresh)
        arena['action'].copy_(torch.tanh(self.head @ hidden))
        arena['clock'].add_(1)
        arena.set_position(row + 1)
        return arena['action']


def non_lm_program(engine: Engine, sizes: Sizes) -> Check:
    """Save, poison, restore and fork the policy: byte-exact, and the same actions follow."""
    manifest, device = Policy.manifest(), engine.arena.device
    arena = Arena(manifest, 512, device)
    lineage = Lineage(arena, Pool(manifest, 4 << 20, device))
    if device.type == 'cuda':
        from flashrt_ros.cuda.copies import Mover
        lineage.mover = Mover(arena, lineage.pool)
    policy = Policy(arena)
    generator = torch.Generator().manual_seed(sizes.seed)
    world = torch.randn(300, OBSERVATION, generator=generator).to(device)

    def drive(observations: torch.Tensor) -> list[torch.Tensor]:
        return [policy.step(observation).clone() for observation in observations]

    def compare(actions: list[torch.Tensor], want: list[torch.Tensor]) -> int:
        return sum(not state.same_bytes(a, b) for a, b in zip(actions, want, strict=True))

    arena.reset()
    drive(world[:150])
    want_state = state.snapshot(arena)
    want = drive(world[150:200])
    want_end = state.snapshot(arena)
    fork_a = drive(world[200:230])
    arena.reset()
    drive(world[:150])
    saved, _ = lineage.save()
    wrong = 0
    for pattern in ('nan', 'random'):
        state.poison(arena, pattern)
        lineage.restore(saved)
        wrong += state.differing(want_state, state.snapshot(arena))
        wrong += compare(drive(world[150:200]), want)
        wrong += state.differing(want_end, state.snapshot(arena))
    later, copied = lineage.save()  # a child: shares the pages of its parent
    lineage.restore(saved)
    other = drive(world[230:260].flip(0))  # another branch overwrites the rows from 150 on
    lineage.restore(later)
    wrong += compare(drive(world[200:230]), fork_a)
    diverged = compare(other, fork_a)
    lineage.restore(saved)
    wrong += state.differing(want_state, state.snapshot(arena))
    whole = manifest.state_bytes(200)
    return Check(
        'non_lm_program', wrong == 0 and diverged > 0 and copied < whole, wrong,
        'bytes or actions that differ',
        f'a recurrent policy with {manifest.fixed_bytes} fixed bytes and {manifest.row_bytes} '
        f'bytes an observation, saved at 150 observations; a child 50 later cost {copied} of '
        f'{whole} bytes; {diverged} of 30 actions differ between two branches.')
