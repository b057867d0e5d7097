"""May this machine's CUDA device serve, and how much fits on it: said before anything loads."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from flashrt_ros.arena import Manifest
from flashrt_ros.errors import Capacity, DeviceFault

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
    for module in ('cuda.bindings', 'cuda.bindings.nvrtc'):
        try:
            found = importlib.util.find_spec(module)
        except ImportError:
            found = None
        if found is None:
            return 'cuda-bindings is not installed (pip install "flashrt_ros[gpu]")'
    return ''


def require() -> None:
    """
    Refuse where no CUDA plan can run.

    :raises DeviceFault: saying why and what to do.
    """
    reason = why_not()
    if reason:
        raise DeviceFault(f'device cuda cannot be used: {reason}. Configure device cpu or auto.')


def check_memory(model: Any, manifest: Manifest, context: int, pool: int) -> None:
    """
    Refuse a context that does not fit beside weights that are loaded, naming one that would.

    :param pool: bytes of the capsule pool.
    :raises Capacity: with the context that fits.
    """
    from flashrt_ros.cuda.plan import work_bytes

    def needed(tokens: int) -> int:
        return manifest.storage_bytes(tokens) + pool + work_bytes(model, tokens)

    free = torch.cuda.mem_get_info()[0] - RESERVE
    if needed(context) <= free:
        return
    low, high = 0, context
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= free else (low, middle)
    advice = f'a context of {low} tokens fits' if low else (
        'no context fits; choose a smaller model or a smaller capsules.device_bytes')
    raise Capacity(f'a context of {context} tokens with its capsule pool needs {needed(context)} '
                   f'bytes on the CUDA device and {max(0, free)} are free; {advice}.')
