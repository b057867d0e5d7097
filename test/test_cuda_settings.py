"""Settings of the sampler are changed and told in one launch, as on a CPU."""

from pathlib import Path
import shutil

import pytest
import torch

from flashrt_ros import sampling
from flashrt_ros.arena import Arena, Manifest
from flashrt_ros.errors import DeviceFault
from flashrt_ros.sampling import Sampling

pytestmark = pytest.mark.skipif(not shutil.which('g++'), reason='the emulated device needs g++')


@pytest.fixture
def pair(monkeypatch):
    """Return an arena, what asks it on an emulated device, and what asks it on a CPU."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import cuda_emulator

    from flashrt_ros.cuda import settings
    cuda_emulator.install(monkeypatch)
    monkeypatch.setattr(settings, 'Launch', cuda_emulator.Launch)
    monkeypatch.setattr(settings, 'Toolbox', cuda_emulator.Toolbox)
    arena = Arena(Manifest(sampling.buffers(50)), 4)
    return arena, settings.Settings(arena), sampling.HostSettings(arena)


def test_the_device_does_what_the_host_does(pair):
    arena, device, host = pair
    start = Sampling(0.75, 40, 0.5, 2 ** 64 - 3)
    for chosen, counter in (({}, None), ({'temperature': 0.0}, None), ({'top_p': 0.25}, None),
                            ({'top_k': 7}, 0), ({'seed': 2 ** 64 - 1}, 5), ({'seed': 1}, None),
                            ({'temperature': 1.5, 'top_p': 1.0, 'top_k': 0, 'seed': 0}, 2 ** 40)):
        found = []
        for settings in (device, host):
            sampling.write(arena, start, 12)
            settings.choose(chosen, counter)
            assert settings.answer() == (lambda s, n: (s.temperature, s.top_k, s.top_p, s.seed, n)
                                         )(*sampling.read(arena))
            found.append(arena.fixed.clone())
        assert torch.equal(*found)


def test_an_answer_is_that_of_its_question(pair):
    arena, device, _ = pair
    sampling.write(arena, Sampling(0.75, 40, 0.5, 7), 12)
    device.choose({'temperature': 0.25}, None)
    sampling.write(arena, Sampling(), 0)
    assert device.answer() == (0.25, 40, 0.5, 7, 12)
    device.choose({}, None)
    assert device.answer() == (0.0, 0, 1.0, 0, 0)


def test_a_device_that_does_not_say_is_a_fault(pair):
    _, device, _ = pair
    device._launch = lambda: None
    device.choose({}, None)
    with pytest.raises(DeviceFault, match='did not tell'):
        device.answer()
