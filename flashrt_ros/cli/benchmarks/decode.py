"""Tokens a second, beside `transformers` with its cache."""

from __future__ import annotations

import time
from typing import Any, TYPE_CHECKING

from flashrt_ros.cli import output
from flashrt_ros.cli.benchmarks.oracle import Oracle
from flashrt_ros.cli.benchmarks.timing import random_ids, Samples

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine


def row(engine: Engine, oracle: Oracle | None, position: int, tokens: int, repeats: int,
        seed: int) -> dict[str, Any]:
    """
    Decode from one position, in alternating blocks of ``tokens`` tokens, greedily.

    Both sides start from the same folded prompt in every block: ours from a capsule, theirs from
    a prefill, neither of which is counted. Ours is the whole way through the engine (sampler,
    detokenizer, stop test, callback a token); theirs is a call of the model and an argmax.
    """
    from flashrt_ros.engine import GenerateRequest
    text = random_ids(engine.model.config.vocab_size, position, seed)
    engine.reset()
    engine.append(token_ids=text)
    engine.save(name='decode', overwrite=True)
    ours, theirs = Samples(), Samples()
    agreeing = []
    for index in range(repeats + 1):  # the first block of each warms up and is not counted
        output.log(f'position {position}: block {index} of {repeats}')
        engine.restore(capsule='decode')
        stamps: list[float] = []
        stream: list[int] = []

        def stamp(piece: Any, stamps: list = stamps, stream: list = stream) -> None:
            if piece.token_ids:
                stamps.append(time.perf_counter())
                stream.extend(piece.token_ids)

        while len(stamps) < tokens + 1:  # an end of text is continued
            engine.generate(GenerateRequest(max_tokens=tokens + 1 - len(stamps),
                                            temperature=0.0), stamp)
        if index:
            for a, b in zip(stamps, stamps[1:]):
                ours.add(b - a)
        if oracle is not None:
            stream_theirs, last = [oracle.prefill(text)], time.perf_counter()
            for _ in range(tokens):
                stream_theirs.append(oracle.step())
                now = time.perf_counter()
                if index:
                    theirs.add(now - last)
                last = now
            agreeing.append(stream_theirs == stream)
    engine.drop('decode')
    document = {'position': position, 'tokens_per_second': round(1e3 / ours.median, 2),
                **ours.document('token'), 'transformers_tokens_per_second': None, 'ratio': None}
    if theirs.seconds:
        document.update({
            'transformers_tokens_per_second': round(1e3 / theirs.median, 2),
            **theirs.document('transformers_token'),
            'ratio': round(theirs.median / ours.median, 3),
            'same_tokens_as_transformers': all(agreeing)})
    return document
