"""Choosing a device, and refusing one with the reason, on machines with and without CUDA."""

import subprocess
import sys

import pytest
import torch

from flashrt_ros.arena import Arena
from flashrt_ros.config import choose_device
from flashrt_ros.cuda import available
from flashrt_ros.errors import Capacity, DeviceFault, InvalidArgument
from flashrt_ros.plan import manifest_of

GIB = 1 << 30


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, 'cuda', None)


@pytest.fixture
def old_card(monkeypatch):
    monkeypatch.setattr(torch.version, 'cuda', '13.0')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: (6, 1))
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device=None: 'an old card')


def memory(monkeypatch, free: int) -> None:
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device=None: (free, free))


def test_auto_serves_on_the_cpu_and_says_why(no_cuda):
    said = []
    assert choose_device('auto', said.append) == 'cpu'
    assert 'running on the CPU' in said[0] and 'without CUDA' in said[0]


def test_cuda_is_refused_with_the_reason(no_cuda):
    with pytest.raises(DeviceFault, match='without CUDA.*Configure device cpu'):
        choose_device('cuda')


def test_no_driver_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, 'cuda', '13.0')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(DeviceFault, match='driver for CUDA 13.0'):
        choose_device('cuda')


def test_a_driver_that_does_not_answer_is_named(monkeypatch):
    def broken():
        raise RuntimeError('CUDA driver version is insufficient\nmore')
    monkeypatch.setattr(torch.version, 'cuda', '13.0')
    monkeypatch.setattr(torch.cuda, 'is_available', broken)
    with pytest.raises(DeviceFault, match='driver version is insufficient'):
        choose_device('cuda')


def test_an_old_card_is_refused(old_card):
    with pytest.raises(DeviceFault, match='an old card has compute capability 6.1'):
        choose_device('cuda')
    assert choose_device('auto') == 'cpu'


def test_unknown_names_are_refused():
    with pytest.raises(InvalidArgument):
        choose_device('tpu')


def test_what_fits_is_let_through(monkeypatch):
    memory(monkeypatch, 40 * GIB)
    available.check_memory('random:qwen3.5-9b', 'auto', 16384, GIB)


def test_a_context_that_does_not_fit_is_refused_with_one_that_does(monkeypatch):
    memory(monkeypatch, 4 * GIB)
    with pytest.raises(Capacity) as refusal:
        available.check_memory('random:qwen3.5-0.8b', 'auto', 250_000, GIB // 2)
    words = str(refusal.value)
    fits = int(words.split('a context of ')[-1].split()[0])
    assert 1000 < fits < 250_000
    available.check_memory('random:qwen3.5-0.8b', 'auto', fits, GIB // 2)


def test_a_model_that_does_not_fit_at_all_is_refused(monkeypatch):
    memory(monkeypatch, 8 * GIB)
    with pytest.raises(Capacity, match='no context fits'):
        available.check_memory('random:qwen3.5-9b', 'auto', 1024, GIB)


def test_a_spec_that_makes_no_sense_is_left_to_the_loader(monkeypatch):
    memory(monkeypatch, 8 * GIB)
    available.check_memory('random:nonsense', 'auto', 1024, GIB)
    available.check_memory('/no/such/directory', 'auto', 1024, GIB)


def test_the_engine_stays_light():
    """Importing it loads neither the CUDA bindings nor anything of the CUDA room."""
    code = ('import sys, torch; before = set(sys.modules); import flashrt_ros.engine; '
            'print([m for m in set(sys.modules) - before '
            'if m.startswith(("cuda", "cupy", "flashrt_ros.cuda"))])')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '[]'


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
@pytest.mark.parametrize('spec', ['tiny', 'qwen3.5-0.8b', 'qwen3.5-9b', 'qwen3.5-27b'])
def test_the_work_space_that_is_reckoned_with_holds_all_of_it(spec, dtype):
    """Ladder, both kinds of steps, and the largest bucket; what is small is rounded up."""
    from flashrt_ros.cuda import decode, plan, prefill
    model, context = available.skeleton(f'random:{spec}', dtype), 32768
    room = prefill.Room(torch.device('meta'))
    for size in (512, 128, 32):
        prefill.plan_room(room, model, context, size)
    arena = Arena(manifest_of(model, model.config.vocab_size), context, 'meta')
    spaces = [*decode.room_sizes(model, context, 1), *decode.room_sizes(model, context, 4)]
    made = room.nbytes + 4 * sum(spaces) + decode.Ladder(arena, 4).blocks.nbytes
    made += sum(t.nbytes for t in model.tables(context))
    assert made < plan.work_bytes(model, context) < made + (32 << 20)
