"""Options that several commands share, and the way from them to an engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TYPE_CHECKING

import typer

from flashrt_ros.cli import output

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine

ModelOption = Annotated[str, typer.Option(
    '--model', help='embedded, random:tiny, random:qwen3.5-0.8b, a Hugging Face directory, or a '
    'hub id that is in the local cache.')]
DtypeOption = Annotated[str, typer.Option(
    '--dtype', help='auto (float32 on a CPU), float32 or bfloat16.')]
DeviceOption = Annotated[str, typer.Option('--device', help='auto, cpu or cuda.')]
ThreadsOption = Annotated[int, typer.Option(
    '--threads', min=0, help="Compute threads; 0 leaves torch's setting.")]
JsonOption = Annotated[bool, typer.Option(
    '--json', help='Print exactly one JSON document on stdout.')]
SeedOption = Annotated[int, typer.Option(
    '--seed', min=0, max=(1 << 63) - 1, help='Seed of the random token ids.')]


def default_directory() -> Path:
    """Return where capsules live: ``FLASHRT_CAPSULES``, else ``flashrt`` below ROS's home."""
    chosen = os.environ.get('FLASHRT_CAPSULES')
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get('ROS_HOME') or '~/.ros').expanduser() / 'flashrt'


POOL_BYTES = 256 << 20  # on a CPU


def pool_bytes(model: str, dtype: str, device: str, context: int, *, rows: int, blocks: int,
               least: int = POOL_BYTES) -> int:
    """
    Return a budget for a capsule pool of about so many rows and fixed blocks on a CUDA device.

    It takes half of what weights and context leave free at most, so that work space and whoever is
    measured beside us find room. ``least`` on a CPU, and for what the loader will refuse anyway.
    """
    if device == 'cpu':
        return least
    from flashrt_ros.cuda import available
    if available.why_not():
        return least
    shape = available.skeleton(model, dtype)
    if shape is None:
        return least
    import torch

    from flashrt_ros.plan import manifest_of
    manifest = manifest_of(shape, shape.config.vocab_size)
    # An eighth of a pool is for blocks, but eight of them are there in any case.
    wanted = max(blocks * manifest.fixed_bytes * (8 if blocks > 8 else 1),
                 blocks * manifest.fixed_bytes + rows * manifest.row_bytes * 8 // 7)
    left = (torch.cuda.mem_get_info()[0] - shape.parameters.nbytes
            - manifest.storage_bytes(context)) // 2
    floor = 8 * manifest.fixed_bytes + 128 * manifest.row_bytes
    return max(floor, min(max(least, wanted), left))


def open_engine(model: str, *, dtype: str = 'auto', device: str = 'auto', context: int = 8192,
                pool_bytes: int = 256 << 20, directory: str = '', threads: int = 0,
                max_sessions: int = 16, host_bytes: int = 0) -> Engine:
    """Load a model into an engine and say so on stderr; typed refusals pass through."""
    from flashrt_ros.engine import Engine, EngineConfig
    return Engine(EngineConfig(model=model, dtype=dtype, device=device, context=context,
                               pool_bytes=pool_bytes, directory=directory, threads=threads,
                               max_sessions=max_sessions, host_bytes=host_bytes),
                  progress=output.log)
