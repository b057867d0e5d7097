"""Products of a short bucket on an emulated device, against torch."""

import ctypes
from pathlib import Path
import shutil

import pytest
import torch

from flashrt_ros.cuda import short_product
from flashrt_ros.cuda.short_product import PARTIAL, ShortProduct, STORE, SWIGLU

pytestmark = pytest.mark.skipif(not shutil.which('g++'), reason='the emulated device needs g++')
ROOM = 227 << 10


def run(patch, rows: int, depth: int, epilogue: int, room: int = ROOM, size: int = 32):
    """Return the output, and what torch makes of the same inputs."""
    patch.syspath_prepend(str(Path(__file__).parent))
    import cuda_emulator
    torch.manual_seed(rows + depth)
    weight = torch.randn(rows, depth).bfloat16()
    x = torch.randn(size, depth).bfloat16()
    product = ShortProduct(weight, size, epilogue, room)
    outputs = rows // 2 if epilogue == SWIGLU else rows
    out = torch.full((product.parts, size, outputs), float('nan'),
                     dtype=torch.float32 if epilogue == PARTIAL else torch.bfloat16)
    kernel = cuda_emulator.Toolbox(None, torch.bfloat16).kernel(
        'chunk_product.cu', 'chunk_product', **product.defines)
    cuda_emulator.Launch(kernel, product.grid, 256,
                         (weight, x, out, None, ctypes.c_int64(0)), product.shared)()
    exact = x.double() @ weight.double().t()
    if epilogue == SWIGLU:
        exact = torch.nn.functional.silu(exact[:, :outputs]) * exact[:, outputs:]
    return out, exact, product


@pytest.mark.parametrize(('rows', 'depth'), [
    (64, 64), (36, 1000), (132, 264), (4100, 328), (96, 2048), (2112, 256)])
@pytest.mark.parametrize('epilogue', [STORE, SWIGLU, PARTIAL])
def test_every_shape(monkeypatch, rows, depth, epilogue):
    out, exact, product = run(monkeypatch, rows, depth, epilogue)
    off = (out.double().sum(0) - exact).norm() / exact.norm()
    assert off < (1e-6 if epilogue == PARTIAL else 3e-3), (product.defines, off)
    if epilogue == PARTIAL:
        assert (product.parts > 1) == (rows < 4100)


@pytest.mark.parametrize(('rows', 'epilogue', 'parts'), [(4160, STORE, 1), (2112, PARTIAL, 3)])
def test_shared_memory_decides_no_bit(monkeypatch, rows, epilogue, parts):
    roomy, _, wide = run(monkeypatch, rows, 1056, epilogue)
    tight, _, narrow = run(monkeypatch, rows, 1056, epilogue, 99 << 10)
    assert (wide.rows, narrow.rows, wide.parts) == (64, 32, parts) and torch.equal(roomy, tight)
    assert narrow.shared <= 99 << 10


@pytest.mark.parametrize('room', [99 << 10, 163 << 10, ROOM])
def test_blocks_fit_what_robots_carry(room):
    for rows, depth in ((8224, 1024), (12352, 4096), (1024, 3584), (4096, 12288), (64, 64)):
        for epilogue in (STORE, SWIGLU, PARTIAL):
            weight = torch.empty(rows, depth, device='meta')
            product = ShortProduct(weight, short_product.SHORT, epilogue, room)
            assert product.shared <= room
            assert product.grid[0] * product.rows >= rows
            assert product.stages > 1 or depth <= product.parts * short_product.SPAN


def test_dead_tokens_stay_among_themselves(monkeypatch):
    """Whatever stands in a token that is not live, the others keep their bits."""
    patch = torch.Tensor.bfloat16
    clean, _, _ = run(monkeypatch, 64, 512, STORE)

    def spoiled(tensor):
        made = patch(tensor)
        if made.shape == (32, 512):
            made[5:] = float('nan')
        return made

    monkeypatch.setattr(torch.Tensor, 'bfloat16', spoiled)
    dirty, _, _ = run(monkeypatch, 64, 512, STORE)
    assert torch.equal(clean[:, :5], dirty[:, :5]) and dirty[:, 5:].isnan().all()
