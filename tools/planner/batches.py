"""Packed training batches, made in worker processes; batch i depends on (seed, i) alone."""

from __future__ import annotations

import multiprocessing as mp
import random

from corpus import conversation, REFUSED, sample
import numpy as np
from tokenizer import encode
from tokenizers import Tokenizer

PAD = 0
CHUNK = 32  # as in modeling.py; this module stays free of torch


def pack(conversations, tokenizer, size: int, other_weight: float = 0.0, fill: bool = True) -> dict:
    """Lay conversations end to end; `weight[i]` is the loss weight of predicting token i + 1.

    Each conversation starts on the grid of `CHUNK` tokens that the delta rule is computed on.
    With `fill` the rest of the batch is one more sequence of padding that weighs nothing.
    """
    ids, weight, lengths = [], [], []
    for item in conversations:
        tokens, mine = encode(tokenizer, item.messages())
        if ids and len(ids) + len(tokens) + CHUNK > size:
            break
        tail = -len(tokens) % CHUNK
        ids += tokens + [PAD] * tail
        weight += [1.0 if m else other_weight for m in mine[1:]] + [0.0] * (1 + tail)
        lengths.append(len(tokens) + tail)
    if fill and len(ids) < size:
        lengths.append(size - len(ids))
        weight += [0.0] * lengths[-1]
        ids += [PAD] * lengths[-1]
    pos = np.concatenate([np.arange(n) for n in lengths])
    return {
        'ids': np.array(ids, np.int64),
        'weight': np.array(weight, np.float32),
        'pos': pos.astype(np.int64),
        'cu': np.cumsum([0] + lengths).astype(np.int32),
        'longest': max(lengths),
    }


def train_batch(
    seed: int, index: int, total: int, size: int, tokenizer, begin: float = 0.0
) -> dict:
    """
    Return batch `index` of `total`; scenes grow and the loss on other text fades with progress.

    `begin` is the progress to start from: 1 for a model that is trained already.
    """
    progress = begin + (1 - begin) * index / total
    rng = random.Random(f'{seed}:{index}')
    other = max(0.0, 0.15 * (1 - progress / 0.4))
    return pack(iter(lambda: sample(rng, 'train', progress), None), tokenizer, size, other)


def _work(queue, worker, workers, seed, total, size, tokenizer_path, begin):
    tokenizer = Tokenizer.from_file(tokenizer_path)
    for index in range(worker, total, workers):
        queue.put(train_batch(seed, index, total, size, tokenizer, begin))


class Feed:
    """Yield the batches in order while worker processes stay a few ahead."""

    def __init__(
        self,
        tokenizer_path: str,
        seed: int,
        total: int,
        size: int,
        workers: int,
        begin: float = 0.0,
    ):
        context = mp.get_context('fork')
        self.queues = [context.Queue(maxsize=6) for _ in range(workers)]
        self.total = total
        self.processes = [
            context.Process(
                target=_work,
                daemon=True,
                args=(q, i, workers, seed, total, size, tokenizer_path, begin),
            )
            for i, q in enumerate(self.queues)
        ]
        for process in self.processes:
            process.start()

    def __iter__(self):
        for index in range(self.total):
            yield self.queues[index % len(self.queues)].get()

    def close(self):
        for process in self.processes:
            process.terminate()


EVALUATIONS = {
    # name: (conversations, size, turns, wanted kinds of the last turn; None: any)
    'instruction': (1200, None, 1, ('ok', *REFUSED)),
    'multi_turn': (300, None, 3, None),
    'refusal': (400, None, 1, REFUSED),
    'question': (300, None, 1, ('question',)),
    'long_scene': (200, 'huge', 2, None),
}


def heldout_sets(seed: int = 1000, scale: float = 1.0) -> dict[str, list]:
    """Return the evaluation conversations; every turn touches a held-out composition."""
    out = {}
    for name, (count, size, turns, kinds) in EVALUATIONS.items():
        rng = random.Random(f'{seed}:{name}')
        items = []
        while len(items) < max(1, int(count * scale)):
            chosen = size or rng.choices(('small', 'medium', 'large'), weights=(45, 35, 20))[0]
            item = conversation(rng, 'heldout', chosen, turns)
            if kinds is None or item.turns[-1].kind in kinds:
                items.append(item)
        out[name] = items
    return out
