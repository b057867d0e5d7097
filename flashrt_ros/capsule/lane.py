"""
The lane: where copies between tiers are queued, and who waits for them.

On a CPU a copy is done when it returns, and all of this is nothing. On CUDA they go to a stream of
their own, so that tokens are not held up, and events keep the order:

* the lane begins behind all that the current stream has queued (what a save is still writing);
* a pool remembers the last event of the lane that touched it (:attr:`Pool.pending`). Whoever
  fills pages of it from another stream lets that stream wait first (:meth:`Pool.join`); whoever
  reads it with the CPU waits (:meth:`Pool.settle`);
* copies in the lane keep their order among themselves, so a page or a pinned place that was given
  back and is filled again by the lane needs no more than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flashrt_ros.capsule.pool import Pool


class Lane:
    """
    A queue of copies.

    :param device: of the pools it serves; the current stream of that device is the main one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == 'cuda' else None

    @contextmanager
    def copying(self, *pools: Pool, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """
        Queue the copies of this block in the lane; also if it raises, the pools know of them.

        :param pools: that the copies read from or write to.
        :param after: an event to begin behind, instead of what is queued by now.
        """
        if self._stream is None:
            yield
            return
        if after is None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        else:
            self._stream.wait_event(after)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            event = self._stream.record_event()
            for pool in pools:
                pool.pending = event

    def mark(self) -> torch.cuda.Event | None:
        """Return an event behind all that the current stream has queued."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self.device).record_event()


class Staging:
    """
    Pinned memory between a file and a device, used again for each.

    It belongs to a copy until that one has completed: :meth:`take` waits for it.

    :param size: bytes that are enough for all that is expected.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._memory: torch.Tensor | None = None
        self._busy: torch.cuda.Event | None = None

    def take(self, size: int) -> torch.Tensor:
        """Return at least ``size`` bytes that no copy reads from any more."""
        if self._busy is not None:
            self._busy.synchronize()
            self._busy = None
        if self._memory is None or size > self._memory.numel():
            self._size = max(size, self._size)
            self._memory = torch.empty(self._size, dtype=torch.uint8, pin_memory=True)
        return self._memory

    def until(self, event: torch.cuda.Event | None) -> None:
        """Keep the memory from everybody until ``event``."""
        self._busy = event
