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
from flashrt_ros.capsule.lane import Lane
from flashrt_ros.capsule.lineage import Lineage, runs
from flashrt_ros.capsule.pool import Pool
from flashrt_ros.capsule.transfer import bring
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


def walk_abroad(seed: int, steps: int) -> bool:
    """As :func:`walk`, with a second pool in the same memory that capsules go down and up to."""
    rng, lineage = random.Random(seed), make()
    torch.manual_seed(seed)
    here, lane = lineage.pool, Lane(torch.device('cpu'))
    there = Pool(here.manifest, 1 << 20)
    capsules: list[list] = []  # [in the own pool or None, in the other or None, live bytes]
    lights: list[tuple[int, int, list]] = []  # (position, block, live bytes)

    def lower(row: int) -> None:
        for light in [x for x in lights if x[0] > row]:
            here.release_block(light[1])
            lights.remove(light)
    for _ in range(steps):
        action = rng.choice(['write', 'write', 'save', 'restore', 'restore', 'down', 'up', 'drop',
                             'forget', 'keep', 'back'])
        position = lineage.arena.position
        capsule = rng.choice(capsules) if capsules else None
        if action == 'write' and position < CAPACITY:
            lower(position)
            write(lineage, rng.randint(1, min(90, CAPACITY - position)))
        elif action == 'save':
            capsules.append([lineage.save()[0], None, live(lineage)])
        elif action == 'forget':
            lineage.forget()
        elif action == 'keep':
            lights.append((position, lineage.keep(), live(lineage)))
        elif action == 'back' and lights:
            _, block, expected = rng.choice(lights)
            lineage.put_back(block)
            if not same(live(lineage), expected):
                return False
        elif capsule is None:
            continue
        elif action == 'restore':
            frozen, far, expected = capsule
            lower(-1)
            if far is not None and (frozen is None or rng.random() < 0.5):
                lineage.restore(far, there)
            else:
                lineage.restore(frozen)
            if not same(live(lineage), expected):
                return False
        elif action == 'down' and capsule[0] is not None:
            if capsule[1] is None:
                capsule[1], _ = bring(here, capsule[0], there, lambda take: take(), lane)
            here.release(capsule[0])
            capsule[0] = None
        elif action == 'up' and capsule[0] is None:
            capsule[0], _ = bring(there, capsule[1], here, lambda take: take(), lane)
        elif action == 'drop':
            capsules.remove(capsule)
            for pool, frozen in zip((here, there), capsule, strict=False):
                if frozen is not None:
                    pool.release(frozen)
        for pool in (here, there):
            held = pool.page_ids.uids[pool.page_ids.references > 0]
            assert len(set(held.tolist())) == len(held), 'one uid stands for two pages'
    for frozen, far, expected in capsules:
        lineage.restore(frozen or far, here if frozen else there)
        if not same(live(lineage), expected):
            return False
        for pool, one in ((here, frozen), (there, far)):
            if one is not None:
                pool.release(one)
    lower(-1)
    lineage.forget()
    assert here.free() == (here.block_ids.count, here.page_ids.count)
    assert there.free() == (there.block_ids.count, there.page_ids.count)
    return True


def test_random_sequences_over_two_pools_equal_full_copies():
    """Case 28 where the host tier lies in the same memory: 150 sequences of 80 operations."""
    for seed in range(150):
        assert walk_abroad(seed, 80), f'sequence {seed} restored other bytes'


def test_without_the_write_rule_two_pools_notice(monkeypatch):
    monkeypatch.setattr(Arena, 'will_write', lambda self, row: None)
    assert any(not walk_abroad(seed, 80) for seed in range(40))


def test_a_page_saved_from_abroad_never_stands_for_a_fuller_one():
    """B lies below A on one page of the other pool; B is saved here, then A comes up."""
    lineage, lane = make(), Lane(torch.device('cpu'))
    here = lineage.pool
    there = Pool(here.manifest, 1 << 20)
    write(lineage, 80)
    light = lineage.keep()
    write(lineage, 20)
    a, expected = lineage.save()[0], live(lineage)
    lineage.put_back(light)
    b = lineage.save()[0]
    assert a.pages.tolist() == b.pages.tolist()
    far = [bring(here, one, there, lambda take: take(), lane)[0] for one in (a, b)]
    for one in (a, b):
        here.release(one)
    lineage.restore(far[1], there)
    for plane in (*lineage.arena.rows.planes, *here.rows.planes):
        plane[:, 80:].fill_(0xEE)
    lineage.save()
    a, _ = bring(there, far[0], here, lambda take: take(), lane)
    lineage.restore(a)
    assert same(live(lineage), expected)


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
