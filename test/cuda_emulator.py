"""
Run the CUDA sources of the package on a CPU: `device.h` plays the device, g++ compiles.

Only what the kernels compute is tested so, not what a compiler for CUDA makes of them.
"""

import ctypes
import hashlib
import os
from pathlib import Path
import re
import shutil
import subprocess
import tempfile
import types

import torch

from flashrt_ros.cuda import compiler, copies, decode, driver, front, plan, prefill

COMPILER = shutil.which('g++')
HERE = Path(__file__).parent / 'emulator'
SAMPLE: dict[str, int] = {}  # more macros for sample.cu
CACHE = Path(tempfile.gettempdir()) / 'flashrt-emulator'


def without_assembler(text: str) -> str:
    """Cut out functions that hold inline assembler or are its counterparts; device.h has them."""
    names = '|'.join(('pack_bf16', 'leave_first', 'load_once', 'start_next', 'wait_inputs',
                      'shared_at', 'copy_async', 'commit', 'arrive', 'matrices',
                      'matrices_turned', 'multiply', 'fast_exp2', 'fast_log2', 'fast_inverse',
                      'begin_products', 'commit_products', 'finish_products', 'show_products',
                      'multiply_rows', 'multiply_turned', 'pin', 'pin_bits',
                      'keep_registers', 'take_registers', 'barrier_open', 'barrier_reach',
                      'barrier_reach_copied', 'barrier_pass',
                      'expect', 'begin', 'all_expect', 'way_to', 'send', 'await'))
    pattern = re.compile(rf'^(template <[^>]+> )?DEVICE \w+\*? ({names})\(', re.MULTILINE)
    while match := pattern.search(text):
        at, depth = text.index('{', match.start()), 0
        while True:
            char = text[at]
            if char == '"':
                at = text.index('"', at + 1)
            depth += (char == '{') - (char == '}')
            at += 1
            if not depth:
                break
        text = text[:match.start()] + text[at:]
    return text


def build(name: str, defines: dict) -> ctypes.CDLL:
    text = without_assembler(compiler.source_text(name))
    text = re.sub(r'extern __shared__ (\w+) (\w+)\[\];',
                  r'\1* \2 = (\1*)emu::self->dynamic;', text)
    kernels = re.findall(
        r'extern "C" __global__ void(?: CLUSTER)?(?: __launch_bounds__\([^)]*\))?\s+(\w+)\(', text)
    macros = ''.join(f'#define {key} {value}\n' for key, value in sorted(defines.items()))
    text = f'#include "device.h"\n{macros}{text}\n'
    names = sorted(set(kernels))
    if 'HIDDEN' not in defines:
        names = [n for n in names if n not in ('embed_rows', 'norm_rows', 'swiglu_rows')]
    elif name == 'chunk.cu':
        names = [n for n in names if n in ('embed_rows', 'norm_rows', 'swiglu_rows')]
    cluster = 'SLICES' if 'CLUSTER' in text else '1'
    for kernel in names:
        text += (f'extern "C" void run_{kernel}(void** args, int x, int y, int z, int threads, '
                 f'int shared) {{\n    emu::launch([](void** a) {{ emu::call({kernel}, a); }}, '
                 f'args, x, y, z, threads, shared, {cluster});\n}}\n')
    key = hashlib.sha256((text + (HERE / 'device.h').read_text()).encode()).hexdigest()[:24]
    CACHE.mkdir(exist_ok=True)
    library = CACHE / f'{key}.so'
    if not library.exists():
        mine = CACHE / f'{key}-{os.getpid()}'  # another process may build the same
        source, made = mine.with_suffix('.cpp'), mine.with_suffix('.new')
        source.write_text(text)
        subprocess.run([COMPILER, '-O1', '-std=c++17', '-shared', '-fPIC', '-w', '-I', str(HERE),
                        '-fno-strict-aliasing', '-ffp-contract=off', '-o', str(made),
                        str(source)], check=True, capture_output=True, text=True)
        made.replace(library)
        source.unlink()
    return ctypes.CDLL(str(library))


class Toolbox:
    arch, multiprocessors, shared, clusters = 'sm_90', 2, 227 << 10, False

    def __init__(self, device, dtype) -> None:
        self._element = dtype.itemsize * 8

    def kernel(self, source: str, name: str, **defines: int):
        if source == 'sample.cu':
            defines.update(BLOCKS=1, **SAMPLE)
        library = build(source, {'ELEMENT': self._element, **defines})
        return types.SimpleNamespace(name=name, run=getattr(library, f'run_{name}'))

    def finish(self) -> None:
        pass


class Launch:
    def __init__(self, kernel, grid, block, args, shared=0, chained=True) -> None:
        self.kernel, self.block, self.shared = kernel, block, shared
        self.grid = (1,) if kernel.name == 'sample' else grid
        self.args = args
        self._values = [driver._packed(value) for value in args]
        self._pointers = (ctypes.c_void_p * max(1, len(args)))(
            *(ctypes.addressof(value) for value in self._values))

    def ask_ahead(self, weight, limit) -> None:
        pass

    def __call__(self) -> None:
        self.kernel.run(self._pointers, *(*self.grid, 1, 1)[:3], self.block, self.shared)


class Event:
    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass


def install(patch) -> None:
    """Put the emulator where the device would be; `patch` is pytest's monkeypatch."""
    for module in (decode, prefill, front, copies):
        patch.setattr(module, 'Launch', Launch)
    for module in (plan, copies):
        patch.setattr(module, 'Toolbox', Toolbox)
    patch.setattr(torch.cuda, 'Event', Event)
    patch.setattr(torch.cuda, 'synchronize', lambda device=None: None)
    patch.setattr(torch.Tensor, 'pin_memory', lambda self: self)
