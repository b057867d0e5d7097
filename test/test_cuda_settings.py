"""Settings that come with the launch of a first token do what settings in the state do."""

from pathlib import Path
import shutil

import pytest
from test_cuda_kernels import plans
import torch

from flashrt_ros import sampling
from flashrt_ros.errors import DeviceFault
from flashrt_ros.sampling import Sampling

pytestmark = pytest.mark.skipif(not shutil.which('g++'), reason='the emulated device needs g++')
START = Sampling(0.75, 40, 0.5, 2 ** 64 - 3)


@pytest.fixture(scope='module', params=[4096, 24], ids=['listed', 'many'])
def plan(request):
    """Return a plan at position 3; see test_cuda_kernels.sampling_plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import cuda_emulator
        patch.setitem(cuda_emulator.SAMPLE, 'LIST', request.param)
        made = plans(patch, 'float32')[0]
        made.append([1, 2, 3])
        yield made


def told(arena):
    settings, counter = sampling.read(arena)
    return settings.temperature, settings.top_k, settings.top_p, settings.seed, counter


@pytest.mark.parametrize(('chosen', 'counter'), [
    ({}, None), ({'temperature': 0.0}, None), ({'top_p': 0.25}, None), ({'top_k': 7}, 0),
    ({'seed': 2 ** 64 - 1}, 5),
    ({'temperature': 1.5, 'top_p': 1.0, 'top_k': 0, 'seed': 0}, 2 ** 40),
    ({'temperature': 1.25, 'top_p': 1.0}, 3), ({'top_k': 0}, None), ({'top_k': 600}, None)])
def test_a_step_is_that_of_a_state_with_these_settings(plan, chosen, counter):
    arena = plan.arena
    sampling.write(arena, START, 12)
    before = arena.fixed.clone()
    plan.settings.choose(chosen, counter)
    token = plan.step()
    after, position = arena.fixed.clone(), arena.position

    arena.fixed.copy_(before)
    arena.mirror = 3
    plan.arena['position'].fill_(3)
    sampling.choose(arena, chosen, counter)
    assert plan.settings.answer() == told(arena)
    assert sampling.sample(arena) == token
    plan._next = -1
    assert plan.step() == token
    assert arena.position == position and torch.equal(arena.fixed, after)
    arena.fixed.copy_(before)
    arena.mirror = 3
    plan.arena['position'].fill_(3)


def test_they_are_those_of_one_step(plan):
    arena = plan.arena
    sampling.write(arena, START, 12)
    plan.settings.choose({'temperature': 0.0}, 4)
    plan.step()
    assert plan.settings.answer() == (0.0, 40, 0.5, 2 ** 64 - 3, 4)
    sampling.write(arena, START, 12)
    plan.step()
    assert told(arena) == (0.75, 40, 0.5, 2 ** 64 - 3, 13)
    assert plan.settings.answer() == (0.0, 40, 0.5, 2 ** 64 - 3, 4)
    arena.set_position(0)
    plan.settings.choose({'temperature': 1.0}, None)
    with pytest.raises(Exception, match='at least one folded token'):
        plan.step()
    arena.set_position(3)
    plan.step()
    assert told(arena)[0] == 0.75, 'a step that was refused takes its settings with it'
    arena.set_position(3)


def test_a_draft_waits_for_the_step_that_takes_them(plan):
    sampling.write(plan.arena, START, 12)
    plan.settings.choose({'temperature': 0.0}, None)
    assert plan.verify([1, 2], lambda token: None) == 1
    assert told(plan.arena) == (0.0, 40, 0.5, 2 ** 64 - 3, 13)
    plan.arena.set_position(3)


def test_a_device_that_does_not_say_is_a_fault(plan):
    plan.settings.choose({}, None)
    with pytest.raises(DeviceFault, match='did not tell'):
        plan.settings.answer()
    assert not plan.arena.valid
    plan.arena.valid = True


@pytest.mark.parametrize('error', [RuntimeError('lost'), DeviceFault('lost')])
def test_a_lost_launch_makes_the_state_invalid(plan, monkeypatch, error):
    def fail():
        raise error
    monkeypatch.setattr(plan, '_sample_first', fail)
    plan.settings.choose({}, None)
    with pytest.raises(DeviceFault, match='clean up'):
        plan.step()
    assert not plan.arena.valid
    plan.arena.valid = True
    plan.step()
    plan.arena.set_position(3)
