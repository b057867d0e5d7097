"""
The trail-and-clean rule against a reference that copies everything.

The program here is no language model: its rows and fixed block are random bytes, so that every
missing or wrong copy shows. Two tests break the rule on purpose: the reference must notice.
"""

import random

import numpy as np
import pytest
import torch

from flashrt_ros.arena import Arena, Buffer, Manifest, Role
from flashrt_ros.capsule.lineage import Lineage, runs
from flashrt_ros.capsule.pool import Pool
from flashrt_ros.errors import Capacity

CAPACITY = 400


def make(budget: int = 1 << 20) -> Lineage:
    manifest = Manifest([
        Buffer('id', Role.ROWS, torch.int32, (1,)),
        Buffer('k', Role.ROWS, torch.float32, (3,)),
        Buffer('v', Role.ROWS, torch.float32, (3,)),
        Buffer('state', Role.RECURRENT, torch.float32, (4,)),
    ])
    arena = Arena(manifest, CAPACITY)
    return Lineage(arena, Pool(manifest, budget))


def write(lineage: Lineage, count: int) -> None:
    """Fold ``count`` rows of random bytes."""
    arena = lineage.arena
    position = arena.position
    arena.will_write(position)
    for plane in arena.rows.planes:
        plane[:, position:position + count].random_(0, 256)
    arena['state'].view(torch.uint8).random_(0, 256)
    arena.set_position(position + count)


def live(lineage: Lineage) -> list[torch.Tensor]:
    return [part.clone() for part in lineage.arena.live_bytes()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, two, strict=True))


def walk(lineage: Lineage, seed: int, steps: int) -> bool:
    """Random saves, restores, rollbacks, writes and drops; False at the first difference."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    capsules: list = []
    lights: list[tuple[int, int, list]] = []  # (position, block, live bytes)
    for _ in range(steps):
        action = rng.choice(['write', 'write', 'save', 'restore', 'keep', 'back', 'drop'])
        arena = lineage.arena
        position = arena.position
        if action == 'write' and position < CAPACITY:
            count = rng.randint(1, min(90, CAPACITY - position))
            for light in [x for x in lights if x[0] > position]:
                lineage.pool.release_block(light[1])
                lights.remove(light)
            write(lineage, count)
        elif action == 'save':
            capsules.append((lineage.save()[0], live(lineage)))
        elif action == 'restore' and capsules:
            frozen, expected = rng.choice(capsules)
            for light in lights:
                lineage.pool.release_block(light[1])
            lights.clear()
            lineage.restore(frozen)
            if not same(live(lineage), expected):
                return False
        elif action == 'keep':
            lights.append((position, lineage.keep(), live(lineage)))
        elif action == 'back' and lights:
            _, block, expected = rng.choice(lights)
            lineage.put_back(block)
            if not same(live(lineage), expected):
                return False
        elif action == 'drop' and capsules:
            frozen, _ = capsules.pop(rng.randrange(len(capsules)))
            lineage.pool.release(frozen)
    for frozen, expected in capsules:
        lineage.restore(frozen)
        if not same(live(lineage), expected):
            return False
        lineage.pool.release(frozen)
    for light in lights:
        lineage.pool.release_block(light[1])
    return True


def test_random_sequences_equal_full_copies():
    """Case 28: 200 sequences of 60 operations."""
    for seed in range(200):
        assert walk(make(), seed, 60), f'sequence {seed} restored other bytes'


def test_without_the_write_rule_the_reference_notices(monkeypatch):
    monkeypatch.setattr(Arena, 'will_write', lambda self, row: None)
    assert any(not walk(make(), seed, 60) for seed in range(40))


def test_without_references_from_live_the_reference_notices(monkeypatch):
    def follow(self, pages, position):
        self.trail, self.arena.clean = pages, position
    monkeypatch.setattr(Lineage, '_follow', follow)

    def noticed(seed):
        try:
            return not walk(make(), seed, 60)
        except AssertionError:  # the pool itself caught a page that nobody holds
            return True
    assert any(noticed(seed) for seed in range(40))


def test_references_return_to_zero():
    lineage = make()
    before = lineage.pool.free()
    assert walk(lineage, 7, 500)
    lineage.arena.reset()
    empty, _ = lineage.save()
    lineage.pool.release(empty)
    assert lineage.pool.free() == before


def test_a_restore_in_the_family_copies_the_fixed_block_only():
    lineage = make()
    write(lineage, 300)
    parent, copied = lineage.save()
    assert copied == lineage.arena.manifest.state_bytes(300)
    write(lineage, 50)
    assert lineage.restore(parent) == lineage.arena.manifest.fixed_bytes
    child, copied = lineage.save()
    assert copied == lineage.arena.manifest.fixed_bytes
    assert child.pages.tolist() == parent.pages.tolist()


def test_rows_below_a_passed_position_are_copied_again():
    """The counterexample of the design: back to 50, on past 100, row 60 has other bytes."""
    lineage = make()
    write(lineage, 50)
    light = lineage.keep()
    write(lineage, 100)
    first, expected = lineage.save()[0], live(lineage)
    lineage.put_back(light)
    write(lineage, 80)
    assert lineage.arena.clean == 50
    copied = lineage.restore(first)
    assert copied == lineage.arena.manifest.fixed_bytes + 100 * lineage.arena.manifest.row_bytes
    assert same(live(lineage), expected)


def test_a_partly_filled_page_is_never_mutated():
    lineage = make()
    write(lineage, 70)
    one, bytes_one = lineage.save()[0], live(lineage)
    write(lineage, 5)
    two = lineage.save()[0]
    assert one.pages[0] == two.pages[0]
    assert one.pages[1] != two.pages[1]
    lineage.arena.storage.random_(0, 256)
    lineage.arena.clean = 0
    lineage.restore(one)
    assert same(live(lineage), bytes_one)


def test_a_full_pool_refuses_and_changes_nothing():
    lineage = make(budget=40_000)
    write(lineage, 390)
    kept = []
    with pytest.raises(Capacity, match='capsules.device_bytes'):
        while True:
            kept.append((lineage.save()[0], live(lineage)))
            lineage.arena.clean = 0
    before, free = live(lineage), lineage.pool.free()
    with pytest.raises(Capacity):
        lineage.save()
    assert same(live(lineage), before)
    assert lineage.pool.free() == free
    for frozen, expected in kept:
        lineage.restore(frozen)
        assert same(live(lineage), expected)


def test_a_pool_too_small_is_refused_with_the_size_needed():
    with pytest.raises(Capacity, match=r'\d+ or more'):
        make(budget=1000)


def test_guard_puts_the_fixed_block_back():
    lineage = make()
    write(lineage, 20)
    before = live(lineage)
    with pytest.raises(RuntimeError), lineage.guard():
        write(lineage, 30)
        raise RuntimeError('in the middle')
    assert same(live(lineage), before)


def test_a_fault_in_the_middle_of_a_restore_marks_the_state_invalid(monkeypatch):
    lineage = make()
    write(lineage, 100)
    frozen = lineage.save()[0]
    write(lineage, 10)
    monkeypatch.setattr(Lineage, '_copy_block',
                        staticmethod(lambda *_: (_ for _ in ()).throw(RuntimeError('device'))))
    with pytest.raises(RuntimeError):
        lineage.restore(frozen)
    assert not lineage.arena.valid
    monkeypatch.undo()
    lineage.restore(frozen)
    assert lineage.arena.valid


def test_runs_merge_neighbouring_pages():
    pages = np.array([3, 4, 7])
    assert list(runs(pages, 0, 150)) == [(0, 192, 128), (128, 448, 22)]
    assert list(runs(pages, 0, 150, 70)) == [(70, 262, 58), (128, 448, 22)]
    assert list(runs(np.array([9]), 128, 140)) == [(128, 576, 12)]
    assert list(runs(pages[:0], 0, 0)) == []
