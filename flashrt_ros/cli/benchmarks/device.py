"""The clock of a CUDA device, and the ceiling that its memory sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TYPE_CHECKING

import torch

from flashrt_ros.cli.benchmarks.timing import Samples
from flashrt_ros.cuda import driver

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine

#: bytes a second by the vendors' data sheets, by what torch calls the device
PEAKS = {
    'NVIDIA H200': 4.8e12, 'NVIDIA H100 80GB HBM3': 3.35e12, 'NVIDIA H100 PCIe': 2.0e12,
    'NVIDIA B200': 8.0e12, 'NVIDIA A100-SXM4-80GB': 2.039e12, 'NVIDIA A100-SXM4-40GB': 1.555e12,
    'NVIDIA L40S': 8.64e11, 'NVIDIA L4': 3.0e11, 'NVIDIA GeForce RTX 4090': 1.008e12,
    'NVIDIA GeForce RTX 5090': 1.792e12, 'Orin': 2.048e11, 'NVIDIA Thor': 2.73e11,
}
DELAY = 3_000_000  # clock cycles, 1.5 ms or more: for so long the host may queue ahead


class DeviceClock:
    """
    Times of work on the current stream.

    The device is kept busy while the host queues the work, so what is timed is the device alone,
    provided that the work does not wait for it; whether the host was ahead is told.
    """

    def __init__(self, device: torch.device, delay: int = DELAY) -> None:
        self.device, self.delay = device, delay
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, work: Callable[[], Any]) -> tuple[float, bool]:
        """Return the seconds of ``work`` on the stream, and whether the host was ahead."""
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(self.delay)
        self.begin.record()
        work()
        ahead = not self.begin.query()
        self.end.record()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3, ahead


class Streams:
    """Samples of the stream for several names, and how often the host was ahead."""

    def __init__(self, device: torch.device) -> None:
        self.clock = DeviceClock(device)
        self.samples: dict[str, Samples] = {}
        self.ahead: dict[str, list[bool]] = {}

    def time(self, name: str, work: Callable[[], Any], counted: bool = True) -> None:
        """Time ``work`` on the stream."""
        seconds, ahead = self.clock(work)
        if counted:
            self.samples.setdefault(name, Samples()).add(seconds)
            self.ahead.setdefault(name, []).append(ahead)

    def median_us(self, name: str) -> float:
        """Median in microseconds."""
        return self.samples[name].median * 1e3

    def document(self) -> dict[str, Any]:
        """
        Return medians and p99 in microseconds.

        ``host_ahead`` names the share of each that is of the device alone; in the rest the device
        waited for the host, so that time is in it.
        """
        found: dict[str, Any] = {}
        for name, samples in self.samples.items():
            found[f'{name}_stream_us'] = round(samples.median * 1e3, 2)
            found[f'{name}_stream_p99_us'] = round(samples.p99 * 1e3, 2)
        found['host_ahead'] = {name: round(sum(seen) / len(seen), 3)
                               for name, seen in self.ahead.items()}
        return found


def on_device(engine: Engine) -> bool:
    """Tell whether an engine runs on a CUDA device."""
    return engine.arena.device.type == 'cuda'


def settle(engine: Engine) -> None:
    """
    Wait until the device has done all that was queued.

    Through the driver: torch's way to it takes several microseconds, which a restore must not be
    charged for.
    """
    if on_device(engine):
        driver.check(driver.library().cuCtxSynchronize(), 'waiting for the device')


def ceiling(device: torch.device) -> dict[str, Any]:
    """Return the bandwidth to compare with, where it is from, and what a plain copy reaches."""
    name = torch.cuda.get_device_name(device)
    size = min(1 << 30, torch.cuda.mem_get_info(device)[0] // 8) // 8
    source = torch.ones(size, dtype=torch.int64, device=device)
    target, clock = torch.empty_like(source), DeviceClock(device)
    times = sorted(clock(lambda: target.copy_(source))[0] for _ in range(9))
    copied = 2 * source.nbytes / times[len(times) // 2]
    known = name in PEAKS
    return {'device_name': name, 'bytes_per_second': PEAKS[name] if known else copied,
            'from': f'the data sheet of {name}' if known else
            f'a copy of {source.nbytes} bytes on {name}, read and written',
            'copy_bytes_per_second': round(copied)}


def step_bytes(engine: Engine, position: int) -> int:
    """Least traffic of a step: weights once, recurrent state read and written, live rows read."""
    from flashrt_ros.arena import Role
    model, manifest = engine.model, engine.arena.manifest
    return weight_bytes(model) + position * manifest.row_bytes + 2 * sum(
        b.nbytes for b in manifest.fixed if b.role is Role.RECURRENT)


def weight_bytes(model: Any) -> int:
    """Bytes of all weights that a token reads: of a table that is no head, a row only."""
    size = model.parameters.nbytes
    return size if model.config.tied else size - model.parameters[model.embedding_name].nbytes


def target(name: str, measured: float, limit: float, **more: Any) -> dict[str, Any]:
    """Return one line of what was wanted and what was reached."""
    return {'target': name, 'limit': round(limit, 2), 'measured': round(measured, 2),
            'reached': measured <= limit, **more}


def size_of(engine: Engine) -> str:
    """Return the size of model that targets are given for, ``'0.8b'`` or ``'9b'``, or nothing."""
    return next((size for size in ('0.8b', '9b') if engine.model.spec.lower().partition(
        '?')[0].endswith(f'-{size}')), '')
