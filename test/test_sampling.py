"""The sampler: counter-based numbers, thresholds, settings that live in the arena."""

import numpy as np
import pytest
import torch

from flashrt_ros import sampling
from flashrt_ros.arena import Arena, Manifest
from flashrt_ros.errors import InvalidArgument
from flashrt_ros.sampling import Sampling

VOCABULARY = 50


@pytest.fixture
def arena():
    arena = Arena(Manifest(sampling.buffers(VOCABULARY)), 1)
    torch.manual_seed(3)
    arena['logits'].copy_(torch.randn(VOCABULARY) * 2)
    return arena


@pytest.mark.parametrize('seed', [0, 1, 2 ** 32 - 1, 2 ** 63 + 5, 2 ** 64 - 1])
@pytest.mark.parametrize('counter', [0, 1, 2 ** 32, 2 ** 40 + 3])
def test_uniform_is_a_function_of_seed_and_counter(seed, counter):
    value = sampling.uniform(seed, counter)
    assert 0.0 <= value < 1.0
    assert value == sampling.uniform(seed, counter)
    assert value != sampling.uniform(seed, counter + 1)


def test_uniform_known_answers():
    """The published answer of philox4x32-10 for key 0 and counter 0."""
    first, second = 0x6627e8d5, 0xe169c58d
    assert sampling.uniform(0, 0) == ((first << 21) | (second >> 11)) * 2.0 ** -53


def test_uniform_is_uniform():
    values = np.array([sampling.uniform(11, n) for n in range(20_000)])
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    chi = ((counts - 1000) ** 2 / 1000).sum()
    assert chi < 45.3  # 0.1 % of chi-square with 19 degrees of freedom lies above 43.8


def test_settings_round_trip(arena):
    settings = Sampling(0.75, 40, 0.5, 2 ** 64 - 3)
    sampling.write(arena, settings, 12)
    assert sampling.read(arena) == (settings, 12)


def test_what_is_not_chosen_stays(arena):
    sampling.write(arena, Sampling(0.75, 40, 0.5, 7), 12)
    sampling.choose(arena, {'temperature': 0.25})
    assert sampling.read(arena) == (Sampling(0.25, 40, 0.5, 7), 12)
    sampling.choose(arena, {'seed': 2 ** 64 - 3}, 0)
    assert sampling.read(arena) == (Sampling(0.25, 40, 0.5, 2 ** 64 - 3), 0)


def test_settings_are_told_as_of_when_they_were_chosen(arena):
    settings = sampling.HostSettings(arena)
    sampling.write(arena, Sampling(0.75, 40, 1.0, 2 ** 64 - 3), 12)
    settings.choose({'top_p': 0.5}, None)
    sampling.write(arena, Sampling(), 0)
    assert settings.answer() == (0.75, 40, 0.5, 2 ** 64 - 3, 12)


def test_the_state_of_a_plain_plan_need_not_lie_in_memory_of_the_host(arena):
    """The torch form on a device is what a CUDA plan is held against."""
    sampling.HostSettings(Arena(arena.manifest, 4, 'meta'))


def test_greedy_takes_the_lowest_of_equals(arena):
    arena['logits'].fill_(1.0)
    arena['logits'][7] = arena['logits'][9] = 3.0
    assert sampling.sample(arena) == 7


def draws(arena, settings, count=4000):
    found = []
    for counter in range(count):
        sampling.write(arena, settings, counter)
        found.append(sampling.sample(arena))
    return np.bincount(found, minlength=VOCABULARY) / count


def test_frequencies_follow_the_softmax(arena):
    expected = torch.softmax(arena['logits'].double() / 1.3, 0).numpy()
    assert abs(draws(arena, Sampling(1.3, seed=5)) - expected).max() < 0.03


def test_top_k_keeps_the_largest(arena):
    best = set(arena['logits'].topk(3).indices.tolist())
    assert set(np.flatnonzero(draws(arena, Sampling(3.0, top_k=3), 600))) == best


def test_top_k_ties_go_to_the_lower_id(arena):
    arena['logits'].fill_(0.0)
    assert set(np.flatnonzero(draws(arena, Sampling(1.0, top_k=4), 300))) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it(arena):
    weights = torch.softmax(arena['logits'].double(), 0)
    order = weights.argsort(descending=True)
    kept = int((weights[order].cumsum(0) < 0.6).sum()) + 1
    expected = set(order[:kept].tolist())
    assert set(np.flatnonzero(draws(arena, Sampling(1.0, top_p=0.6), 2000))) == expected


def test_small_top_p_is_greedy(arena):
    assert set(np.flatnonzero(draws(arena, Sampling(1.0, top_p=1e-6), 50))) == {
        int(arena['logits'].argmax())}


def test_impossible_tokens_are_never_drawn(arena):
    arena['logits'][10:] = -torch.inf
    assert np.flatnonzero(draws(arena, Sampling(2.0), 2000)).max() < 10


def test_sampling_changes_nothing(arena):
    sampling.write(arena, Sampling(0.9, 5, 0.9, 1), 4)
    before = arena.storage.clone()
    sampling.sample(arena)
    assert torch.equal(arena.storage, before)


def test_the_least_top_p_is_one_in_the_state_too(arena):
    sampling.write(arena, Sampling(1.0, top_p=2.0 ** -149), 0)
    assert sampling.read(arena)[0].top_p == 2.0 ** -149


@pytest.mark.parametrize('bad', [
    {'temperature': -1.0}, {'temperature': float('nan')}, {'temperature': float('inf')},
    {'top_p': 0.0}, {'top_p': 1e-60}, {'top_p': 1.5}, {'top_p': float('nan')}, {'top_k': -1},
    {'top_k': 2 ** 31}, {'seed': -1}, {'seed': 2 ** 64}])
def test_bad_settings_are_refused_with_the_range(bad):
    with pytest.raises(InvalidArgument, match=next(iter(bad))):
        Sampling(**bad)
