"""May this machine's CUDA device serve, and how much fits on it: said before anything loads."""

from __future__ import annotations

from typing import Any

import torch

from flashrt_ros.config import pool_budget
from flashrt_ros.cuda import nvrtc
from flashrt_ros.errors import Capacity, DeviceFault, FlashrtError
from flashrt_ros.models import DTYPES, FAMILIES
from flashrt_ros.models.checkpoint import Checkpoint
from flashrt_ros.models.config import Fields
from flashrt_ros.models.locate import locate
from flashrt_ros.models.model import Source
from flashrt_ros.plan import manifest_of

RESERVE = 512 << 20  # bytes for libraries, their workspaces and the graphs
LEAST = (8, 0)  # compute capability: bfloat16 tensor cores and asynchronous copies


def why_not() -> str:
    """Return why no CUDA plan can run here; empty where one can."""
    if not torch.version.cuda:
        return 'the installed torch was built without CUDA'
    try:
        if not torch.cuda.is_available() or not torch.cuda.device_count():
            return ('torch finds no usable CUDA device; check that a driver for CUDA '
                    f'{torch.version.cuda} or newer is installed')
        capability = torch.cuda.get_device_capability()
    except (RuntimeError, AssertionError) as error:
        return f'the CUDA driver does not answer ({str(error).splitlines()[0]})'
    if capability < LEAST:
        return (f'{torch.cuda.get_device_name()} has compute capability {capability[0]}.'
                f'{capability[1]}; {LEAST[0]}.{LEAST[1]} is the least that runs')
    if not nvrtc.bound():
        return ('neither cuda-bindings nor CuPy is installed, which compile the kernels '
                '(pip install "flashrt_ros[gpu]")')
    return ''


def require() -> None:
    """
    Refuse where no CUDA plan can run.

    :raises DeviceFault: saying why and what to do.
    """
    reason = why_not()
    if reason:
        raise DeviceFault(f'device cuda cannot be used: {reason}. Configure device cpu or auto.')


def check_memory(spec: str, dtype: str, context: int, pool: int) -> None:
    """
    Refuse, before anything is loaded, what does not fit, naming a context that would.

    What is wrong with the spec itself is left to the loader to say.

    :param pool: bytes of the capsule pool, 0 for what suits the model.
    :raises Capacity: with the context that fits.
    """
    model = skeleton(spec, dtype)
    if model is None:
        return
    from flashrt_ros.cuda.decode import check_sizes
    from flashrt_ros.cuda.plan import work_bytes
    check_sizes(model)
    manifest = manifest_of(model, model.config.vocab_size)
    weights = model.parameters.nbytes
    pool, _ = pool_budget(pool, manifest, context)

    def needed(tokens: int) -> int:
        return weights + manifest.storage_bytes(tokens) + pool + work_bytes(model, tokens)

    free = torch.cuda.mem_get_info()[0] - RESERVE
    if needed(context) <= free:
        return
    low, high = 0, context
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= free else (low, middle)
    advice = f'a context of {low} tokens fits' if low else (
        'no context fits; choose a smaller model or a smaller capsules.device_bytes')
    raise Capacity(
        f'{spec} with a context of {context} tokens needs {needed(context)} bytes on the CUDA '
        f'device ({weights} of weights, {pool} of capsule pool) and {max(0, free)} are free; '
        f'{advice}.')


def skeleton(spec: str, dtype: str) -> Any:
    """Return a model without memory; None for a spec that the loader will refuse."""
    try:
        if spec.startswith('random:'):
            name = spec.removeprefix('random:').partition('?')[0]
            family = next(f for f in FAMILIES if name in f.presets)
            config = family.config_class.from_fields(Fields(family.presets[name], where=spec))
            declared = DTYPES[family.presets[name]['dtype']]
            source = Source(spec)
        else:
            checkpoint = Checkpoint(locate(spec))
            family = next(f for f in FAMILIES if checkpoint.model_type in f.model_types)
            config = family.config_class.from_fields(checkpoint.fields)
            declared = checkpoint.dtype()
            source = Source(spec, checkpoint.directory, checkpoint.weight_files)
    except (FlashrtError, StopIteration, KeyError):
        return None
    return family(config, DTYPES.get(dtype, declared), 'meta', source)
