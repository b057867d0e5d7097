"""`transformers` on the same weights, in the same process, on the same threads."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING
import warnings

import torch

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine


class Oracle:
    """A Hugging Face model with its own cache, driven the way its users drive it."""

    def __init__(self, model: Any) -> None:
        warnings.filterwarnings('ignore', category=FutureWarning, module='torch.nn')
        self.model = model.eval()
        self.cache: Any = None
        self.token: torch.Tensor | None = None

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> int:
        """Fold ids from nothing; return the greedy next token."""
        answer = self.model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        self.cache = answer.past_key_values
        return self._choose(answer)

    @torch.inference_mode()
    def step(self) -> int:
        """Fold the chosen token; return the next one."""
        answer = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True)
        return self._choose(answer)

    def _choose(self, answer: Any) -> int:
        self.token = answer.logits[:, -1].argmax(-1, keepdim=True)
        return int(self.token.item())


def load(engine: Engine) -> tuple[Oracle | None, str]:
    """
    Build the same model in `transformers`.

    :return: the oracle and a sentence about it; None where it cannot be compared, and why.
    """
    try:
        import transformers
    except ImportError:
        return None, 'not compared: transformers is not installed (pip install transformers)'
    transformers.logging.set_verbosity_error()
    ours = engine.model
    try:
        if ours.source_dir is not None:
            theirs = transformers.AutoModelForCausalLM.from_pretrained(
                ours.source_dir, dtype=ours.dtype, local_files_only=True)
        else:
            theirs = _rebuild(transformers, ours)
    except Exception as error:  # whatever that library raises for a model it does not take
        return None, f'not compared: transformers refuses the model ({type(error).__name__}: ' \
                     f'{str(error)[:200]})'
    return Oracle(theirs), (f'transformers {transformers.__version__}, '
                            f'{type(theirs).__name__}, {ours.dtype}, same weights')


def _rebuild(transformers: Any, ours: Any) -> Any:
    """Make a model of random weights once more in `transformers`, and copy the weights over."""
    preset = ours.spec.removeprefix('random:').partition('?')[0]
    config = transformers.Qwen3_5TextConfig(**ours.presets[preset])
    theirs = transformers.Qwen3_5ForCausalLM(config).to(ours.dtype)
    missing, unexpected = theirs.load_state_dict(dict(ours.weights()), strict=False)
    tied = {'lm_head.weight'} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f'names differ: missing {missing[:3]}, unexpected {unexpected[:3]}')
    theirs.tie_weights()
    return theirs
