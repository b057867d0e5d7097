"""What saving, restoring, forking and rolling back cost, beside a plain copy of as many bytes."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch

from flashrt_ros.cli import output
from flashrt_ros.cli.benchmarks import device
from flashrt_ros.cli.benchmarks.timing import random_ids, Samples

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine

WARM = 3  # rounds that are not counted


def row(engine: Engine, position: int, repeats: int, seed: int) -> dict[str, Any]:
    """
    Measure one position; every verb once a round, and the plain copies between them.

    A *full* restore or save finds not one row in common (the arena says that row 0 was written);
    one in the *lineage* follows a few tokens that were generated from the same capsule.
    ``restore_copies`` is the part of a full restore that moves bytes, without names, sessions and
    the answer. ``fork`` points a branch at the capsule; ``fork_live`` also makes it the live one.

    On a device every other round is timed on the stream instead, see :class:`device.Streams`; wall
    clock times include the wait for the device.
    """
    from flashrt_ros.engine import GenerateRequest
    engine.reset()
    output.log(f'position {position}: prefill')
    engine.append(token_ids=random_ids(engine.model.config.vocab_size, position, seed))
    size = engine.save(name='base', overwrite=True).info.bytes
    # words, not bytes: the fastest plain copy there is
    source = torch.ones(size // 8, dtype=torch.int64, device=engine.arena.device)
    target = torch.zeros_like(source)
    names = ('save', 'restore_full', 'restore_copies', 'restore_lineage', 'fork', 'fork_live',
             'rollback', 'memcpy')
    samples = {name: Samples() for name in names}
    on_device = device.on_device(engine)
    streams = device.Streams(engine.arena.device) if on_device else None
    copied: dict[str, int] = {}

    def speak() -> None:
        engine.generate(GenerateRequest(max_tokens=4, temperature=0.0))

    def memcpy() -> None:
        target.copy_(source)

    def save() -> None:
        copied['save'] = engine.save(name='full', overwrite=True).bytes_copied

    def restore(kind: str) -> None:
        copied[kind] = engine.restore(capsule='base').bytes_copied

    def fork() -> None:
        copied['fork'] = engine.fork('base', sessions=['branch']).bytes_copied

    def fork_live() -> None:
        copied['fork_live'] = engine.fork('base', sessions=['default']).bytes_copied

    def rollback() -> None:
        answer = engine.rollback(to='position', value=position)
        copied['rollback'], copied['replayed'] = answer.bytes_copied, answer.tokens_replayed

    for index in range((repeats + WARM) * (2 if on_device else 1)):
        def measure(name: str, work: Any, index: int = index) -> None:
            if streams is not None and index % 2:
                streams.time(name, work, counted=index >= 2 * WARM)
                return
            device.settle(engine)

            def whole() -> None:
                work()
                device.settle(engine)

            (samples[name] if index >= WARM * (2 if on_device else 1) else Samples()).time(whole)

        engine.arena.will_write(0)
        measure('restore_full', lambda: restore('restore_full'))
        measure('memcpy', memcpy)
        speak()
        measure('rollback', rollback)
        speak()
        measure('restore_lineage', lambda: restore('restore_lineage'))
        measure('fork', fork)
        engine.close_session('branch')
        engine.restore(capsule='base')
        speak()
        measure('fork_live', fork_live)
        engine.restore(capsule='base')
        engine.drop('full') if index else None
        engine.arena.will_write(0)
        measure('save', save)
        measure('memcpy', memcpy)
        frozen, _ = engine.lineage.save()
        engine.arena.will_write(0)
        measure('restore_copies', lambda frozen=frozen: engine.lineage.restore(frozen))
        measure('memcpy', memcpy)
        engine.lineage.pool.release(frozen)
    engine.drop('full')
    engine.drop('base')
    document = _document(position, size, samples, copied)
    if streams is not None:
        document.update(_on_stream(engine, samples, streams))
    return document


#: microseconds for a model of this size: on the stream at first, then; on the wall clock
FLAT = {'0.8b': (25, 15, 35), '9b': (40, 28, 48)}


def _on_stream(engine: Engine, samples: dict[str, Samples],
               streams: device.Streams) -> dict[str, Any]:
    """Return the times on the stream, the ratios to a plain copy there, and the targets."""
    copy = streams.median_us('memcpy')
    document = streams.document()
    targets = []
    for name in ('restore_full', 'save'):
        measured = streams.median_us(name)
        document[f'{name}_over_memcpy_stream'] = round(measured / copy, 3)
        targets += [device.target(f'{name}, {step}: {factor} x a plain copy + 10 us, stream',
                                  measured, factor * copy + 10)
                    for step, factor in (('first', 1.3), ('then', 1.1))]
    limits = FLAT.get(device.size_of(engine))
    for name in ('restore_lineage', 'fork', 'fork_live', 'rollback'):
        if limits is None:
            break
        measured = streams.median_us(name)
        alone = document['host_ahead'][name] == 1.0
        targets += [device.target(f'{name}, {step}, us on the stream', measured, limit,
                                  device_alone=alone)
                    for step, limit in zip(('first', 'then'), limits)]
        targets.append(device.target(f'{name}, then, us wall', samples[name].median * 1e3,
                                     limits[2]))
    document['targets'] = targets
    return document


def _document(position: int, size: int, samples: dict[str, Samples],
              copied: dict[str, int]) -> dict[str, Any]:
    document: dict[str, Any] = {'position': position, 'bytes': size}
    document.update({f'{name}_ms': round(values.median, 4) for name, values in samples.items()})
    memcpy = samples['memcpy'].median
    document['full_over_memcpy'] = round(samples['restore_full'].median / memcpy, 3)
    document['copies_over_memcpy'] = round(samples['restore_copies'].median / memcpy, 3)
    document['save_over_memcpy'] = round(samples['save'].median / memcpy, 3)
    for name, values in samples.items():
        document.update(values.document(name))
    document['bytes_copied'] = copied
    return document
