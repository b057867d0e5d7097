"""Promise 8: addresses, pool and memory do not change over thousands of cycles."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from typing import TYPE_CHECKING

import psutil
import torch

from flashrt_ros.cli.checks import guard, state
from flashrt_ros.cli.checks.base import Check, Sizes

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine

ALLOWED = 8 << 20  # bytes of growth in all: what an allocator may keep, not what a leak costs
SMALL = 300  # objects of the interpreter that may be more, and one in twenty cycles


def addresses(engine: Engine) -> set[int]:
    """Return where all state lives: arena, scratch, every view, and the pool."""
    pool = engine.lineage.pool
    tensors = [engine.arena.storage, engine.arena.scratch, *engine.arena.views.values(),
               pool.blocks, *pool.rows.planes]
    return {tensor.data_ptr() for tensor in tensors}


def _trim() -> None:
    """Give freed memory back, so that a leak cannot hide in what was resident anyway."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)  # glibc only
    if trim is not None:
        trim(0)


def _small_objects() -> int:
    """Return how many the interpreter has, too small to show in resident memory."""
    count = getattr(sys, 'getallocatedblocks', None)  # CPython only
    return count() if count is not None else 0


def _device_memory(engine: Engine) -> int:
    device = engine.arena.device
    if device.type != 'cuda':
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def steady_memory(engine: Engine, sizes: Sizes) -> Check:
    """Restore, generate, save, over and over."""
    process, pool = psutil.Process(), engine.lineage.pool
    state.begin(engine, sizes, length=70, salt=23)
    engine.save(name='start')

    def cycle() -> None:
        engine.restore(capsule='start')
        state.generate(engine, 2)
        engine.save(name='end', overwrite=True)

    warm, begun = 0, time.monotonic()
    while warm < max(20, sizes.cycles // 10) and (
            warm < 5 or time.monotonic() - begun < sizes.seconds / 5):
        cycle()
        warm += 1
    where, free, tensors = addresses(engine), pool.free(), len(guard.reachable())
    on_device = _device_memory(engine)
    seen = set(where)
    _trim()  # last, so that no garbage of our own is taken for what was there before
    objects, resident = _small_objects(), process.memory_info().rss
    begun, done = time.monotonic(), 0
    while done < sizes.cycles and time.monotonic() - begun < sizes.seconds:
        cycle()
        done += 1
        seen |= addresses(engine)
    _trim()
    growth = process.memory_info().rss - resident
    objects = _small_objects() - objects
    moved = len(seen ^ where)
    lost = [a - b for a, b in zip(free, pool.free(), strict=True)]
    more = len(guard.reachable()) - tensors
    device_growth = _device_memory(engine) - on_device
    device = (f' {device_growth} bytes more are allocated on the device;'
              if engine.arena.device.type == 'cuda' else '')
    reached = ('' if done == sizes.cycles else
               f' (of {sizes.cycles} wanted: {sizes.seconds:g} s were over)')
    return Check(
        'steady_memory', growth <= ALLOWED and moved == 0 and lost == [0, 0] and more <= 0
        and objects <= SMALL + done // 20 and device_growth == 0 and done > 0, growth,
        'bytes of growth',
        f'resident memory over {done} cycles{reached} of restore, generate 2 tokens and save, '
        f'after {warm} to warm up;{device} {moved} of {len(where)} addresses moved; '
        f'{lost[0]} blocks and {lost[1]} pages were not given back; {max(more, 0)} tensors and '
        f'{max(objects, 0)} small objects more than before.')
