"""Write a model directory as Hugging Face tools expect it.

python tools/planner/export.py --random 1 --out /tmp/planner     # untrained, to code against
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from modeling import new_model, planner_config
from safetensors.torch import load_file, save_file
import torch


def bf16_state(model) -> dict[str, torch.Tensor]:
    """Return what is stored: every weight rounded to bf16, the tied head left out."""
    return {
        name: p.detach().to(torch.bfloat16).cpu().contiguous()
        for name, p in model.named_parameters()
        if name != 'lm_head.weight'
    }


def write_config(config, out: Path) -> None:
    """Write config.json and generation_config.json (two tokens end a generation)."""
    fields = config.to_dict()
    fields.update(architectures=['Qwen3_5ForCausalLM'], dtype='bfloat16')
    for name in (
        'transformers_version',
        '_name_or_path',
        'chunk_size_feed_forward',
        'id2label',
        'label2id',
        'output_attentions',
        'output_hidden_states',
        'problem_type',
        'return_dict',
        'is_encoder_decoder',
    ):
        fields.pop(name, None)
    (out / 'config.json').write_text(json.dumps(fields, indent=2, sort_keys=True) + '\n')
    (out / 'generation_config.json').write_text(
        json.dumps(
            {'bos_token_id': None, 'do_sample': False, 'eos_token_id': [2, 0], 'pad_token_id': 0},
            indent=2,
        )
        + '\n'
    )


def write_model(model, out: Path) -> None:
    """Write config and weights; the tokenizer's files are `tokenizer.py`'s."""
    out.mkdir(parents=True, exist_ok=True)
    write_config(model.config, out)
    save_file(bf16_state(model), str(out / 'model.safetensors'), metadata={'format': 'pt'})
    (out / 'model.safetensors').chmod(0o644)


def load_rounded(model, path: Path):
    """Load stored weights into an fp32 model: bf16 to fp32 is exact."""
    state = {n: t.float() for n, t in load_file(str(path)).items()}
    model.load_state_dict(state, strict=False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument('--random', type=int, default=1, help='seed of the untrained weights')
    parser.add_argument('--out', type=Path, required=True)
    args = parser.parse_args()
    write_model(new_model(planner_config(), args.random), args.out)


if __name__ == '__main__':
    main()
