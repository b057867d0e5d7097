"""`transformers` on the same weights, in the same process, on the same threads or device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import importlib.metadata
import importlib.util
import inspect
import sys
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
        self.device = next(model.parameters()).device
        self.cache: Any = None
        self.token: torch.Tensor | None = None

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> int:
        """Fold ids from nothing; return the greedy next token."""
        self.cache = None  # before the next one takes as much memory
        answer = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=True,
                            logits_to_keep=1)
        self.cache = answer.past_key_values
        return self._choose(answer)

    @torch.inference_mode()
    def step(self) -> int:
        """Fold the chosen token; return the next one."""
        answer = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True)
        return self._choose(answer)

    @torch.inference_mode()
    def logits(self, ids: list[int], fresh: bool = True) -> torch.Tensor:
        """Fold ids, from nothing or on; return the fp32 logits behind the last."""
        answer = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=True,
                            logits_to_keep=1, past_key_values=None if fresh else self.cache)
        self.cache = answer.past_key_values
        return answer.logits[0, -1].float()

    def _choose(self, answer: Any) -> int:
        self.token = answer.logits[:, -1].argmax(-1, keepdim=True)
        return int(self.token.item())


class Compiled(Oracle):
    """
    The same model with a static cache, its step compiled: the fast way that its users have.

    :param rows: of the cache; it is attended to whole, whatever the position.
    """

    def __init__(self, model: Any, rows: int) -> None:
        super().__init__(model)
        from transformers import StaticCache
        self.cache = StaticCache(config=model.config, max_cache_len=rows)
        self.rows = rows
        self._step = torch.compile(model.__call__, mode='reduce-overhead')

    @torch.no_grad()  # inference mode and captured graphs do not go together
    def prefill(self, ids: list[int]) -> int:
        """Fold ids into the static cache, not compiled; return the greedy next token."""
        self.cache.reset()
        return self._choose(self.model(
            input_ids=torch.tensor([ids], device=self.device), past_key_values=self.cache,
            use_cache=True, logits_to_keep=1))

    @torch.no_grad()
    def step(self) -> int:
        """Fold the chosen token by the compiled step; return the next one."""
        torch.compiler.cudagraph_mark_step_begin()
        return self._choose(self._step(
            input_ids=self.token, past_key_values=self.cache, use_cache=True))

    @staticmethod
    def skipped() -> int:
        """Count the compiled pieces that run without a captured graph, for what it is worth."""
        from torch._dynamo.utils import counters
        return int(counters['inductor'].get('cudagraph_skips', 0))


def load(engine: Engine, dtype: torch.dtype | None = None) -> tuple[Oracle | None, str]:
    """
    Build the same model in `transformers`.

    On a CUDA device it shares the weights of the engine, so that both fit.

    :param dtype: another type than the engine's: a model of its own.
    :return: the oracle and a sentence about it; None where it cannot be compared, and why.
    """
    try:
        import transformers
    except ImportError:
        return None, 'not compared: transformers is not installed (pip install transformers)'
    transformers.logging.set_verbosity_error()
    ours = engine.model
    try:
        if ours.device.type == 'cuda':
            theirs = _on_device(transformers, ours, dtype or ours.dtype)
        elif ours.source_dir is not None:
            theirs = transformers.AutoModelForCausalLM.from_pretrained(
                ours.source_dir, dtype=dtype or ours.dtype, local_files_only=True)
        else:
            theirs = _rebuild(transformers, ours, dtype or ours.dtype)
    except Exception as error:  # whatever that library raises for a model it does not take
        return None, f'not compared: transformers refuses the model ({type(error).__name__}: ' \
                     f'{str(error)[:200]})'
    return Oracle(theirs), (f'transformers {transformers.__version__}, '
                            f'{type(theirs).__name__}, {dtype or ours.dtype}, same weights'
                            + (f', {fast_kernels()}' if ours.device.type == 'cuda' else ''))


def fast_kernels() -> str:
    """Say whether the kernels are there that `transformers` wants for linear attention."""
    if importlib.util.find_spec('fla') is None:
        return 'without fla-core (slow reference kernels)'
    for package in ('fla-core', 'flash-linear-attention'):
        try:
            return f'with {package} {importlib.metadata.version(package)}'
        except importlib.metadata.PackageNotFoundError:
            continue
    return 'with fla of an unknown version'


def _class(transformers: Any, ours: Any) -> Any:
    return getattr(transformers, ours.published)


def _config(transformers: Any, ours: Any) -> Any:
    if ours.source_dir is not None:
        config = transformers.AutoConfig.from_pretrained(ours.source_dir, local_files_only=True)
        return config.get_text_config(decoder=True)
    preset = ours.spec.removeprefix('random:').partition('?')[0]
    return _class(transformers, ours).config_class(**ours.presets[preset])


def _check_names(config: Any, missing: list[str], unexpected: list[str]) -> None:
    tied = {'lm_head.weight'} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f'names differ: missing {missing[:3]}, unexpected {unexpected[:3]}')


def _rebuild(transformers: Any, ours: Any, dtype: torch.dtype) -> Any:
    """Make a model of random weights once more in `transformers`, and copy the weights over."""
    config = _config(transformers, ours)
    theirs = _class(transformers, ours)(config).to(dtype)
    _check_names(config, *theirs.load_state_dict(dict(ours.weights()), strict=False))
    theirs.tie_weights()
    return theirs


def _on_device(transformers: Any, ours: Any, dtype: torch.dtype) -> Any:
    """Make the model on the device; weights of the right type are shared, not copied."""
    config = _config(transformers, ours)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with ours.device:
            theirs = _class(transformers, ours)(config)
    finally:
        torch.set_default_dtype(usual)
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in ours.weights()}
    _check_names(config, *theirs.load_state_dict(weights, strict=False, assign=True))
    theirs.tie_weights()
    return theirs.requires_grad_(False)


@contextmanager
def reference_kernels(oracle: Oracle) -> Iterator[None]:
    """Let `transformers` use its plain torch forms: those of fla compute fp32 in tf32."""
    module = sys.modules[type(oracle.model).__module__]
    usual = {name: getattr(module, name) for name in vars(module)
             if name.startswith('torch_') and name.endswith('gated_delta_rule')}
    for name, function in usual.items():
        setattr(module, name, inspect.unwrap(function))
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(module, name, function)
