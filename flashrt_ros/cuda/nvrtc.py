"""NVRTC, by whichever of its two Python bindings is installed: cuda-bindings or CuPy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
import importlib.util
from typing import Any, Protocol

from flashrt_ros.errors import DeviceFault

MISSING = ('compiling the CUDA kernels needs NVRTC with cuda-bindings or CuPy: pip install '
           '"flashrt_ros[gpu]", or configure device cpu')


class Compiler(Protocol):
    """What is needed of NVRTC."""

    version: tuple[int, int]
    architectures: Sequence[int]  # compute capabilities, 90 for sm_90

    def compile(self, name: str, text: str, options: Sequence[str]) -> bytes:
        """
        Return the machine code (cubin) of a source.

        :raises DeviceFault: if NVRTC refuses it; the log is in the message.
        """


class _Bindings:
    version: tuple[int, int]
    architectures: Sequence[int]

    def __init__(self) -> None:
        from cuda.bindings import nvrtc
        self._nvrtc: Any = nvrtc
        _, major, minor = nvrtc.nvrtcVersion()
        self.version = (major, minor)
        self.architectures = list(self._checked(nvrtc.nvrtcGetSupportedArchs()))

    def _checked(self, result: tuple) -> Any:
        if int(result[0]):
            raise DeviceFault(f'NVRTC failed: {self._nvrtc.nvrtcGetErrorString(result[0])[1]}')
        return result[-1]

    def compile(self, name: str, text: str, options: Sequence[str]) -> bytes:
        nvrtc, checked = self._nvrtc, self._checked
        program = checked(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
        try:
            raw = [option.encode() for option in options]
            if int(nvrtc.nvrtcCompileProgram(program, len(raw), raw)[0]):
                log = b' ' * checked(nvrtc.nvrtcGetProgramLogSize(program))
                checked(nvrtc.nvrtcGetProgramLog(program, log))
                raise _refused(name, options, log.decode(errors='replace'))
            code = b' ' * checked(nvrtc.nvrtcGetCUBINSize(program))
            checked(nvrtc.nvrtcGetCUBIN(program, code))
            return code
        finally:
            nvrtc.nvrtcDestroyProgram(program)


class _CuPy:
    version: tuple[int, int]
    architectures: Sequence[int]

    def __init__(self) -> None:
        from cupy.cuda import nvrtc
        self._nvrtc: Any = nvrtc
        self.version = nvrtc.getVersion()
        self.architectures = list(nvrtc.getSupportedArchs())

    def compile(self, name: str, text: str, options: Sequence[str]) -> bytes:
        nvrtc = self._nvrtc
        program = nvrtc.createProgram(text, name, [], [])
        try:
            try:
                nvrtc.compileProgram(program, list(options))
            except nvrtc.NVRTCError as error:
                log = nvrtc.getProgramLog(program)
                raise _refused(name, options, log) from error
            return nvrtc.getCUBIN(program)
        finally:
            nvrtc.destroyProgram(program)


def _refused(name: str, options: Sequence[str], log: str) -> DeviceFault:
    return DeviceFault(f'NVRTC refused {name} with {" ".join(options)}:\n' + log.rstrip('\0 '))


def bound() -> bool:
    """Tell whether one of the bindings is installed, without importing it."""
    for module in ('cuda.bindings.nvrtc', 'cupy'):
        try:
            if importlib.util.find_spec(module) is not None:
                return True
        except ImportError:
            continue
    return False


@lru_cache(maxsize=1)
def compiler() -> Compiler:
    """
    Return NVRTC.

    :raises DeviceFault: saying what to install.
    """
    reasons = []
    for kind in (_Bindings, _CuPy):
        try:
            return kind()
        except (ImportError, OSError, RuntimeError) as error:  # the library is found late
            reasons.append(f'{type(error).__name__}: {error}')
    raise DeviceFault(f'{MISSING} ({"; ".join(reasons)}).')
