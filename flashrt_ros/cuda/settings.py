"""Settings of the sampler: changed and asked for in one launch, see ``sources/settings.cu``."""

from __future__ import annotations

from collections.abc import Mapping
import ctypes
import struct

import torch

from flashrt_ros.arena import Arena
from flashrt_ros.cuda.driver import Launch, Toolbox
from flashrt_ros.errors import DeviceFault

_BITS = {'temperature': 1, 'top_p': 2, 'top_k': 4, 'seed': 8, 'counter': 16}
_TOLD = struct.Struct('=ffiIQq')


class _Wish(ctypes.Structure):
    _fields_ = [('temperature', ctypes.c_float), ('top_p', ctypes.c_float),
                ('top_k', ctypes.c_int), ('given', ctypes.c_uint32), ('seed', ctypes.c_uint64),
                ('counter', ctypes.c_int64), ('number', ctypes.c_uint32)]


class Settings:
    """
    What :class:`flashrt_ros.sampling.Question` is on a CPU.

    A copy between host and device would do as well, but takes longer than all of the rest of a
    restore when it stands between that and a first token.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._wish = _Wish()
        self._told = torch.zeros(_TOLD.size, dtype=torch.uint8).pin_memory()
        self._bytes = self._told.numpy().data
        self._number = 0
        tools = Toolbox(arena.device, torch.bfloat16)
        self._launch = Launch(
            tools.kernel('settings.cu', 'choose'), (1,), 32,
            (self._wish, *(arena[f'sampler.{name}'] for name in _BITS), self._told),
            chained=False)
        tools.finish()

    def choose(self, chosen: Mapping[str, float], counter: int | None) -> None:
        """
        Change some settings of the state, leave the others, and ask what they are then.

        :raises DeviceFault: if the device has failed; the state is invalid then.
        """
        wish, given = self._wish, 0
        for name, value in chosen.items():
            setattr(wish, name, value if name in ('temperature', 'top_p') else int(value))
            given |= _BITS[name]
        if counter is not None:
            wish.counter = counter
            given |= _BITS['counter']
        self._number = wish.number = (self._number + 1) & 0xffffffff
        wish.given = given
        try:
            self._launch()
        except (RuntimeError, DeviceFault) as error:
            self._arena.valid = False
            raise DeviceFault(f'the CUDA device failed ({error}); clean up and configure '
                              'again.') from error

    def answer(self) -> tuple[float, int, float, int, int]:
        """
        Return temperature, top_k, top_p, seed and counter as they were asked for.

        :raises DeviceFault: if the device did not say.
        """
        for late in (False, True):
            if late:  # nobody waited for what was queued behind the question, a token say
                torch.cuda.synchronize(self._arena.device)
            temperature, top_p, top_k, number, seed, counter = _TOLD.unpack_from(self._bytes)
            if number == self._number:
                return temperature, top_k, top_p, seed, counter
        raise DeviceFault('the CUDA device did not tell the settings of the sampler; clean up and '
                          'configure again.')
