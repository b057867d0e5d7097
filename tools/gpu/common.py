"""What the sections of check.py share: pairs of plans, distances, timing."""

from __future__ import annotations

import random
import time

import torch

from flashrt_ros.arena import Arena
from flashrt_ros.cuda.plan import CudaGraphPlan
from flashrt_ros.models import load_model
from flashrt_ros.plan import EagerPlan, manifest_of


def arena_of(model, context: int, fill: int = 0xff) -> Arena:
    """Return an arena whose dead rows hold NaN."""
    arena = Arena(manifest_of(model, model.config.vocab_size), context, 'cuda')
    for plane in arena.rows.planes:
        plane.fill_(fill)
    return arena


def build(spec: str, dtype: str, context: int, **options):
    """Return a model and its CUDA plan."""
    model = load_model(spec, dtype=dtype, device='cuda')
    return model, CudaGraphPlan(model, arena_of(model, context), **options)


class TorchPlan(EagerPlan):
    """The plain torch form on the device."""

    def _fold(self, ids: torch.Tensor, position: int) -> None:
        super()._fold(ids.to(self.arena.device), position)


def reference(model, context: int) -> EagerPlan:
    """Return the torch form in fp32 on the same weights."""
    wide = load_model(model.spec, dtype='float32', device='cuda')
    for (_, to), (_, origin) in zip(wide.weights(), model.weights(), strict=True):
        to.copy_(origin)
    return TorchPlan(wide, arena_of(wide, context))


def plain(model, context: int) -> EagerPlan:
    """Return the torch form in the type of the model."""
    return TorchPlan(model, arena_of(model, context))


def ids(count: int, vocabulary: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(count)]


def distances(ours: Arena, theirs: Arena) -> dict[str, float]:
    """Largest relative distance by kind of buffer, live rows only."""
    found: dict[str, float] = {}
    position = theirs.position
    assert int(ours['position'].item()) == position, (ours['position'], position)
    for buffer in theirs.manifest.buffers:
        if buffer.name == 'mailbox' or buffer.name.startswith('sampler'):
            continue
        a, b = ours[buffer.name], theirs[buffer.name]
        if buffer.role.value == 'rows':
            a, b = a[:position], b[:position]
        a, b = a.double(), b.double()
        distance = ((a - b).norm() / (b.norm() + 1e-30)).item()
        kind = buffer.name.split('.')[-1]
        found[kind] = max(found.get(kind, 0.0), distance if distance == distance else 9e9)
    return found


class Stopwatch:
    """Medians of device times in microseconds."""

    def __init__(self, repeats: int = 20) -> None:
        self.repeats = repeats

    def __call__(self, work, before=None, count: int = 1) -> float:
        times = []
        for index in range(self.repeats + 3):
            if before is not None:
                before()
            torch.cuda._sleep(400_000)  # cycles: the host runs ahead, the device alone is timed
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(count):
                work()
            end.record()
            end.synchronize()
            if index >= 3:
                times.append(begin.elapsed_time(end) * 1000 / count)
        return sorted(times)[len(times) // 2]


def wall(work, repeats: int = 20, before=None) -> dict[str, float]:
    """Median and p99 of wall-clock times in microseconds, synchronization included."""
    times = []
    for index in range(repeats + 3):
        if before is not None:
            before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if index >= 3:
            times.append((time.perf_counter() - begin) * 1e6)
    times.sort()
    return {'median_us': round(times[len(times) // 2], 1),
            'p99_us': round(times[min(len(times) - 1, int(len(times) * 0.99))], 1)}


def until_token(work, repeats: int = 10) -> dict[str, float]:
    """Median and largest wall-clock time in microseconds until ``work`` has its token."""
    times = []
    for index in range(repeats + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        end = time.perf_counter()
        if index >= 2:
            times.append((end - begin) * 1e6)
    times.sort()
    return {'median_us': round(times[len(times) // 2], 1), 'worst_us': round(times[-1], 1)}


def captured(run) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
