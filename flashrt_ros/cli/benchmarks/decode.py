"""Tokens a second, beside `transformers` with its cache."""

from __future__ import annotations

from collections.abc import Sequence
import time
from typing import Any, TYPE_CHECKING

import torch

from flashrt_ros.cli import output
from flashrt_ros.cli.benchmarks import device
from flashrt_ros.cli.benchmarks.oracle import Compiled, Oracle
from flashrt_ros.cli.benchmarks.timing import random_ids, Samples

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine

EAGER_TOKENS = 16  # of a block of eager `transformers` on a device: a tenth of a second each
AHEAD = 16  # steps that are queued at once to time the device alone
SHARES = {'0.8b': (0.50, 0.60), '9b': (0.72, 0.80)}  # of the ceiling: first, then


class Stream:
    """What an engine said, and when: on the wall clock, and on the device where there is one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._events: list[Any] = []
        self.stamps: list[float] = []
        self.tokens: list[int] = []

    def run(self, count: int) -> None:
        """Generate, greedily, until ``count`` tokens are there; an end of text is continued."""
        from flashrt_ros.engine import GenerateRequest

        def stamp(piece: Any) -> None:
            if piece.token_ids:
                self.stamps.append(time.perf_counter())
                self.tokens.extend(piece.token_ids)

        def mark() -> None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

        between = mark if device.on_device(self._engine) else None
        while len(self.stamps) < count:
            self._engine.generate(GenerateRequest(
                max_tokens=count - len(self.stamps), temperature=0.0), stamp, between=between)

    def intervals(self) -> list[float]:
        """Seconds between tokens, at the host."""
        return [b - a for a, b in zip(self.stamps, self.stamps[1:])]

    def device_intervals(self) -> list[float]:
        """Seconds between boundaries, on the clock of the device."""
        device.settle(self._engine)
        return [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:])]


def row(engine: Engine, oracle: Oracle | None, compiled: Compiled | None, position: int,
        tokens: int, repeats: int, seed: int, peak: dict[str, Any] | None) -> dict[str, Any]:
    """
    Decode from one position, in alternating blocks of ``tokens`` tokens, greedily.

    Both sides start from the same folded prompt in every block: ours from a capsule, theirs from
    a prefill, neither of which is counted. Ours is the whole way through the engine (sampler,
    detokenizer, stop test, callback a token); theirs is a call of the model and an argmax.

    :param compiled: `transformers` with a static cache and a compiled step, on a device.
    :param peak: the ceiling of a device, see :func:`device.ceiling`.
    """
    text = random_ids(engine.model.config.vocab_size, position, seed)
    engine.reset()
    engine.append(token_ids=text)
    engine.save(name='decode', overwrite=True)
    ours, clock, theirs, theirs_compiled = Samples(), Samples(), Samples(), Samples()
    agreeing, first_apart, alone = [], [], Samples()
    error = ''
    for index in range(repeats + 1):  # the first block of each warms up and is not counted
        output.log(f'position {position}: block {index} of {repeats}')
        engine.restore(capsule='decode')
        stream = Stream(engine)
        stream.run(tokens + 1)
        if index:
            ours.seconds += stream.intervals()
        if peak is not None:
            clock.seconds += stream.device_intervals() if index else []
            engine.restore(capsule='decode')
            if index:
                alone.add(steps_ahead(engine))
            engine.restore(capsule='decode')
        if oracle is not None:
            count = min(tokens, EAGER_TOKENS) if peak is not None else tokens
            said = _block(oracle, text, count, theirs if index else Samples())
            agreeing.append(said == stream.tokens[:count + 1])
            first_apart.append(apart(said, stream.tokens))
        if compiled is not None and not error:
            try:
                if not index:  # while the graphs are made
                    _block(compiled, text, 8, Samples())
                _block(compiled, text, tokens, theirs_compiled if index else Samples())
            except Exception as failure:  # whatever a compiler raises
                error = f'{type(failure).__name__}: {str(failure)[:300]}'
                output.log(f'transformers, compiled: {error}')
    engine.drop('decode')
    document: dict[str, Any] = {
        'position': position, 'tokens_per_second': round(1e3 / ours.median, 2),
        **ours.document('token'), 'token_p999_ms': round(ours.quantile(0.999), 4),
        'transformers_tokens_per_second': None, 'ratio': None}
    if theirs.seconds:
        document.update({
            'transformers_tokens_per_second': round(1e3 / theirs.median, 2),
            **theirs.document('transformers_token'),
            'ratio': round(theirs.median / ours.median, 3),
            'same_tokens_as_transformers': all(agreeing),
            'tokens_until_they_differ': min(first_apart)})
    if peak is not None:
        document.update(_device_document(engine, position, tokens, ours, clock, alone, peak))
        document['transformers_compiled_tokens_per_second'] = None
        document['transformers_compiled_error'] = error or None
    if theirs_compiled.seconds:
        document.update({
            'transformers_compiled_tokens_per_second': round(1e3 / theirs_compiled.median, 2),
            **theirs_compiled.document('transformers_compiled_token'),
            'transformers_compiled_cache_rows': compiled.rows if compiled else 0,
            'transformers_compiled_graphs_skipped': compiled.skipped() if compiled else 0,
            'ratio_compiled': round(theirs_compiled.median / ours.median, 3)})
    return document


def apart(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many leading tokens agree."""
    return next((i for i, (a, b) in enumerate(zip(left, right)) if a != b),
                min(len(left), len(right)))


def steps_ahead(engine: Engine) -> float:
    """
    Return the seconds of a step on the stream with the host ahead, so the device alone.

    The state moves on by :data:`AHEAD` tokens; restore a capsule afterwards.
    """
    plan: Any = engine.plan
    replay = plan.graphs['step'].replay
    seconds, _ = device.DeviceClock(engine.arena.device)(
        lambda: [replay() for _ in range(AHEAD)])
    plan.mail.forget()  # nobody waited for these tokens: the plan asks how many there were
    return seconds / AHEAD


def _block(contender: Oracle, text: list[int], count: int, samples: Samples) -> list[int]:
    said, last = [contender.prefill(text)], time.perf_counter()
    for _ in range(count):
        said.append(contender.step())
        now = time.perf_counter()
        samples.add(now - last)
        last = now
    return said


def _device_document(engine: Engine, position: int, tokens: int, ours: Samples, clock: Samples,
                     alone: Samples, peak: dict[str, Any]) -> dict[str, Any]:
    size = device.step_bytes(engine, position + AHEAD // 2)
    share = size / peak['bytes_per_second'] / (alone.median / 1e3)
    document: dict[str, Any] = {
        'device_us': round(alone.median * 1e3, 2), 'wall_us': round(ours.median * 1e3, 2),
        'step_bytes': size, 'roofline_us': round(size / peak['bytes_per_second'] * 1e6, 2),
        'share_of_bandwidth': round(share, 4),
        'between_tokens_on_the_device_us': {
            'median': round(clock.median * 1e3, 2), 'p99': round(clock.p99 * 1e3, 2),
            'p999': round(clock.quantile(0.999) * 1e3, 2), 'count': len(clock.seconds)}}
    targets = [
        {'target': f'share of bandwidth, {step}', 'limit': limit, 'measured': round(share, 4),
         'reached': share >= limit}
        for step, limit in zip(('first', 'then'), SHARES.get(device.size_of(engine), ()))]
    for step, name, value in (('first', 'p99', clock.p99), ('then', 'p999', clock.quantile(0.999))):
        targets.append(device.target(f'{name} between tokens over median, device clock, nobody '
                                     f'else busy, {step}', value / clock.median, 1.2))
    document['targets'] = targets
    return document
