"""How far our logits are from those of `transformers`, and both from fp32."""

from __future__ import annotations

from contextlib import nullcontext
import gc
from typing import Any, TYPE_CHECKING

import torch

from flashrt_ros.cli import output
from flashrt_ros.cli.benchmarks import oracle as oracles
from flashrt_ros.cli.benchmarks.timing import random_ids
from flashrt_ros.sampling import LOGITS

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine

EXACT = 1e-3  #: of fp32 against fp32, relative to the largest logit
#: in bfloat16: our distance from fp32 over that of `transformers`, of all logits and of the worst
#: one, which is a noisy number; and what is near enough in any case
FACTORS, NEAR = (1.25, 2.0), 0.01


def rows(engine: Engine, lengths: list[int], steps: int,
         seed: int) -> tuple[list[dict[str, Any]], str]:
    """
    Compare the logits after a prompt and after each of some tokens folded one by one.

    All fold the same ids: our greedy tokens. Distances are the largest of a logit, relative to the
    largest logit, and as norms, relative to the norm of all. The judge is `transformers` in fp32
    with its plain torch forms, on the weights as they are here; an engine in fp32 is held against
    it alone.
    """
    vocab = engine.model.config.vocab_size
    exact = engine.model.dtype is torch.float32
    texts = {length: random_ids(vocab, length, seed) for length in lengths}
    ours: dict[int, list[torch.Tensor]] = {}
    tokens: dict[int, list[int]] = {}
    for length, text in texts.items():
        output.log(f'{length} tokens: ours')
        engine.reset()
        engine.append(token_ids=text)
        ours[length], tokens[length] = [engine.arena[LOGITS].clone()], []
        for _ in range(steps):
            tokens[length].append(int(ours[length][-1].argmax()))
            engine.append(token_ids=tokens[length][-1:])
            ours[length].append(engine.arena[LOGITS].clone())
    theirs, sentence = (None, '') if exact else _logits(engine, engine.model.dtype, texts, tokens)
    if theirs is None and not exact:
        return [], sentence
    judge, judged = _logits(engine, torch.float32, texts, tokens)
    if judge is None:
        return [], judged
    found = []
    for length in lengths:
        for step in range(steps + 1):
            found.append(_row(length, step, ours[length][step], judge[length][step],
                              theirs[length][step] if theirs else None))
    return found, '; '.join(filter(None, (sentence, f'fp32: {judged}')))


def _logits(engine: Engine, dtype: torch.dtype, texts: dict[int, list[int]],
            tokens: dict[int, list[int]]) -> tuple[dict[int, list[torch.Tensor]] | None, str]:
    oracle, sentence = oracles.load(engine, dtype)
    if oracle is None:
        return None, sentence
    plain = oracles.reference_kernels(oracle) if dtype is torch.float32 else nullcontext()
    found: dict[int, list[torch.Tensor]] = {}
    with plain:
        for length, text in texts.items():
            output.log(f'{length} tokens: transformers in {dtype}')
            found[length] = [oracle.logits(text).clone()]
            found[length] += [oracle.logits([token], fresh=False).clone()
                              for token in tokens[length]]
    del oracle, plain
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found, sentence


def _row(length: int, step: int, ours: torch.Tensor, judge: torch.Tensor,
         theirs: torch.Tensor | None) -> dict[str, Any]:
    def off(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
        return (float(((a - b).norm() / judge.norm()).item()),
                float(((a - b).abs().max() / judge.abs().max()).item()))

    row: dict[str, Any] = {'length': length, 'step': step,
                           'same_greedy_token': int(ours.argmax()) == int(judge.argmax())}
    found = off(ours, judge)
    row['ours_to_fp32_norm'], row['ours_to_fp32'] = found
    if theirs is None:
        row.update(transformers_to_fp32=None, ours_to_transformers=None)
        return {**row, 'passed': max(found) < EXACT}
    usual = off(theirs, judge)
    row['transformers_to_fp32_norm'], row['transformers_to_fp32'] = usual
    row['ours_to_transformers_norm'], row['ours_to_transformers'] = off(ours, theirs)
    return {**row, 'passed': all(a <= max(NEAR, factor * b)
                                 for a, b, factor in zip(found, usual, FACTORS, strict=True))}
