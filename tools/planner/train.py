"""Train the planner.

    python tools/planner/train.py --tokenizer flashrt_ros/assets/planner --out build/planner \\
        --steps 6000 --seconds 520

Needs one GPU; on a CPU it runs too (`--tiny --steps 20`), to check the code.
Hidden matrices are trained by Muon, everything else by AdamW; both rates warm up and fall on a
cosine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
import time

os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')

from batches import Feed, heldout_sets, pack
from export import bf16_state, write_model
from modeling import (
    compiled_functions,
    FUNCTIONS,
    linear,
    new_model,
    packed_hidden,
    packed_logits,
    planner_config,
)
from optimiser import Muon
from tokenizers import Tokenizer
import torch
import torch.nn.functional as F


def to_device(batch: dict, device) -> dict:
    return {
        k: torch.from_numpy(v).to(device, non_blocking=True) if not isinstance(v, int) else v
        for k, v in batch.items()
    }


def weighted_loss(hidden, embedding, ids, weight, dtype):
    """Return the weighted mean loss and the share of weight-1 tokens that are predicted exactly."""
    logits = linear(hidden, embedding, dtype).float()
    target = torch.cat([ids[1:], ids[:1]])
    loss = F.cross_entropy(logits, target, reduction='none')
    mine = weight == 1
    right = ((logits.argmax(-1) == target) & mine).sum() / mine.sum()
    return (loss * weight).sum() / weight.sum(), right


@torch.no_grad()
def teacher_forced(model, tokenizer, sets, fns, dtype, device, size=32768) -> dict:
    """Return exact-match shares: a turn is right when every argmax of its answer is right.

    With greedy decoding that is the same as generating it, up to ties in rounding.
    """
    report = {}
    for name, items in sets.items():
        turns = right = whole = 0
        queue = list(items)
        while queue:
            batch = pack(queue, tokenizer, size, fill=False)
            done = len(batch['cu']) - 1
            batch = to_device(batch, device)
            hit = (
                packed_logits(
                    model, batch['ids'], batch['cu'], batch['pos'], batch['longest'], fns, dtype
                )[:-1].argmax(-1)
                == batch['ids'][1:]
            )
            mine = batch['weight'][:-1] == 1
            bad = (mine & ~hit).cpu()
            mine = mine.cpu()
            cu = batch['cu'].tolist()
            for index in range(done):
                a, b = cu[index], min(cu[index + 1], len(mine))
                edges = mine[a:b].int().diff(prepend=torch.zeros(1, dtype=torch.int))
                starts = (edges == 1).nonzero()[:, 0].tolist()
                ends = (edges == -1).nonzero()[:, 0].tolist() + [b - a]
                wrong = [bool(bad[a + s : a + e].any()) for s, e in zip(starts, ends)]
                turns, right = turns + len(wrong), right + wrong.count(False)
                whole += not any(wrong)
            queue = queue[done:]
        report[name] = {
            'turns': turns,
            'exact': right / turns,
            'conversations': len(items),
            'conversations_exact': whole / len(items),
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument('--tokenizer', type=Path, required=True, help='directory of tokenizer.json')
    parser.add_argument('--out', type=Path, required=True)
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--steps', type=int, default=6000)
    parser.add_argument('--seconds', type=float, default=0, help='shorten the schedule to fit')
    parser.add_argument('--tokens', type=int, default=65536, help='tokens a step')
    parser.add_argument('--workers', type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument('--muon-rate', type=float, default=0.02)
    parser.add_argument('--adam-rate', type=float, default=3e-3)
    parser.add_argument('--init', type=Path, help='start from these weights')
    parser.add_argument(
        '--full-every', type=int, default=4, help='each n-th layer is full attention'
    )
    parser.add_argument('--tiny', action='store_true', help='a small model, to test this script')
    parser.add_argument('--eval-scale', type=float, default=1.0)
    args = parser.parse_args()
    started = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    path = str(args.tokenizer / 'tokenizer.json')
    feed = Feed(path, args.seed, args.steps, args.tokens, args.workers, 1.0 if args.init else 0.0)
    tokenizer = Tokenizer.from_file(path)
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    dtype = torch.bfloat16 if device.type == 'cuda' else torch.float32
    torch.set_float32_matmul_precision('high')
    shape = {'full_attention_interval': args.full_every}
    if args.tiny:
        shape.update(hidden_size=64, intermediate_size=96, num_hidden_layers=4)
    model = new_model(planner_config(tokenizer.get_vocab_size(), **shape), args.seed)
    if args.init:
        from export import load_rounded

        load_rounded(model, args.init)
    model = model.to(device)
    fns, loss_fn = FUNCTIONS, weighted_loss
    if device.type == 'cuda':
        fns, loss_fn = compiled_functions(), torch.compile(weighted_loss, dynamic=False)
    matrices = [
        p
        for n, p in model.named_parameters()
        if p.ndim == 2 and 'embed' not in n and 'in_proj_a' not in n and 'in_proj_b' not in n
    ]
    ids_ = {id(p) for p in matrices}
    muon = Muon(matrices, args.muon_rate)
    adam = torch.optim.AdamW(
        [p for p in model.parameters() if id(p) not in ids_],
        lr=args.adam_rate,
        betas=(0.9, 0.98),
        weight_decay=0.0,
        fused=device.type == 'cuda',
    )
    total, tokens, log, first = args.steps, 0, [], None
    embedding = model.get_input_embeddings().weight
    waited, batches = 0.0, iter(feed)
    for step in range(args.steps):
        if step >= total:
            break
        asked = time.time()
        batch = next(batches)
        waited += time.time() - asked
        batch = to_device(batch, device)
        scale = min(1.0, (step + 1) / 150) * (0.5 + 0.5 * math.cos(math.pi * min(1, step / total)))
        for optimiser, rate in ((muon, args.muon_rate), (adam, args.adam_rate)):
            for group in optimiser.param_groups:
                group['lr'] = rate * scale
        hidden = packed_hidden(
            model, batch['ids'], batch['cu'], batch['pos'], batch['longest'], fns, dtype
        )
        loss, right = loss_fn(hidden, embedding, batch['ids'], batch['weight'], dtype)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adam.step()
        muon.zero_grad()
        adam.zero_grad()
        tokens += args.tokens
        if step == 40:
            if device.type == 'cuda':
                torch.cuda.synchronize()
            first = time.time()
        if step == 160 and args.seconds:
            if device.type == 'cuda':
                torch.cuda.synchronize()
            rate = (time.time() - first) / 120
            total = min(total, int(step + (args.seconds - (time.time() - started)) / rate))
            print(f'{rate * 1e3:.1f} ms a step; {total} steps', flush=True)
        if step % 100 == 0 or step == total - 1:
            log.append(
                {
                    'step': step,
                    'seconds': round(time.time() - started, 1),
                    'waited': round(waited, 1),
                    'loss': round(loss.item(), 4),
                    'token_accuracy': round(right.item(), 5),
                }
            )
            print(json.dumps(log[-1]), flush=True)
        if step and step % max(1, total // 4) == 0:
            write_model(model, args.out)
    feed.close()
    write_model(model, args.out)
    trained = time.time() - started
    with torch.no_grad():
        state = bf16_state(model)
        for name, p in model.named_parameters():
            if name in state:
                p.copy_(state[name])
    report = {
        'seed': args.seed,
        'steps': total,
        'tokens': tokens,
        'seconds': round(trained, 1),
        'tokens_per_step': args.tokens,
        'device': torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu',
        'log': log,
        'heldout_teacher_forced': teacher_forced(
            model, tokenizer, heldout_sets(scale=args.eval_scale), FUNCTIONS, dtype, device
        ),
    }
    (args.out / 'training.json').write_text(json.dumps(report, indent=1) + '\n')
    print(json.dumps(report['heldout_teacher_forced'], indent=1))


if __name__ == '__main__':
    main()
