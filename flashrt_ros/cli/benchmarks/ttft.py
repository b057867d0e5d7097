"""Time to the first token: cold, from a capsule, and in `transformers`."""

from __future__ import annotations

import time
from typing import Any, TYPE_CHECKING

from flashrt_ros.cli import output
from flashrt_ros.cli.benchmarks import device
from flashrt_ros.cli.benchmarks.oracle import Oracle
from flashrt_ros.cli.benchmarks.timing import Cache, random_ids, Samples

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine, GenerateRequest

CAPSULES_PER_COLD = 5  # restored first tokens for each cold one: they are cheap, and p99 wants many


def first_token(engine: Engine, request: GenerateRequest) -> tuple[float, int, Any]:
    """Return the seconds until the first token was handed out, the token, and the answer."""
    seen: list[tuple[float, int]] = []

    def stamp(piece: Any) -> None:
        seen.append((time.perf_counter(), piece.token_ids[0] if piece.token_ids else -1))

    begun = time.perf_counter()
    answer = engine.generate(request, stamp)
    return seen[0][0] - begun, seen[0][1], answer


def row(engine: Engine, oracle: Oracle | None, prefix: int, suffix: int, repeats: int,
        seed: int, peak: dict[str, Any] | None = None) -> dict[str, Any]:
    """
    Measure one prefix length.

    In each round: one cold prefill of prefix + suffix in the engine, some restores of the prefix
    followed by an append of the suffix and a sampled token, the same without a suffix, and one
    cold prefill in `transformers`. Before each the arena holds another text and the caches
    something else, so a restore copies everything. Times end when the host has the token; those
    of a restore alone when the device has copied.

    :param peak: the ceiling of a device, see :func:`device.ceiling`; None on a CPU.
    """
    from flashrt_ros.engine import GenerateRequest
    vocab = engine.model.config.vocab_size
    text = random_ids(vocab, prefix + suffix, seed)
    other = random_ids(vocab, 100, seed + 1)
    cold, restored, bare, theirs, tail = Samples(), Samples(), Samples(), Samples(), Samples()
    tokens: dict[str, set[int]] = {'cold': set(), 'capsule': set(), 'transformers': set()}
    cache = None if peak else Cache()
    engine.reset()
    engine.append(token_ids=text[:prefix])
    saved = engine.save(name='prefix', overwrite=True)

    def disturb() -> None:
        engine.reset()
        engine.append(token_ids=other)
        if cache is not None:  # on a device the weights that were read did that
            cache.evict()
        device.settle(engine)

    if oracle is not None and peak:  # kernels of its own are compiled and tuned at first sight
        oracle.prefill(text)
    def restore() -> None:
        engine.restore(capsule='prefix')
        device.settle(engine)

    for index in range(repeats):
        output.log(f'prefix {prefix}: round {index + 1} of {repeats}')
        disturb()
        engine.reset()
        seconds, token, _ = first_token(engine, GenerateRequest(
            token_ids=text, max_tokens=1, temperature=0.0))
        cold.add(seconds)
        tokens['cold'].add(token)
        for _ in range(CAPSULES_PER_COLD):
            disturb()
            seconds, token, answer = first_token(engine, GenerateRequest(
                capsule='prefix', token_ids=text[prefix:], max_tokens=1, temperature=0.0))
            restored.add(seconds)
            tokens['capsule'].add(token)
            if answer.tokens_reused != prefix or answer.tokens_prefilled != suffix:
                raise RuntimeError(f'the capsule was not used: {answer}')
            disturb()
            bare.add(first_token(engine, GenerateRequest(
                capsule='prefix', max_tokens=1, temperature=0.0))[0])
            disturb()
            tail.time(restore)
        if oracle is not None:
            disturb()
            tokens['transformers'].add(theirs.time(lambda: oracle.prefill(text)))
    engine.drop('prefix')
    return _document(prefix, suffix, saved.info.bytes, tokens,
                     {'cold': cold, 'capsule': restored, 'restore': tail, 'suffix_0': bare,
                      'transformers': theirs}, _floor(engine, peak))


def _floor(engine: Engine, peak: dict[str, Any] | None) -> float | None:
    """Return the milliseconds of one pass over the weights, by the bandwidth of the device."""
    if peak is None:
        return None
    return device.weight_bytes(engine.model) / peak['bytes_per_second'] * 1e3


def _document(prefix: int, suffix: int, size: int, tokens: dict[str, set[int]],
              samples: dict[str, Samples], weights_ms: float | None) -> dict[str, Any]:
    cold, restored = samples['cold'].median, samples['capsule'].median
    document: dict[str, Any] = {
        'prefix': prefix, 'suffix': suffix, 'cold_ms': round(cold, 4),
        'capsule_ms': round(restored, 4), 'speedup': round(cold / restored, 2),
        'suffix_0_speedup': round(cold / samples['suffix_0'].median, 2), 'bytes': size,
        'same_first_token': tokens['cold'] == tokens['capsule'] and len(tokens['cold']) == 1,
        'transformers_ms': None, 'cold_over_transformers': None}
    for name, values in samples.items():
        if values.seconds:
            document.update(values.document(name))
    if samples['transformers'].seconds:
        document['cold_over_transformers'] = round(cold / samples['transformers'].median, 3)
        document['same_first_token_as_transformers'] = tokens['transformers'] == tokens['cold']
    if weights_ms is not None:
        document.update(_against_floor(prefix, samples, weights_ms, document))
    return document


#: how many times faster than our own cold prefill a 9B is to be, by length of the prefix
SPEEDUPS = {2048: 10, 4096: 20, 8192: 40, 16384: 80}


def _against_floor(prefix: int, samples: dict[str, Samples], weights_ms: float,
                   document: dict[str, Any]) -> dict[str, Any]:
    """Compare with a restore and one pass over the weights, below which no suffix can be."""
    restore, first = samples['restore'].median, samples['capsule'].median
    floor, bare = restore + weights_ms, samples['suffix_0'].median
    targets = [device.target(f'first token with a suffix, {step}, ms', first, factor * floor)
               for step, factor in (('first', 1.6), ('then', 1.3))] if document['suffix'] else []
    targets += [device.target(f'first token without a suffix, {step}, ms', bare,
                              restore + more / 1e3)
                for step, more in (('first', 60), ('then', 25))]
    if document['cold_over_transformers'] is not None:
        targets += [device.target(f'cold prefill over transformers, {step}',
                                  document['cold_over_transformers'], limit)
                    for step, limit in (('first', 1.0), ('then', 0.7))]
    return {'weights_ms': round(weights_ms, 4), 'floor_ms': round(floor, 4),
            'capsule_over_floor': round(first / floor, 3),
            'suffix_0_over_restore_us': round((bare - restore) * 1e3, 1), 'targets': targets,
            'speedup_wanted_of_a_9b': SPEEDUPS.get(prefix)}
