"""
Load machine code and launch it through the CUDA driver, also inside a stream capture.

The driver is called through ctypes: a launch outside a graph (a restore) must cost microseconds,
and nothing but ``libcuda`` is needed. Pointers are raw addresses; whoever launches keeps the
tensors alive.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
import ctypes
from functools import lru_cache, partial
import os
from typing import Any

import torch
from torch import Tensor

from flashrt_ros.cuda.compiler import compile_source
from flashrt_ros.errors import DeviceFault

_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Attribute(ctypes.Structure):
    _fields_ = [('id', ctypes.c_int), ('pad', ctypes.c_int), ('value', ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    _fields_ = [('grid', ctypes.c_uint * 3), ('block', ctypes.c_uint * 3),
                ('shared', ctypes.c_uint), ('stream', ctypes.c_void_p),
                ('attributes', ctypes.c_void_p), ('count', ctypes.c_uint)]


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """
    Return the driver's library.

    :raises DeviceFault: where there is none.
    """
    for name in ('libcuda.so.1', 'nvcuda.dll'):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DeviceFault('this machine has no CUDA driver (libcuda.so.1); install the driver, or '
                      'configure device cpu.')


def check(status: int, what: str) -> None:
    """
    Turn a driver's status into an exception.

    :raises DeviceFault: for any status but success.
    """
    if status:
        text = ctypes.c_char_p()
        library().cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        reason = text.value.decode() if text.value else 'unknown error'
        raise DeviceFault(f'{what} failed: {reason} (CUDA error {status}).')


def architecture(device: torch.device) -> str:
    """
    Return the architecture to compile for, ``sm_89``.

    On Hopper it is the one with products of warpgroups, which no later device has.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return f'sm_{major}{minor}' + ('a' if (major, minor) == (9, 0) else '')


class Launch:
    """
    One kernel with its grid and arguments bound: calling it queues it on the current stream.

    :param args: tensors (their addresses are taken), ``int`` (as int32), ``float`` (as fp32),
        None (a null pointer) or a ctypes structure (by value).
    :param chained: may start while the kernel in front of it ends (the kernel waits by itself).
    """

    def __init__(self, kernel: Kernel, grid: tuple[int, ...], block: int, args: tuple,
                 shared: int = 0, chained: bool = True) -> None:
        self.kernel, self.grid, self.block, self.shared = kernel, grid, block, shared
        self.args = args
        self._values = [_packed(value) for value in args]
        self._pointers = (ctypes.c_void_p * max(1, len(args)))(
            *(ctypes.addressof(value) for value in self._values))
        self._attribute = _Attribute(_SERIALIZATION, 0)
        self._attribute.value[0] = 1
        padded = (*grid, 1, 1)[:3]
        self._config = _Config(
            (ctypes.c_uint * 3)(*padded), (ctypes.c_uint * 3)(block, 1, 1), shared, None,
            ctypes.addressof(self._attribute), 0)
        self._chained = chained and kernel.chains
        self._config_at = ctypes.byref(self._config)
        self._launch = library().cuLaunchKernelEx
        kernel.need(shared)

    def ask_ahead(self, weight: Tensor, limit: int) -> None:
        """Set the last two arguments: what to ask for while this runs, and how much of it."""
        self._values[-2].value = weight.data_ptr()
        self._values[-1].value = min(limit, weight.nbytes)

    def __call__(self) -> None:
        """Queue the kernel on the current stream of this thread."""
        # The stream as torch.cuda.current_stream() has it, without an object that takes
        # microseconds to make.
        self._config.stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        if self._chained:
            # Chains pay within a graph; outside, plain order is simpler to reason about.
            self._config.count = torch.cuda.is_current_stream_capturing()
        status = self._launch(self._config_at, self.kernel.handle, self._pointers, None)
        if status == _INVALID_CONTEXT:  # this thread has not used the device yet
            torch.cuda.current_stream().query()
            status = self._launch(self._config_at, self.kernel.handle, self._pointers, None)
        if status:
            check(status, f'launching {self.kernel.name}')


def _packed(value: Any) -> Any:
    """Return an argument as the driver takes it: something with an address of its own."""
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, ctypes.c_int64):
        return ctypes.c_int64(value.value)  # our own: it may be set later
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_float(value)


class Kernel:
    """
    A function of machine code that may still be compiling; the first use waits for it.

    :param module: returns the loaded module.
    """

    def __init__(self, module: Callable[[], ctypes.c_void_p], name: str, chains: bool) -> None:
        self.name, self.chains = name, chains
        self._module = module
        self._handle: ctypes.c_void_p | None = None
        self._shared = 48 << 10  # bytes, what a kernel may use without asking

    @property
    def handle(self) -> ctypes.c_void_p:
        """The function as the driver knows it."""
        if self._handle is None:
            handle = ctypes.c_void_p()
            check(library().cuModuleGetFunction(ctypes.byref(handle), self._module(),
                                                self.name.encode()),
                  f'finding the kernel {self.name}')
            if hasattr(library(), 'cuFuncLoad'):  # lazily loaded code must not load in a capture
                check(library().cuFuncLoad(handle), f'loading the kernel {self.name}')
            if self._shared > 48 << 10:
                self._ask(handle)
            self._handle = handle
        return self._handle

    def need(self, shared: int) -> None:
        """Let launches use this many bytes of dynamic shared memory."""
        if shared > self._shared:
            self._shared = shared
            if self._handle is not None:
                self._ask(self._handle)

    def _ask(self, handle: ctypes.c_void_p) -> None:
        check(library().cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, self._shared),
              f'asking for {self._shared} bytes of shared memory for {self.name}')


class Toolbox:
    """
    Kernels of one device and one element type; each variant is compiled once, several at a time.

    Whoever asked for kernels calls :meth:`finish` before the first capture.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.arch = architecture(device)
        properties = torch.cuda.get_device_properties(device)
        self.multiprocessors = properties.multi_processor_count
        self.shared = getattr(properties, 'shared_memory_per_block_optin', 48 << 10)  # bytes
        self.clusters = self._chains = torch.cuda.get_device_capability(device) >= (9, 0)
        self._element = dtype.itemsize * 8
        self._compiling: dict[tuple, Future[bytes]] = {}
        self._modules: dict[tuple, ctypes.c_void_p] = {}
        self._kernels: dict[tuple, Kernel] = {}
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), 'nvrtc')
        torch.zeros(1, device=device)  # makes the primary context current

    def kernel(self, source: str, name: str, **defines: int) -> Kernel:
        """Return a kernel of ``sources/<source>`` compiled with these macros."""
        key = (source, *sorted(defines.items()))
        if key not in self._compiling:
            self._compiling[key] = self._pool.submit(
                compile_source, source, {'ELEMENT': self._element, **defines}, self.arch)
        if (key, name) not in self._kernels:
            self._kernels[key, name] = Kernel(partial(self._module, key), name, self._chains)
        return self._kernels[key, name]

    def _module(self, key: tuple) -> ctypes.c_void_p:
        if key not in self._modules:
            code, module = self._compiling[key].result(), ctypes.c_void_p()
            with torch.cuda.device(self.device):
                check(library().cuModuleLoadData(ctypes.byref(module), code),
                      f'loading {key[0]} for {self.arch}')
            self._modules[key] = module
        return self._modules[key]

    def finish(self) -> None:
        """
        Wait until all kernels that were asked for are compiled, and load them.

        :raises DeviceFault: if one cannot be compiled or loaded.
        """
        for kernel in self._kernels.values():
            kernel.handle  # noqa: B018
        self._pool.shutdown()
