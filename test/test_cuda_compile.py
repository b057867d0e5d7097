"""Every CUDA source compiles for everything robots carry; no GPU is needed."""

from pathlib import Path

import pytest

from flashrt_ros.cuda import compiler

nvrtc = pytest.importorskip(
    'cuda.bindings.nvrtc', reason='NVRTC is not installed: pip install cuda-bindings '
    'nvidia-cuda-nvrtc', exc_type=ImportError)

ARCHITECTURES = ['sm_87', 'sm_89', 'sm_90', 'sm_110', 'sm_120']  # Orin, Ada, Hopper, Thor, 5090
GEMV = {'K': 1024, 'N': 1024, 'ROWS': 2, 'UNROLL': 4, 'BLOCKS': 2, 'HEAD': 128, 'CHANNELS': 512,
        'TAPS': 4}
HEADS = {'HK': 16, 'HV': 32, 'DK': 128, 'DV': 128, 'DVS': 32}
ATTENTION = {'HK': 2, 'GROUP': 4, 'D': 256, 'SPLIT': 256, 'ROTARY': 64}
VARIANTS = [
    ('gemv.cu', {**GEMV, 'PROLOGUE': 1, 'EPILOGUE': 2}),
    ('gemv.cu', {**GEMV, 'PROLOGUE': 2, 'EPILOGUE': 1}),
    ('gemv.cu', {**GEMV, 'PROLOGUE': 1, 'EPILOGUE': 3}),
    ('gemv.cu', {**GEMV, 'PROLOGUE': 1, 'EPILOGUE': 4}),
    ('delta.cu', HEADS),
    ('attend.cu', ATTENTION),
    ('sample.cu', {'V': 248320, 'HIDDEN': 1024, 'BLOCKS': 8}),
    ('chunk.cu', {'HIDDEN': 1024, 'MLP': 3584}),
    ('chunk.cu', {**HEADS, 'CHANNELS': 8192, 'TAPS': 4}),
    ('chunk_delta.cu', {**HEADS, 'CHANNELS': 8192, 'TAPS': 4, 'SUB': 64}),
    ('chunk_scan.cu', {**HEADS, 'CHANNELS': 8192, 'TAPS': 4, 'SUB': 64, 'STAGES': 2}),
    ('chunk_attend.cu', {**ATTENTION, 'SIZE': 32}),
    ('copy.cu', {}),
]


def installed() -> bool:
    """Whether NVRTC itself is there, which the bindings find late."""
    try:
        return not int(nvrtc.nvrtcVersion()[0])
    except (RuntimeError, OSError):
        return False


@pytest.mark.parametrize(('arch', 'element'), [
    *((arch, 16) for arch in ARCHITECTURES), ('sm_87', 32), ('sm_120', 32)])
def test_every_source_compiles(arch, element, tmp_path):
    if not installed():
        pytest.skip('the NVRTC library is not installed: pip install nvidia-cuda-nvrtc')
    known = nvrtc.nvrtcGetSupportedArchs()[-1]
    if int(arch[3:]) not in known:
        pytest.skip(f'this NVRTC does not know {arch}')
    for source, defines in VARIANTS:
        code = compiler.compile_source(source, {'ELEMENT': element, **defines}, arch, tmp_path)
        assert code[:4] == b'\x7fELF'


def test_all_sources_are_covered():
    assert {name for name, _ in VARIANTS} == {p.name for p in compiler.SOURCES.glob('*.cu')}


def test_compiled_code_is_kept(tmp_path):
    if not installed():
        pytest.skip('the NVRTC library is not installed: pip install nvidia-cuda-nvrtc')
    first = compiler.compile_source('copy.cu', {'ELEMENT': 16}, 'sm_90', tmp_path)
    [kept] = tmp_path.iterdir()
    kept.write_bytes(b'other')
    assert compiler.compile_source('copy.cu', {'ELEMENT': 16}, 'sm_90', tmp_path) == b'other'
    assert first != b'other' and isinstance(kept, Path)


def test_a_source_that_is_refused_says_why(tmp_path):
    if not installed():
        pytest.skip('the NVRTC library is not installed: pip install nvidia-cuda-nvrtc')
    from flashrt_ros.errors import DeviceFault
    with pytest.raises(DeviceFault, match='gemv.cu'):
        compiler.compile_source('gemv.cu', {'ELEMENT': 16}, 'sm_90', tmp_path)
