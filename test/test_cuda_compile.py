"""Every CUDA source compiles for everything robots carry; no GPU is needed."""

import os
from pathlib import Path
import re

import pytest

from flashrt_ros.cuda import compiler, nvrtc
from flashrt_ros.errors import DeviceFault
from flashrt_ros.user_cache import user_cache

try:
    NVRTC, WHY = nvrtc.compiler(), ''
except DeviceFault as fault:
    NVRTC, WHY = None, str(fault)
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)

ARCHITECTURES = ['sm_87', 'sm_89', 'sm_90a', 'sm_110', 'sm_120']  # Orin, Ada, Hopper, Thor, 5090
GEMV = {'K': 1024, 'N': 1024, 'ROWS': 2, 'UNROLL': 4, 'BLOCKS': 2, 'HEAD': 128, 'CHANNELS': 512,
        'TAPS': 4}
HEADS = {'HK': 16, 'HV': 32, 'DK': 128, 'DV': 128, 'DVS': 32}
ATTENTION = {'HK': 2, 'GROUP': 4, 'D': 256, 'SPLIT': 128, 'MOST': 32, 'NEAR': 4608,
             'ROTARY': 64}
BLOCK = {'TOKENS': 4}
VARIANTS = [
    ('gemv.cu', {**GEMV, 'PROLOGUE': 1, 'EPILOGUE': 2}),
    ('gemv.cu', {**GEMV, 'PROLOGUE': 2, 'EPILOGUE': 1, 'PARTS': 4}),
    ('gemv.cu', {**GEMV, **BLOCK, 'PROLOGUE': 1, 'EPILOGUE': 2, 'THREADS': 512}),
    ('gemv.cu', {**GEMV, 'PROLOGUE': 1, 'EPILOGUE': 3}),
    ('gemv.cu', {**GEMV, 'PROLOGUE': 1, 'EPILOGUE': 4}),
    ('delta.cu', HEADS),
    ('delta.cu', {**HEADS, **BLOCK}),
    ('attend.cu', ATTENTION),
    ('attend.cu', {**ATTENTION, **BLOCK}),
    ('sample.cu', {'V': 248320, 'HIDDEN': 1024, 'BLOCKS': 8}),
    ('chunk.cu', {'HIDDEN': 1024, 'MLP': 3584}),
    ('chunk.cu', {**HEADS, 'CHANNELS': 8192, 'TAPS': 4}),
    ('chunk_delta.cu', {**HEADS, 'CHANNELS': 8192, 'TAPS': 4, 'SUB': 64, 'RESIDENT': 2}),
    ('chunk_scan.cu', {**HEADS, 'CHANNELS': 8192, 'TAPS': 4, 'SUB': 64, 'STAGES': 2}),
    *(('short_delta.cu', {**HEADS, 'CHANNELS': 8192, 'TAPS': 4, 'DVS': columns, 'SPLIT': split})
      for columns, split in ((32, 4), (128, 1))),
    ('chunk_attend.cu', {**ATTENTION, 'SIZE': 32, 'KEYS': 64, 'SHARED': 4}),
    *(('chunk_product.cu', {'K': 4096, 'N': 12288, 'ROWS': 96, 'SIZE': 32, 'PARTS': 1, 'STAGES': 3,
                           'EPILOGUE': epilogue}) for epilogue in range(3)),
    ('chunk.cu', {'HIDDEN': 1024, 'MLP': 3584, 'PARTS': 4}),
    ('copy.cu', {}),
]
HOPPER = [('chunk_attend_hopper.cu', {**ATTENTION, 'SIZE': 512, 'KEYS': 80})]


@pytest.mark.parametrize(('arch', 'element'), [
    *((arch, 16) for arch in ARCHITECTURES), ('sm_87', 32), ('sm_120', 32)])
def test_every_source_compiles(arch, element, tmp_path):
    if int(arch[3:].rstrip('a')) not in NVRTC.architectures:
        pytest.skip(f'this NVRTC does not know {arch}')
    for source, defines in VARIANTS + HOPPER * (arch == 'sm_90a'):
        code = compiler.compile_source(source, {'ELEMENT': element, **defines}, arch, tmp_path)
        assert code[:4] == b'\x7fELF'


def test_all_sources_are_covered():
    covered = {name for name, _ in VARIANTS + HOPPER}
    assert covered == {p.name for p in compiler.SOURCES.glob('*.cu')}


def test_compiled_code_is_kept(tmp_path):
    first = compiler.compile_source('copy.cu', {'ELEMENT': 16}, 'sm_90', tmp_path)
    [kept] = tmp_path.iterdir()
    kept.write_bytes(b'other')
    assert compiler.compile_source('copy.cu', {'ELEMENT': 16}, 'sm_90', tmp_path) == b'other'
    assert first != b'other' and isinstance(kept, Path)


def test_a_user_without_a_home_compiles_without_keeping(monkeypatch, tmp_path):
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    monkeypatch.setattr(os.path, 'expanduser', lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert user_cache() is None
    assert compiler.compile_source('copy.cu', {'ELEMENT': 16}, 'sm_90')
    assert not list(tmp_path.iterdir())


def test_a_source_that_is_refused_says_why(tmp_path):
    with pytest.raises(DeviceFault, match='gemv.cu'):
        compiler.compile_source('gemv.cu', {'ELEMENT': 16}, 'sm_90', tmp_path)


def test_both_bindings_of_nvrtc_give_code_and_reasons(tmp_path):
    """Whichever are installed; CI has cuda-bindings, a robot may have CuPy."""
    seen = 0
    for kind in (nvrtc._Bindings, nvrtc._CuPy):
        try:
            compiler_ = kind()
        except (ImportError, OSError, RuntimeError):
            continue
        seen += 1
        code = compiler_.compile('x.cu', 'extern "C" __global__ void f() {}',
                                 ['--gpu-architecture=sm_90'])
        assert code[:4] == b'\x7fELF'
        with pytest.raises(DeviceFault, match='nonsense'):
            compiler_.compile('x.cu', 'nonsense', ['--gpu-architecture=sm_90'])
    assert seen


def test_what_an_earlier_kernel_writes_is_not_read_ahead_of_the_wait():
    """Compilers read what is `const __restrict__` whenever they like; see common.cuh."""
    constant, written = {'weight', 'taps', 'norm'}, {
        'out', 'q_units', 'k_units', 'w_units', 'p_units', 'u_tiles', 'factors'}
    seen = 0
    for path in compiler.SOURCES.glob('*.cu'):
        for const, name in re.findall(r'(const )?\w+\* __restrict__ (\w+)', path.read_text()):
            assert name in (constant if const else written), f'{path.name}: {name}'
            seen += 1
    assert seen > 10
