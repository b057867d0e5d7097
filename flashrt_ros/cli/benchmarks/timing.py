"""Clocks, statistics and the facts of a measurement that must stand beside its numbers."""

from __future__ import annotations

from collections.abc import Callable
import math
import platform
import statistics
import time
from typing import Any, TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine

THRASH = 64 << 20  # bytes; more than the caches of the machines we run on


class Samples:
    """Lengths of time in seconds, and what is said of them (in milliseconds)."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def add(self, seconds: float) -> None:
        """Add one measurement."""
        self.seconds.append(seconds)

    def time(self, work: Callable[[], Any]) -> Any:
        """Add the wall time of ``work()``; return what it returned."""
        begun = time.perf_counter()
        result = work()
        self.add(time.perf_counter() - begun)
        return result

    @property
    def median(self) -> float:
        """Median in milliseconds."""
        return statistics.median(self.seconds) * 1e3

    @property
    def p99(self) -> float:
        """
        99th percentile in milliseconds, by nearest rank.

        Below 100 repeats that is the largest one.
        """
        return self.quantile(0.99)

    def quantile(self, share: float) -> float:
        """Return a quantile in milliseconds, by nearest rank."""
        ordered = sorted(self.seconds)
        return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)] * 1e3

    @property
    def spread(self) -> float:
        """Distance between the quartiles as a share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method='inclusive')
        return (high - low) / statistics.median(self.seconds)

    def document(self, name: str) -> dict[str, float | int]:
        """Return ``name_ms`` with its p99, spread and number of repeats."""
        return {f'{name}_ms': round(self.median, 4), f'{name}_p99_ms': round(self.p99, 4),
                f'{name}_spread': round(self.spread, 3), f'{name}_repeats': len(self.seconds)}


class Cache:
    """Pushes everything else out of the caches, so that each contender finds them equally cold."""

    def __init__(self) -> None:
        self._memory = torch.zeros(THRASH, dtype=torch.uint8)

    def evict(self) -> None:
        """Read and write more memory than the caches hold."""
        self._memory.add_(1)


def random_ids(vocab_size: int, count: int, seed: int) -> list[int]:
    """Return seeded token ids of the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


def _device_versions() -> dict[str, Any]:
    """Return the name of the device and what runs on it."""
    import importlib.metadata
    found = {'device_name': torch.cuda.get_device_name(), 'cuda': torch.version.cuda}
    for package in ('cuda-bindings', 'triton', 'fla-core'):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    try:
        import pynvml
        pynvml.nvmlInit()
        found['driver'] = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # not there, or it does not answer: a fact less
        pass
    return found


def conditions(engine: Engine, seed: int) -> dict[str, Any]:
    """Return what the numbers of a run depend on."""
    from flashrt_ros.cli.doctor import cpu_name
    versions = {'python': platform.python_version(), 'torch': torch.__version__}
    try:
        import transformers
        versions['transformers'] = transformers.__version__
    except ImportError:
        pass
    if engine.arena.device.type == 'cuda':
        versions.update(_device_versions())
    return {'model': engine.facts(), 'cpu': cpu_name(), 'threads': torch.get_num_threads(),
            'device': str(engine.arena.device), 'prompt': f'random token ids, seed {seed}',
            'versions': versions}
