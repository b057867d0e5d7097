"""The attention of a grid chunk on its own, for every kind of device, on an emulated one."""

import ctypes
from pathlib import Path
import shutil
import sys

import pytest
import torch

from flashrt_ros.cuda.chunk_attention import splits
from flashrt_ros.cuda.driver import _packed

pytestmark = pytest.mark.skipif(not shutil.which('g++'), reason='the emulated device needs g++')


def attention(q, k, v, position, count, group):
    """Return what rows [count heads D] of queries see of keys [.. kv heads D], in fp64."""
    heads, dim = q.shape[1], q.shape[2]
    k, v = (x[:position + count].double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum('thd,shd->hts', q[:count].double(), k) * dim ** -0.5
    ahead = torch.arange(position + count) > position + torch.arange(count)[:, None]
    weights = scores.masked_fill(ahead, float('-inf')).softmax(-1)
    assert heads == weights.shape[0]
    return torch.einsum('hts,shd->thd', weights, v)


def run(kernel, grid, block, args, shared):
    values = [_packed(value) for value in args]
    pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(v) for v in values))
    kernel(pointers, *grid, block, shared)


@pytest.mark.parametrize(('size', 'group', 'split', 'most', 'position', 'count'), [
    (32, 4, 256, 4, 0, 1), (32, 4, 256, 4, 300, 31), (32, 3, 128, 2, 161, 32),
    (64, 4, 128, 2, 128, 64), (64, 4, 512, 2, 400, 33)])
def test_the_attention_for_hopper(size, group, split, most, position, count):
    sys.path.insert(0, str(Path(__file__).parent))
    import cuda_emulator
    kv, dim, rows = 2, 256, 128
    library = cuda_emulator.build('chunk_attend_hopper.cu', {
        'ELEMENT': 16, 'HK': kv, 'GROUP': group, 'D': dim, 'SPLIT': split, 'MOST': most,
        'SIZE': size, 'KEYS': 80, 'ROTARY': 64})
    generator = torch.Generator().manual_seed(position)
    capacity = position + size
    k, v, q = (torch.randn(n, h, dim, generator=generator).bfloat16()
               for n, h in ((capacity, kv), (capacity, kv), (size, kv * group)))
    k[position + count:] = v[position + count:] = float('nan')
    packed = q.view(size, kv, group, dim).transpose(0, 1).contiguous()
    partial = torch.full((most, kv, size * group, dim), float('nan'))
    marks = torch.full((most, kv, size * group, 2), float('nan'))
    run(library.run_attend_rows, (-(-size * group // rows), kv, most), 384, (
        packed, k, v, torch.tensor(count), torch.tensor(position), partial, marks), 227 << 10)
    number = min(most, -(-(position + size) // split))
    split = -(-(position + size) // (number * 80)) * 80
    got = torch.zeros(size, kv * group, dim, dtype=torch.float64)
    for t in range(count):
        used = (position + t) // split + 1
        top, total = marks[:used, :, t * group:(t + 1) * group].double().unbind(-1)
        share = torch.exp2(top - top.amax(0))
        part = partial[:used, :, t * group:(t + 1) * group].double()
        got[t] = ((part * share[..., None]).sum(0)
                  / (total * share).sum(0)[..., None]).flatten(0, 1)
    expected = attention(q, k, v, position, count, group)
    assert (got[:count] - expected).norm() <= 4e-3 * expected.norm()


def test_a_plan_for_hopper_differs_by_rounding_alone(monkeypatch):
    """Three query heads over one of 256, against the kernel of other devices."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import cuda_emulator
    from test_cuda_kernels import differences, plans

    from flashrt_ros.models.qwen3_5 import Qwen35
    monkeypatch.setitem(Qwen35.presets, 'wide', {
        **Qwen35.presets['tiny'], 'num_hidden_layers': 2, 'num_key_value_heads': 1,
        'num_attention_heads': 3, 'head_dim': 256})
    both = []
    for arch in ('sm_89', 'sm_90a'):
        monkeypatch.setattr(cuda_emulator.Toolbox, 'arch', arch)
        both.append(plans(monkeypatch, 'bfloat16', 'random:wide')[0])
        [attend] = [op for op in both[-1]._prefills[32].ops
                    if hasattr(op, 'kernel') and op.kernel.name == 'attend_rows']
        assert attend.block == (384 if arch == 'sm_90a' else 128)
        for count in (20, 100):
            both[-1].append([(7 * i) % 512 for i in range(count)])
    found = differences(*both)
    assert 0 < max(found.values()) < 2e-2, found


def test_the_capacity_decides_no_bit_of_a_join(monkeypatch):
    """With room for few splits or many: threads share them alike."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from test_cuda_kernels import plans

    from flashrt_ros.models.qwen3_5 import Qwen35
    monkeypatch.setattr('flashrt_ros.cuda.chunk_attention.LEAST', 41)
    monkeypatch.setitem(Qwen35.presets, 'wide', {
        **Qwen35.presets['tiny'], 'num_hidden_layers': 2, 'num_key_value_heads': 1,
        'num_attention_heads': 3, 'head_dim': 256})
    states = []
    for capacity in (130, 512):
        plan = plans(monkeypatch, 'float32', 'random:wide', capacity)[0]
        for count in (98, 20, 12):
            plan.append([(7 * i) % 512 for i in range(count)])
        states.append(plan.arena.fixed)
    assert torch.equal(*states)


@pytest.mark.parametrize(('size', 'kv', 'group', 'most'), [
    (32, 4, 4, 32), (128, 4, 4, 8), (512, 4, 4, 2), (32, 2, 4, 64), (512, 2, 4, 4),
    (512, 4, 6, 4), (32, 1, 1, 64), (512, 16, 4, 1)])
def test_splits_fill_whole_waves(size, kv, group, most):
    assert splits(size, kv, group) == most
