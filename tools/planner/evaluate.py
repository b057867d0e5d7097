"""
Exact match of greedy answers on compositions held out of training; prints JSON.

    python tools/planner/evaluate.py --out tools/planner/RESULTS.json

Runs on a CPU through this package's engine, or through transformers; any other runtime is measured
by passing `evaluate` a function that maps the ids of a prompt to the ids of its greedy answer. A
conversation goes on with the answers the model itself gave. An answer counts only when every
character of it is right and it ended by itself.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
import json
from pathlib import Path
import sys
import time

from batches import heldout_sets
from corpus import Conversation, Turn
from tasks import held_out
from tokenizer import TURN_END, TURN_START
from tokenizers import Tokenizer

MAX_NEW_TOKENS = 200


class GreedyEngine:
    """Greedy decoding with this package's engine; a prompt that only grew is appended to."""

    def __init__(self, path: Path, threads: int):
        from flashrt_ros.engine import Engine, EngineConfig, GenerateRequest

        self.request = GenerateRequest
        self.engine = Engine(
            EngineConfig(model=str(path), context=8192, pool_bytes=64 << 20, threads=threads)
        )
        self.seen: list[int] = []

    def __call__(self, prompt: list[int]) -> list[int]:
        if prompt[: len(self.seen)] != self.seen:
            self.engine.reset()
            self.seen = []
        answer = list(
            self.engine.generate(
                self.request(token_ids=prompt[len(self.seen) :], max_tokens=MAX_NEW_TOKENS)
            ).token_ids
        )
        self.seen = prompt + answer
        return answer


class GreedyTransformers:
    """
    Greedy decoding with transformers' cache, kept from turn to turn while the prompt only grows.
    """

    def __init__(self, path: Path):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.stops = set(self.model.generation_config.eos_token_id)
        self.seen: list[int] = []
        self.cache = None

    def __call__(self, prompt: list[int]) -> list[int]:
        if (
            self.cache is None
            or prompt[: len(self.seen)] != self.seen
            or len(prompt) <= len(self.seen)
        ):
            self.seen, self.cache = [], None
        new, answer = prompt[len(self.seen) :], []
        with self.torch.no_grad():
            while len(answer) < MAX_NEW_TOKENS:
                out = self.model(
                    self.torch.tensor([new]),
                    past_key_values=self.cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                self.cache = out.past_key_values
                self.seen = self.seen + new
                token = int(out.logits[0, -1].argmax())
                answer.append(token)
                if token in self.stops:
                    break
                new = [token]
        return answer


def evaluate(
    reply: Callable[[list[int]], list[int]],
    tokenizer: Tokenizer,
    sets: dict,
    wrong: Callable[[dict], None] | None = None,
) -> dict:
    """Return shares of exact answers by set and by kind of turn."""
    end = tokenizer.token_to_id(TURN_END)
    kinds: dict = defaultdict(lambda: [0, 0])
    report: dict = {'sets': {}}
    for name, items in sets.items():
        turns = right = whole = novel = 0
        for item in items:
            prompt = encode_text(tokenizer, f'{TURN_START}system\n{item.system}{TURN_END}\n')
            perfect = True
            for turn in item.turns:
                prompt += encode_text(
                    tokenizer, f'{TURN_START}user\n{turn.user}{TURN_END}\n{TURN_START}assistant\n'
                )
                ids = reply(prompt)
                said = tokenizer.decode(ids[:-1] if ids[-1] == end else ids)
                good = ids[-1] == end and said == turn.answer
                if not good and wrong is not None:
                    wrong(
                        {
                            'set': name,
                            'kind': turn.kind,
                            'scene': item.system,
                            'user': turn.user,
                            'wanted': turn.answer,
                            'said': said,
                        }
                    )
                prompt += ids + ([] if ids[-1] == end else [end]) + encode_text(tokenizer, '\n')
                turns, right, perfect = turns + 1, right + good, perfect and good
                novel += any(held_out(k) for k in turn.keys)
                kinds[turn.kind][0] += good
                kinds[turn.kind][1] += 1
            whole += perfect
        report['sets'][name] = {
            'conversations': len(items),
            'turns': turns,
            'turns_with_held_out_composition': novel,
            'exact': round(right / turns, 4),
            'conversations_exact': round(whole / len(items), 4),
        }
    report['by_kind'] = {
        k: {'turns': n, 'exact': round(good / n, 4)} for k, (good, n) in sorted(kinds.items())
    }
    refused = [v for k, v in kinds.items() if k not in ('ok', 'question')]
    asked = sum(n for _, n in refused)
    report['refusals'] = {
        'turns': asked,
        'exact': round(sum(g for g, _ in refused) / max(1, asked), 4),
    }
    return report


def scene_sets(path: Path) -> dict:
    """Return the example scenes as one more evaluation set."""
    items = []
    for file in sorted(path.glob('*.json')):
        data = json.loads(file.read_text())
        items.append(
            Conversation(
                data['scene'],
                [Turn(i['user'], i['answer'], i['kind'], [], 1) for i in data['instructions']],
                file.stem,
            )
        )
    return {'scenes': items}


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text).ids


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument('--model', type=Path, default=Path('flashrt_ros/assets/planner'))
    parser.add_argument('--seed', type=int, default=2000)
    parser.add_argument('--scale', type=float, default=1.0, help='share of each set to run')
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--runtime', choices=('engine', 'transformers'), default='engine')
    parser.add_argument('--scenes', action='store_true', help='only the example scenes')
    parser.add_argument('--show-wrong', type=int, default=0)
    parser.add_argument('--out', type=Path, help='also write the report here')
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    shown: list = []

    def wrong(case):
        if len(shown) < args.show_wrong:
            shown.append(case)
            print(json.dumps(case, ensure_ascii=False, indent=1), file=sys.stderr)

    started = time.time()
    tokenizer = Tokenizer.from_file(str(args.model / 'tokenizer.json'))
    sets = scene_sets(args.model / 'scenes') if args.scenes else heldout_sets(args.seed, args.scale)
    reply = (
        GreedyEngine(args.model, args.threads)
        if args.runtime == 'engine'
        else GreedyTransformers(args.model)
    )
    report = evaluate(reply, tokenizer, sets, wrong)
    report.update(
        command='python tools/planner/evaluate.py ' + ' '.join(sys.argv[1:]),
        seed=args.seed,
        seconds=round(time.time() - started, 1),
        bytes=sum(f.stat().st_size for f in args.model.rglob('*') if f.is_file()),
    )
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + '\n')


if __name__ == '__main__':
    main()
