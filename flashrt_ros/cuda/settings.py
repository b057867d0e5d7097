"""Settings of the sampler that come with the launch of a first token; see ``sources/sample.cu``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import ctypes
import struct

import torch

from flashrt_ros.errors import DeviceFault

_BITS = {'temperature': 1, 'top_p': 2, 'top_k': 4, 'seed': 8, 'counter': 16}
_TOLD = struct.Struct('=ffiIQq')


class Wish(ctypes.Structure):
    """Parameter of the kernel; as it is made nothing is given and nobody asks."""

    _fields_ = [('temperature', ctypes.c_float), ('top_p', ctypes.c_float),
                ('top_k', ctypes.c_int), ('given', ctypes.c_uint32), ('seed', ctypes.c_uint64),
                ('counter', ctypes.c_int64), ('number', ctypes.c_uint32)]


class Settings:
    """
    The :class:`flashrt_ros.sampling.Settings` of a plan: its next step sees to them.

    A copy between host and device, or a kernel for it, would take longer than the rest of a restore
    when it stood between that and a first token.

    :param lost: makes the state invalid, and the fault to raise.
    :ivar wish: what the launch of the sampler is given.
    :ivar told: pinned memory for what the kernel tells.
    :ivar waiting: chosen, and no step was launched since.
    """

    def __init__(self, device: torch.device,
                 lost: Callable[[BaseException], DeviceFault]) -> None:
        self._device, self._lost = device, lost
        self.wish, self.waiting = Wish(), False
        self.told = torch.zeros(_TOLD.size, dtype=torch.uint8).pin_memory()
        self._bytes = self.told.numpy().data

    def choose(self, chosen: Mapping[str, float], counter: int | None) -> None:
        """Let the next step change some settings first, leave the others, and tell all of them."""
        wish, given = self.wish, 0
        for name, value in chosen.items():
            setattr(wish, name, value if name in ('temperature', 'top_p') else int(value))
            given |= _BITS[name]
        if counter is not None:
            wish.counter = counter
            given |= _BITS['counter']
        wish.given = given
        wish.number = wish.number % 0xffffffff + 1  # never 0
        self.waiting = True

    def answer(self) -> tuple[float, int, float, int, int]:
        """
        Return temperature, top_k, top_p, seed and counter as they were chosen.

        :raises DeviceFault: if the device did not say.
        """
        for late in (False, True):
            if late:  # nobody waited for the token
                try:
                    torch.cuda.synchronize(self._device)
                except RuntimeError as error:
                    raise self._lost(error) from error
            temperature, top_p, top_k, number, seed, counter = _TOLD.unpack_from(self._bytes)
            if number == self.wish.number:
                return temperature, top_k, top_p, seed, counter
        raise self._lost(RuntimeError('it did not tell the settings of the sampler'))
