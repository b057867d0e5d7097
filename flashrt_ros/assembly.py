"""Putting an engine together: everything is checked, loaded and allocated here, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashrt_ros.arena import Arena
from flashrt_ros.capsule import fingerprint as fingerprints
from flashrt_ros.capsule.fingerprint import Fingerprint
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.capsule.pool import Pool
from flashrt_ros.capsule.remote import open_tier
from flashrt_ros.capsule.store import Store
from flashrt_ros.config import (
    allocating,
    check_memory,
    choose_device,
    EngineConfig,
    pool_budget,
)
from flashrt_ros.errors import Incompatible, InvalidArgument
from flashrt_ros.models import load_model, Model
from flashrt_ros.plan import EagerPlan, manifest_of, Plan
from flashrt_ros.text import Text


@dataclass(frozen=True)
class Parts:
    """What an engine consists of."""

    model: Model
    text: Text
    arena: Arena
    plan: Plan
    lineage: Lineage
    fingerprint: Fingerprint
    store: Store


def build_plan(model: Model, arena: Arena) -> Plan:
    """Bind a model to an arena by the plan of its device."""
    if arena.device.type == 'cuda':
        from flashrt_ros.cuda.plan import CudaGraphPlan
        return CudaGraphPlan(model, arena)
    return EagerPlan(model, arena)


def _serving(config: EngineConfig, tell: Callable[[str], None]) -> str:
    """
    Return the device that serves this model where there is a CUDA device.

    :raises Incompatible, Capacity: it was asked for, or is what serves, and cannot take the model.
    """
    from flashrt_ros.cuda import available
    try:
        available.check_memory(config.model, config.dtype, config.context, config.pool_bytes)
    except Incompatible as error:
        if config.device != 'auto':
            raise
        tell(f"running on the CPU: {str(error).partition(';')[0]}")
        return 'cpu'
    return 'cuda'


def assemble(config: EngineConfig, tell: Callable[[str], None]) -> Parts:
    """
    Load the model and allocate arena, plan, pool and store.

    :param tell: told in words what is going on.
    :raises FlashrtError: typed; what is not there or does not fit is refused before it is loaded.
    """
    with allocating(f'{config.model}, a context of {config.context} tokens and the capsule pools'):
        return _assemble(config, tell)


def _assemble(config: EngineConfig, tell: Callable[[str], None]) -> Parts:
    device = choose_device(config.device, tell)
    if config.threads:
        torch.set_num_threads(config.threads)
    if device == 'cuda':
        device = _serving(config, tell)
    tell(f'loading model {config.model}')
    dtype = 'float32' if (config.dtype, device) == ('auto', 'cpu') else config.dtype
    model = load_model(config.model, dtype=dtype, device=device)
    if config.context > model.config.max_positions:
        raise InvalidArgument(
            f'a context of {config.context} tokens is more than the '
            f'{model.config.max_positions} positions of {config.model}; configure less.')
    text = (Text.load(model.source_dir) if model.source_dir
            else Text.bytes_only(model.config.vocab_size))
    tell(f'allocating a context of {config.context} tokens')
    manifest = manifest_of(model, model.config.vocab_size)
    pool, blocks = pool_budget(config.pool_bytes, manifest, config.context)
    on_host = manifest.storage_bytes(config.context) + pool
    check_memory(config.host_bytes + (on_host if device == 'cpu' else 0))
    arena = Arena(manifest, config.context, device)
    plan = build_plan(model, arena)
    lineage = Lineage(arena, Pool(manifest, pool, device, blocks))
    soft = {}
    if device == 'cuda':
        from flashrt_ros.cuda.compiler import sources_digest
        from flashrt_ros.cuda.copies import Mover
        from flashrt_ros.cuda.nvrtc import compiler
        lineage.mover = Mover(arena, lineage.pool)
        soft['cuda_sources'] = sources_digest()
        soft['nvrtc'] = '.'.join(map(str, compiler().version))
    tell('taking the fingerprint')
    fingerprint = fingerprints.build(model, manifest, text, device, plan.grid, soft=soft)
    disk = open_tier(config.directory, config.disk_bytes) if config.directory else None
    host = Pool(manifest, config.host_bytes, min_blocks=1, option='capsules.host_bytes',
                pinned=device == 'cuda') if config.host_bytes else None
    return Parts(model, text, arena, plan, lineage, fingerprint,
                 Store(lineage, fingerprint, config.context, disk, host))
