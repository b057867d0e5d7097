"""
Train the byte-level BPE tokenizer and write it, with the chat template, as a model directory does.

    python tools/planner/tokenizer.py --out build/planner

All 256 bytes are in the vocabulary, so any UTF-8 text can be encoded; a newline is always a token
of its own, so no merge crosses a role header or the end of an answer line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import random

from corpus import sample
from tokenizers import decoders, models, pre_tokenizers, Regex, Tokenizer, trainers
import words

END_OF_TEXT, TURN_START, TURN_END = '<|endoftext|>', '<|im_start|>', '<|im_end|>'
VOCAB_SIZE = 1536
# Runs of punctuation may hold single spaces ('": "' is one piece): an answer takes fewer steps.
PIECES = (
    r'\n|[ _]?[\p{L}\p{M}]+|[ _]?\p{N}| ?[^\s\p{L}\p{M}\p{N}_]+(?: [^\s\p{L}\p{M}\p{N}_]+)*'
    r'|_|[^\S\n]+(?!\S)|[^\S\n]+'
)
CHAT_TEMPLATE = (
    '{%- for message in messages %}'
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    '{%- endfor %}'
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(seed: int = 1, conversations: int = 6000) -> Tokenizer:
    """Return a tokenizer trained on text of the training split."""
    rng = random.Random(seed)
    texts = []
    for _ in range(conversations):
        for message in sample(rng, 'train').messages():
            texts.append(message['role'] + '\n' + message['content'])
    # The closed vocabulary once more, so that each word is whole both after a space and without
    # one.
    named = words.TYPES + words.PLACES + words.NAMES
    texts += [f'"{word}" {word}\n' for word in named] * 200
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), 'isolated'),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / 'tokenizer.json'))
    (out / 'tokenizer_config.json').write_text(
        json.dumps(
            {
                'tokenizer_class': 'PreTrainedTokenizerFast',
                'add_prefix_space': False,
                'bos_token': None,
                'eos_token': TURN_END,
                'pad_token': END_OF_TEXT,
                'unk_token': None,
                'additional_special_tokens': [TURN_START, TURN_END],
                'model_max_length': 65536,
                'clean_up_tokenization_spaces': False,
            },
            indent=2,
        )
        + '\n'
    )
    (out / 'chat_template.jinja').write_text(CHAT_TEMPLATE)


def encode(tokenizer: Tokenizer, messages: list[dict]) -> tuple[list[int], list[bool]]:
    """Return ids of the rendered chat and, for each, whether the model has to produce it.
    Produced are the answers and the <|im_end|> that closes them. Pieces are encoded one by one;
    that
    equals encoding the whole text, because every border is a special token or a newline.
    """
    ids: list[int] = []
    mine: list[bool] = []
    start, end = tokenizer.token_to_id(TURN_START), tokenizer.token_to_id(TURN_END)
    newline = tokenizer.token_to_id('Ċ')
    for message in messages:
        head = [start] + tokenizer.encode(message['role'] + '\n').ids
        body = tokenizer.encode(message['content']).ids + [end]
        ids += head + body + [newline]
        mine += [False] * len(head) + [message['role'] == 'assistant'] * len(body) + [False]
    return ids, mine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument('--out', type=Path, required=True)
    parser.add_argument('--seed', type=int, default=1)
    args = parser.parse_args()
    write_tokenizer(train_tokenizer(args.seed), args.out)


if __name__ == '__main__':
    main()
