"""Time to the first token: cold, from a capsule, and in `transformers`."""

from __future__ import annotations

import time
from typing import Any, TYPE_CHECKING

from flashrt_ros.cli import output
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
        seed: int) -> dict[str, Any]:
    """
    Measure one prefix length.

    In each round: one cold prefill of prefix + suffix in the engine, some restores of the prefix
    followed by an append of the suffix and a sampled token, the same without a suffix, and one
    cold prefill in `transformers`. Before each the arena holds another text and the caches
    something else, so a restore copies everything.
    """
    from flashrt_ros.engine import GenerateRequest
    vocab = engine.model.config.vocab_size
    text = random_ids(vocab, prefix + suffix, seed)
    other = random_ids(vocab, 100, seed + 1)
    cold, restored, bare, theirs, tail = Samples(), Samples(), Samples(), Samples(), Samples()
    tokens: dict[str, set[int]] = {'cold': set(), 'capsule': set(), 'transformers': set()}
    cache = Cache()
    engine.reset()
    engine.append(token_ids=text[:prefix])
    saved = engine.save(name='prefix', overwrite=True)

    def disturb() -> None:
        engine.reset()
        engine.append(token_ids=other)
        cache.evict()

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
            tail.time(lambda: engine.restore(capsule='prefix'))
        if oracle is not None:
            disturb()
            tokens['transformers'].add(theirs.time(lambda: oracle.prefill(text)))
    engine.drop('prefix')
    return _document(prefix, suffix, saved.info.bytes, tokens,
                     {'cold': cold, 'capsule': restored, 'restore': tail, 'suffix_0': bare,
                      'transformers': theirs})


def _document(prefix: int, suffix: int, size: int, tokens: dict[str, set[int]],
              samples: dict[str, Samples]) -> dict[str, Any]:
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
    return document
