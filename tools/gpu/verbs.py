"""
Where the wall time of the engine's verbs goes.

Each verb is timed as a user would: from the call to its return, and until the device has done what
was queued; a first token until the listener has it. Then again with stamps around the stages, which
cost a little themselves, as a time line: when a stage begins, and how long it takes. Runs on a CPU
too.

    python tools/gpu/verbs.py --model random:qwen3.5-0.8b --device cuda --out results
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
import gc
import importlib
import json
import os
from pathlib import Path
import random
import statistics
import time
from typing import Any

import torch

from flashrt_ros.engine import Engine, EngineConfig, GenerateRequest

now = time.perf_counter_ns
#: module, class ('' for a function of the module), names
STAGES = (
    ('engine', 'Engine', 'check_epoch'),
    ('answering', 'Answering', '_checked _run _restore'),
    ('sessions', 'Sessions', 'check get obtain assign point activate freeze _park'),
    ('session', 'Session', 'become append generate rollback _mark _host_at _seed_at _finish'),
    ('session', 'Detokenizer', 'push'),
    ('capsule.store', 'Store', 'find info put check_free'),
    ('capsule.tiering', 'Tiers', 'promote park unpark'),
    ('capsule.lineage', 'Lineage', 'save restore put_back keep _follow _same'),
    ('capsule.pool', 'Pool', 'hold release hold_pages release_pages take'),
    ('sampling', 'HostSettings', 'choose answer'),
    ('sampling', '', 'choose reseed'),
    ('plan', 'EagerPlan', 'step'),
    ('cuda.settings', 'Settings', 'choose answer'),
    ('cuda.plan', 'CudaGraphPlan', 'step verify _begin _go _receive'),
    ('cuda.copies', 'Mover', 'move'),
    ('cuda.mail', 'Mail', 'receive expect'),
    ('cuda.driver', 'Launch', '__call__'))


@contextmanager
def stamped(log: list[tuple[str, int, int]]) -> Iterator[None]:
    """Stamp the stages meanwhile."""
    undo: list[tuple[Any, str, Any]] = []

    def wrap(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **more: Any) -> Any:
            begin = now()
            try:
                return original(*args, **more)
            finally:
                log.append((label, begin, now()))
        undo.append((owner, name, original))
        setattr(owner, name, timed)

    for module, cls, names in STAGES:
        if module.startswith('cuda') and not torch.cuda.is_available():
            continue
        try:
            owner = importlib.import_module(f'flashrt_ros.{module}')
        except ImportError:  # of another version
            continue
        owner = getattr(owner, cls, None) if cls else owner
        for name in names.split():
            if hasattr(owner, name):
                wrap(owner, name, f'{cls or module}.{name}')
    try:
        yield
    finally:
        for owner, name, original in reversed(undo):
            setattr(owner, name, original)


class Verbs:
    """The verbs at one position, each with what has to happen before."""

    def __init__(self, engine: Engine, position: int, seed: int = 1) -> None:
        self.engine, self.position = engine, position
        self.synchronize: Callable[[], Any] | None = None
        if engine.arena.device.type == 'cuda':
            from flashrt_ros.cuda import driver
            self.synchronize = driver.library().cuCtxSynchronize
        rng = random.Random(seed)
        vocabulary = engine.model.config.vocab_size
        engine.reset()
        engine.append(token_ids=[rng.randrange(vocabulary) for _ in range(position)])
        engine.save(name='base', overwrite=True)
        self.other = [rng.randrange(vocabulary) for _ in range(100)]
        self.token_at = 0
        self.first = GenerateRequest(capsule='base', max_tokens=1, temperature=0.0)
        self.works: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            'restore_family': (self.speak, self.restore),
            'restore_hot': (lambda: None, self.restore),
            'restore_after_yields': (self.yields, self.restore),
            'restore_after_nap': (lambda: time.sleep(1e-3), self.restore),
            'restore_full': (self.disturb, self.restore),
            'fork': (self.close, self.fork),
            'fork_live': (self.speak, self.fork_live),
            'rollback': (self.speak, self.rollback),
            'save_family': (self.saveable, self.save),
            'first_family': (self.speak, self.first_token),
            'first_full': (self.disturb, self.first_token),
            'copies_family': (self.speak, self.copies),
            'copies_full': (self.disturb, self.copies),
            'plan_first': (self.speak, self.plan_first),
            'nothing': (self.speak, lambda: None)}

    def settle(self) -> None:
        if self.synchronize is not None:  # torch's way to it takes several microseconds
            self.synchronize()

    def speak(self) -> None:
        self.engine.restore(capsule='base')
        self.engine.generate(GenerateRequest(max_tokens=4, temperature=0.0))

    def disturb(self) -> None:
        self.engine.reset()
        self.engine.append(token_ids=self.other)

    def yields(self) -> None:
        for _ in range(200):
            os.sched_yield()

    def close(self) -> None:
        if self.engine._sessions.find('branch') is not None:
            self.engine.close_session('branch')
        self.speak()

    def saveable(self) -> None:
        self.speak()

    def restore(self) -> None:
        self.engine.restore(capsule='base')

    def fork(self) -> None:
        self.engine.fork('base', sessions=['branch'])

    def fork_live(self) -> None:
        self.engine.fork('base', sessions=['default'])

    def rollback(self) -> None:
        self.engine.rollback(to='position', value=self.position)

    def save(self) -> None:
        self.engine.save(name='more', overwrite=True)

    def copies(self) -> None:
        self.engine.lineage.restore(self.engine.store.find('base').frozen)

    def plan_first(self) -> None:
        self.engine.lineage.restore(self.engine.store.find('base').frozen)
        self.engine.plan.step(self.hear)

    def hear(self, _: object) -> None:
        if not self.token_at:
            self.token_at = now()

    def first_token(self) -> None:
        self.engine.generate(self.first, self.hear)

    def sample(self, name: str) -> tuple[int, int, int, int]:
        """Return when it began, the first token, the return, and the end on the device."""
        before, work = self.works[name]
        before()
        self.settle()
        self.token_at = 0
        begin = now()
        work()
        returned = now()
        self.settle()
        return begin, self.token_at, returned, now()


def spread(values: list[float]) -> list[float]:
    """Return median and p99 in microseconds."""
    ordered = sorted(values)
    return [round(ordered[len(ordered) // 2] / 1e3, 1),
            round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] / 1e3, 1)]


def measure(verbs: Verbs, repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    samples: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
    for index in range(repeats + 3):  # alternating, so that drifts meet all of them
        for name in verbs.works:
            taken = verbs.sample(name)
            if index >= 3:
                samples[name].append(taken)
    for name, taken in samples.items():
        row = {'returned': spread([r - b for b, _, r, _ in taken]),
               'settled': spread([e - b for b, _, _, e in taken])}
        if taken[0][1]:
            row['token'] = spread([t - b for b, t, _, _ in taken])
        found[name] = row
    return found


def timeline(verbs: Verbs, name: str, repeats: int) -> list[list[Any]]:
    """Return ``[stage, begins at, takes]`` in the order of the beginnings, microseconds."""
    log: list[tuple[str, int, int]] = []
    stages: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    with stamped(log):
        for _ in range(repeats):
            log.clear()
            begin, token, returned, end = verbs.sample(name)
            inside = [entry for entry in log if entry[1] >= begin and entry[2] <= end]
            inside += [('= returned', begin, returned), ('= settled', begin, end)]
            if token:
                inside.append(('= token', begin, token))
            seen: dict[str, int] = defaultdict(int)
            for label, start, stop in inside:
                stages[label, seen[label]].append((start - begin, stop - start))
                seen[label] += 1
    rows = [[label, round(statistics.median(s for s, _ in taken) / 1e3, 1),
             round(statistics.median(t for _, t in taken) / 1e3, 1)]
            for (label, _), taken in stages.items() if len(taken) > repeats // 2]
    return sorted(rows, key=lambda row: (row[1], -row[2]))


def primitives(engine: Engine) -> dict[str, float]:
    """Return nanoseconds of what the verbs are made of, hot."""
    arena = engine.arena
    fixed = arena.fixed
    works: dict[str, Callable[[], Any]] = {
        'sched_yield': os.sched_yield, 'sleep(0)': lambda: time.sleep(0),
        'monotonic': time.monotonic, 'time_ns': time.time_ns,
        'fill_': lambda: arena['sampler.temperature'].fill_(0.0),
        'copy_ fixed block': lambda: engine.lineage._guard.copy_(engine.lineage._fixed)}
    if arena.device.type == 'cuda':
        from flashrt_ros.cuda import driver
        event, stream = torch.cuda.Event(), torch.cuda.current_stream()
        pinned = torch.zeros(1040, dtype=torch.uint8).pin_memory()
        move = engine.lineage.mover.move
        kept = engine._empty
        works.update({
            'current_stream': torch.cuda.current_stream,
            'current_stream().cuda_stream': lambda: torch.cuda.current_stream().cuda_stream,
            'is_current_stream_capturing': torch.cuda.is_current_stream_capturing,
            'raw stream': lambda: torch._C._cuda_getCurrentRawStream(arena.device.index or 0),
            'event.record': event.record, 'event.synchronize': event.synchronize,
            'event.query': event.query, 'stream.query': stream.query,
            'copy_ 1 KiB to pinned': lambda: pinned.copy_(fixed[:1040], non_blocking=True),
            'launch of move': lambda: move(kept.block, kept.pages, 0, 0, 0, restore=False),
            'synchronize': torch.cuda.synchronize,
            'cuCtxSynchronize': driver.library().cuCtxSynchronize})
    found = {}
    for name, work in works.items():
        times = []
        for _ in range(200):
            if arena.device.type == 'cuda' and name != 'synchronize':
                torch.cuda.synchronize()
            begin = now()
            work()
            times.append(now() - begin)
        found[name] = statistics.median(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n\n')[0])
    parser.add_argument('--model', default='random:qwen3.5-0.8b')
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--positions', default='2048,16384')
    parser.add_argument('--pool-mib', type=int, default=2048)
    parser.add_argument('--repeats', type=int, default=40)
    parser.add_argument('--timelines', default='restore_family,restore_full,first_family,'
                        'first_full,rollback,fork,fork_live,save_family')
    parser.add_argument('--out', default='results')
    args = parser.parse_args()
    positions = [int(each) for each in args.positions.split(',')]
    context = max(positions) + 192
    engine = Engine(EngineConfig(model=args.model, device=args.device, context=context,
                                 pool_bytes=args.pool_mib << 20))
    gc.collect()
    gc.freeze()
    report: dict[str, Any] = {'model': args.model, 'device': args.device,
                              'primitives_ns': primitives(engine), 'verbs_us': {},
                              'timelines_us': {}}
    print(json.dumps(report['primitives_ns']))
    for position in positions:
        verbs = Verbs(engine, position)
        rows = report['verbs_us'][position] = measure(verbs, args.repeats)
        for name, row in rows.items():
            print(position, f'{name:15}', '  '.join(
                f'{what} {row[what][0]:7.1f} ({row[what][1]:7.1f})' for what in row), flush=True)
        lines = report['timelines_us'][position] = {}
        for name in filter(None, args.timelines.split(',')):
            lines[name] = timeline(verbs, name, args.repeats)
            if position == positions[0]:
                print(f'-- {name} at {position}: stage, begins, takes (us)')
                for label, begins, takes in lines[name]:
                    print(f'{begins:8.1f} {takes:8.1f}  {label}')
    Path(args.out).mkdir(parents=True, exist_ok=True)
    (Path(args.out) / 'verbs.json').write_text(json.dumps(report, indent=1))
    engine.close()


if __name__ == '__main__':
    main()
