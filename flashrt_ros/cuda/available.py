"""May this machine's CUDA device serve, and how much fits on it: said before anything loads."""

from __future__ import annotations

import importlib.util

import torch

from flashrt_ros.errors import Capacity, DeviceFault

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


def check_memory(fixed: int, a_token: int, context: int, least_context: int = 1) -> None:
    """
    Refuse what does not fit on the device, naming what would.

    :param fixed: bytes needed whatever the context (weights, pool, work space).
    :param a_token: bytes a token of context.
    :raises Capacity: with the context that fits.
    """
    free = torch.cuda.mem_get_info()[0] - (256 << 20)  # for libraries and their workspaces
    if fixed + a_token * context <= free:
        return
    fits = (free - fixed) // a_token if a_token else 0
    advice = (f'a context of {fits} tokens fits' if fits >= least_context else
              f'no context fits: {fixed - free + a_token * least_context} bytes are missing; '
              'choose a smaller model or a smaller capsules.device_bytes')
    raise Capacity(f'a context of {context} tokens needs {fixed + a_token * context} bytes on the '
                   f'CUDA device and {max(0, free)} are free; {advice}.')
