"""Promise 7 and the verbs on a family of capsules: immutable, fork, rollback, shared rows."""

from __future__ import annotations

import contextlib
import random
from typing import Literal, TYPE_CHECKING

import torch

from flashrt_ros import sampling
from flashrt_ros.capsule.pool import Frozen, PAGE, Pool
from flashrt_ros.cli.checks import state
from flashrt_ros.cli.checks.base import Check, Sizes
from flashrt_ros.errors import FlashrtError

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine


def frozen_bytes(pool: Pool, frozen: Frozen) -> state.Snapshot:
    """Copy the bytes of a frozen boundary out of the pool: fixed block and rows."""
    rows = torch.tensor([frozen.pages[row // PAGE] * PAGE + row % PAGE
                         for row in range(frozen.position)], dtype=torch.int64)
    return [pool.blocks[frozen.block].clone(),
            *(plane[:, rows.to(plane.device)] for plane in pool.rows.planes)]


def immutable(engine: Engine, sizes: Sizes) -> Check:
    """Nothing that is done after a save changes a byte of the capsule."""
    arena, pool = engine.arena, engine.lineage.pool
    state.begin(engine, sizes, salt=13)  # 705 rows: the last page is partly filled
    frozen, _ = engine.lineage.save()
    want = state.snapshot(arena)
    wrong = state.differing(want, frozen_bytes(pool, frozen))
    engine.save(name='parent')
    engine.save(name='start')
    rounds = 0
    for index in range(4):
        state.generate(engine, 5)                    # grows into the shared last page
        name = f'child{index}'
        engine.save(name=name)
        child = state.snapshot(arena)
        engine.rollback(to='tokens', value=3)
        engine.append(token_ids=state.random_ids(arena, 20 + 60 * index, index))
        engine.save(name='parent' if index == 2 else 'other', overwrite=True)
        for _ in range(2):  # again behind a rollback to the block that a session shares with it
            engine.restore(capsule=name)
            wrong += state.differing(child, state.snapshot(arena))
            state.generate(engine, 2)
            engine.rollback(to='tokens', value=2)
        engine.drop(name)
        state.poison(arena, 'nan')
        engine.lineage.restore(frozen)
        wrong += state.differing(want, frozen_bytes(pool, frozen))
        wrong += state.differing(want, state.snapshot(arena))
        state.begin(engine, sizes, length=30 + index, salt=14)
        engine.save(name='elsewhere', overwrite=True)
        wrong += state.differing(want, frozen_bytes(pool, frozen))
        rounds += 1
        engine.restore(capsule='start')
    pool.release(frozen)
    return Check('immutable', wrong == 0, wrong, 'bytes that changed',
                 f'{state.live_size(want)} frozen bytes read back from the pool through {rounds} '
                 'rounds of generating, saving children, overwriting names, dropping, rolling '
                 'back, poisoning and restoring; each child came back twice, once behind a '
                 'rollback to where it was saved.')


def fork_divergent(engine: Engine, sizes: Sizes) -> Check:
    """Branches of one capsule, run in turns, differ from each other and equal their cold runs."""
    arena, pool, rounds = engine.arena, engine.lineage.pool, 4
    seeds = {f'branch{i}': 11 + i // 2 for i in range(4)}
    suffixed = {'branch1', 'branch3'}  # so no two branches agree in both seed and suffix
    prompt = state.random_ids(arena, sizes.prompt, sizes.seed + 15)

    def settle(seed: int) -> None:
        engine.reset()
        engine.append(token_ids=prompt)
        sampling.write(arena, sampling.Sampling(temperature=1.0, seed=seed), 0)

    def turn(branch: str, session: str, index: int) -> list[int]:
        if index == 0 and branch in suffixed:
            engine.append(session, token_ids=prompt[:9])
        return state.generate(engine, 4, session, temperature=1.0)

    cold = {}
    for branch, seed in seeds.items():
        settle(seed)
        tokens = [token for i in range(rounds) for token in turn(branch, 'default', i)]
        cold[branch] = tokens, state.digest(arena.live_bytes())

    settle(0)
    engine.save(name='trunk')
    trunk = state.snapshot(arena)
    frozen, _ = engine.lineage.save()  # the pages of the trunk, and a block of its own
    before = frozen_bytes(pool, frozen)
    engine.fork('trunk', sessions=list(seeds), seeds=list(seeds.values()))
    engine.save('branch0', name='parked')  # which has not been live since it got its seed
    found: dict[str, tuple[list[int], str]] = {branch: ([], '') for branch in seeds}
    for index in range(rounds):
        for branch in sorted(seeds, reverse=bool(index % 2)):
            tokens = found[branch][0] + turn(branch, branch, index)
            found[branch] = tokens, state.digest(arena.live_bytes())
    equal = sum(found[branch] == cold[branch] for branch in seeds)
    distinct = len({end for _, end in found.values()})
    answers = len({tuple(tokens) for tokens, _ in found.values()})
    changed = state.differing(before, frozen_bytes(pool, frozen))
    pool.release(frozen)
    engine.restore(capsule='parked')
    tokens = [token for i in range(rounds) for token in turn('branch0', 'default', i)]
    parked = (tokens, state.digest(arena.live_bytes())) == cold['branch0']
    engine.fork(source_session='branch1', sessions=['twin'])  # from where it stands, no capsule
    ends = [(state.generate(engine, 4, name, temperature=1.0),
             state.digest(arena.live_bytes())) for name in ('branch1', 'twin')]
    twin = ends[0] == ends[1]
    engine.restore(capsule='trunk')
    changed += state.differing(trunk, state.snapshot(arena))
    count = len(seeds)
    return Check(
        'fork_divergent', equal == distinct == count and answers > 1 and changed == 0 and parked
        and twin, distinct,
        f'different end states of {count} branches',
        f'{count} branches (two seeds, two suffixes) took {rounds} turns each, interleaved; '
        f'{equal} of {count} equal their own run from nothing in tokens and in every live byte; '
        f'{answers} different answers; a capsule of a parked branch gave '
        f'{"the same" if parked else "NOT the same"}, a branch of a branch went on '
        f'{"as that did" if twin else "otherwise"}; {changed} bytes of the trunk changed.')


def rollback(engine: Engine, sizes: Sizes) -> Check:
    """Back by n tokens equals having stopped there, also over a grid border; then overwrite."""
    arena, grid = engine.arena, engine.plan.grid
    wrong = compared = replayed = 0
    for length in (sizes.prompt, grid - 4):
        seen: dict[int, state.Snapshot] = {}

        def remember(into: dict[int, state.Snapshot] = seen) -> None:
            into[arena.position] = state.snapshot(arena)

        state.begin(engine, sizes, length=length, salt=16, tokens=0)
        remember()
        state.generate(engine, 9, between=remember)
        tip = arena.position
        engine.save(name='tip', overwrite=True)
        for back in range(1, 9):
            answer = engine.rollback(to='tokens', value=back)
            replayed += answer.tokens_replayed
            wrong += state.differing(seen[tip - back], state.snapshot(arena))
            wrong += answer.position != tip - back
            compared += 1
            engine.restore(capsule='tip')
        # Below us, but with other bytes: roll back, overwrite, pass the old position, restore.
        engine.rollback(to='position', value=tip - 6)
        engine.append(token_ids=state.random_ids(arena, 80, sizes.seed))
        engine.restore(capsule='tip')
        wrong += state.differing(seen[tip], state.snapshot(arena))
        wrong += _into_the_prompt(engine, sizes, length)
    before, refused = state.snapshot(arena), 0
    impossible: tuple[tuple[Literal['tokens', 'position', 'turns'], int], ...] = (
        ('tokens', arena.position + 1), ('position', arena.position + 1),
        ('turns', 1000))
    for to, value in impossible:
        with contextlib.suppress(FlashrtError):
            engine.rollback(to=to, value=value)
            refused -= 1
        refused += 1
    wrong += state.differing(before, state.snapshot(arena))
    return Check(
        'rollback', wrong == 0 and refused == 3 and compared == 16, wrong, 'bytes that differ',
        f'{compared} rollbacks of 1 to 8 tokens, half of them over the grid border at {grid}, '
        f'against what stood there before ({replayed} tokens replayed in all, as the answers '
        f'say); overwritten rows came back with an older capsule; two rollbacks into a prefilled '
        f'chunk, each saved there and restored, equal a prefill of that length; {refused} of 3 '
        'impossible rollbacks were refused and changed nothing.')


def _into_the_prompt(engine: Engine, sizes: Sizes, length: int) -> int:
    """
    Roll capsule ``tip`` back into the last chunk of its prompt, save there, restore behind poison.

    Rows of a shorter chunk may have other last bits, so this is held against a prefill of that
    length, and the capsule may share no page that it wrote. Returns the bytes that differ.
    """
    arena, goal = engine.arena, length - 7
    ids = state.random_ids(arena, length, sizes.seed + 16)
    engine.reset()
    engine.append(token_ids=ids[:goal])
    want = state.snapshot(arena)
    engine.restore(capsule='tip')
    engine.rollback(to='position', value=goal)
    wrong = state.differing(want, state.snapshot(arena))
    engine.save(name='inside', overwrite=True)
    state.poison(arena, 'nan')
    engine.restore(capsule='inside')
    wrong += state.differing(want, state.snapshot(arena))
    engine.restore(capsule='tip')
    return wrong


def lineage(engine: Engine, sizes: Sizes) -> Check:
    """Random sequences of verbs against full copies: shared pages never mix."""
    arena, rng = engine.arena, random.Random(sizes.seed)
    copies: dict[str, state.Snapshot] = {}
    wrong, restores, recent = _pages_reused(engine, sizes), 2, ''
    state.begin(engine, sizes, length=100, salt=17)
    floor = arena.position
    for index in range(sizes.operations):
        verb = rng.choice(('append', 'generate', 'save', 'save', 'restore', 'restore', 'rollback',
                           'rewrite', 'rewrite', 'drop'))
        if verb == 'append' and arena.position < min(700, arena.capacity - 100):
            engine.append(token_ids=state.random_ids(arena, rng.randint(1, 90), index))
        elif verb == 'generate' and arena.position < arena.capacity - 10:
            state.generate(engine, rng.randint(1, 3))
        elif verb == 'save':
            name = f'copy{rng.randrange(8)}'
            engine.save(name=name, overwrite=True)
            copies[name] = state.snapshot(arena)
            recent = name
        elif verb == 'restore' and copies:
            name = recent = rng.choice(sorted(copies))
            engine.restore(capsule=name)
            wrong += state.differing(copies[name], state.snapshot(arena))
            restores += 1
        elif verb in ('rollback', 'rewrite') and arena.position > floor:
            back = rng.randint(1, min(40, arena.position - floor))
            engine.rollback(to='tokens', value=back)
            if verb == 'rewrite':  # the same rows, other bytes, up to and past where we were
                engine.append(token_ids=state.random_ids(arena, back + rng.randint(0, 9), index))
        elif verb == 'drop' and len(copies) > 2:
            # Often the one that the live rows still share their pages with.
            name = recent if recent in copies and rng.random() < 0.6 else rng.choice(
                sorted(copies))
            engine.drop(name)
            del copies[name]
    moved = sorted(copies)[:3]
    for name in moved:
        engine.demote(name)
    state.begin(engine, sizes, salt=30)
    engine.save(name='filler')  # in the places that have become free
    for name, copy in copies.items():
        engine.restore(capsule=name)
        wrong += state.differing(copy, state.snapshot(arena))
        restores += 1
    return Check('lineage', wrong == 0 and restores > 0, wrong, 'bytes that differ',
                 f'{sizes.operations} random appends, generations, saves, restores, rollbacks and '
                 f'drops, then {len(moved)} capsules a tier down and back; all {restores} restores '
                 'gave the bytes of a full copy made at the save.')


def _pages_reused(engine: Engine, sizes: Sizes) -> int:
    """
    Drop the capsule whose pages the live rows are compared with, and let others want pages.

    If nobody but that capsule held them, the next save would share pages that are free, and the
    one after it would write into them. Returns the bytes that differ.
    """
    arena, copies = engine.arena, {}
    state.begin(engine, sizes, length=2 * PAGE + 2, salt=24, tokens=0)
    engine.save(name='first')
    engine.drop('first')
    for name in ('second', 'third'):
        engine.save(name=name)
        copies[name] = state.snapshot(arena)
        engine.append(token_ids=state.random_ids(arena, 2 * PAGE, sizes.seed))
    state.begin(engine, sizes, length=3 * PAGE, salt=25, tokens=0)
    engine.save(name='elsewhere')
    wrong = 0
    for name, copy in copies.items():
        engine.restore(capsule=name)
        wrong += state.differing(copy, state.snapshot(arena))
        engine.drop(name)
    engine.drop('elsewhere')
    return wrong
