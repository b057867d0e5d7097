"""The delta rule of a grid chunk on the emulated device, against the rule token by token."""

from __future__ import annotations

from pathlib import Path
import shutil

import pytest
import torch

from flashrt_ros.models.layers.delta_net import GatedDeltaNet

pytestmark = pytest.mark.skipif(not shutil.which('g++'), reason='the emulated device needs g++')


class Case:
    """Random inputs of one layer; what no kernel may read or write is NaN."""

    def __init__(self, patch, size: int, heads: tuple[int, int, int], decay: float = 1.0,
                 dtype: torch.dtype = torch.bfloat16, shared: int = 227 << 10,
                 seed: int = 0, clusters: bool = False) -> None:
        patch.syspath_prepend(str(Path(__file__).parent))
        import cuda_emulator

        from flashrt_ros.cuda import prefill
        from flashrt_ros.cuda.delta_rule import DeltaRule, Operands
        cuda_emulator.install(patch)
        generator = torch.Generator().manual_seed(seed)
        keys, values, dim = heads
        self.size, self.dtype = size, dtype
        self.layer = layer = GatedDeltaNet(0, 64, keys, values, dim, dim, 4, 1e-6)
        self.width = layer.channels + values * dim + 2 * values
        self.draw = lambda *shape: torch.randn(*shape, generator=generator)
        self.count = torch.zeros((), dtype=torch.int64)
        self.of = Operands(
            torch.full((size, self.width), torch.nan, dtype=dtype), self.count,
            self.draw(3, layer.channels).to(dtype), self.draw(4, layer.channels) * 0.5,
            -decay * self.draw(values).exp(), self.draw(values), self.draw(values, dim, dim),
            self.draw(dim), 1e-6, torch.full((size, values * dim), torch.nan, dtype=dtype))
        tools, room = cuda_emulator.Toolbox(None, dtype), prefill.Room(torch.device('cpu'))
        self.rule = DeltaRule(layer, dtype, size, shared, clusters)
        self.rule.plan(room)
        for space in room._store.values():
            if space.is_floating_point():
                space.fill_(torch.nan)
        self.launches = []

        def launch(source, name, grid, block, args, shared=0, **defines) -> None:
            kernel = tools.kernel(source, name, **defines)
            self.launches.append(cuda_emulator.Launch(kernel, grid, block, args, shared))

        self.rule.queue(launch, room, self.of)

    def fold(self, live: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fold `live` fresh tokens; return what output, state and window should be."""
        mixed = torch.full((self.size, self.width), torch.nan)
        mixed[:live] = self.draw(live, self.width)
        self.of.mixed.copy_(mixed)
        self.of.out.fill_(torch.nan)
        self.count.fill_(live)
        *expected, self.lengths = reference(self.layer, self.of, live)
        for launch in self.launches:
            launch()
        return tuple(expected)


def reference(layer: GatedDeltaNet, of, live: int) -> tuple[torch.Tensor, ...]:
    """
    Fold token by token in fp64; return output, state, window and the lengths before the norm.

    Outputs are compared as they were before it: it lifts what is small, and its error.
    """
    values, dim = layer.value_heads, layer.key_dim
    state = of.state.double()
    x = torch.cat((of.window, of.mixed[:live, :layer.channels])).double()
    y = sum(x[i:i + live] * of.taps[i].double() for i in range(4))
    y = y * torch.sigmoid(y)
    q, k, v = y.split((layer.key_heads * dim, layer.key_heads * dim, values * dim), -1)
    group = values // layer.key_heads
    q, k = (part.view(live, -1, dim) / (part.view(live, -1, dim).square().sum(-1, True)
                                        + 1e-6).sqrt() for part in (q, k))
    q, k = (part.repeat_interleave(group, 1) for part in (q * dim ** -0.5, k))
    v = v.view(live, values, dim)
    b, a = of.mixed[:live, -2 * values:].double().chunk(2, -1)
    g = torch.nn.functional.softplus(a + of.dt_bias.double()) * of.neg_a.double()
    out = torch.empty_like(v)
    for t in range(live):
        state = state * g[t].exp()[:, None, None]
        new = (v[t] - torch.einsum('hkv,hk->hv', state, k[t])) * torch.sigmoid(b[t])[:, None]
        state = state + k[t][:, :, None] * new[:, None, :]
        out[t] = torch.einsum('hkv,hk->hv', state, q[t])
    z = of.mixed[:live, layer.channels:layer.channels + values * dim].double()
    lengths = (out.square().mean(-1, True) + of.eps).sqrt().expand_as(out).reshape(live, -1)
    out = out.reshape(live, -1) / lengths * of.norm.double().repeat(values)
    return out * z * torch.sigmoid(z), state, x[live:], lengths


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.double() - theirs).norm() / theirs.norm()).item()


def check(case: Case, live: int, tolerance: float) -> None:
    out, state, window = case.fold(live)
    ours = case.of.out[:live]
    assert off(ours * case.lengths, out * case.lengths) <= 2 * tolerance
    assert off(case.of.state, state) <= tolerance
    assert torch.equal(case.of.window.double(), window)
    assert not case.of.out[live:].any()


@pytest.mark.parametrize('size', [32, 128, 512])
@pytest.mark.parametrize('decay', [0.02, 1.0, 300.0])
def test_every_length_of_a_bucket(monkeypatch, size, decay):
    """Also lengths beside the borders of blocks, one after another on the same state."""
    case = Case(monkeypatch, size, (1, 2, 32), decay)
    assert (case.rule.short, case.rule.chunked) == (size == 32, size > 32)
    for live in (1, 2, 31, 32, 33, 63, 64, 65, 128, 200, 512):
        if live <= size:
            check(case, live, 4e-3)


@pytest.mark.parametrize('heads', [(1, 2, 128), (2, 6, 64), (2, 32, 32)])
def test_heads_of_other_sizes(monkeypatch, heads):
    case = Case(monkeypatch, 128, heads)
    for live in (70, 128):
        check(case, live, 4e-3)


@pytest.mark.parametrize('clusters', [False, True])
@pytest.mark.parametrize('heads', [(1, 2, 32), (2, 2, 64), (1, 1, 128)])
def test_every_length_of_the_short_bucket(monkeypatch, heads, clusters):
    case = Case(monkeypatch, 32, heads, clusters=clusters)
    assert [launch.kernel.name for launch in case.launches] == ['short_delta']
    for live in range(1, 33):
        check(case, live, 4e-3)


@pytest.mark.parametrize('heads', [(1, 2, 128), (1, 3, 32), (2, 4, 64)])
def test_clusters_change_no_bit_of_the_short_bucket(monkeypatch, heads):
    found = []
    for clusters in (False, True):
        case = Case(monkeypatch, 32, heads, clusters=clusters)
        for live in (2, 32, 17):
            check(case, live, 4e-3)
        found.append((case.of.state, case.of.out, case.of.window))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize('clusters', [False, True])
def test_strong_gates_of_the_short_bucket(monkeypatch, clusters):
    """Strengths near 0 and near 1, and inputs as large."""
    case = Case(monkeypatch, 32, (1, 2, 32), 1e-3, clusters=clusters)
    draw = case.draw
    case.draw = lambda *shape: 8 * draw(*shape)
    for live in (32, 5):
        check(case, live, 4e-3)


def test_the_short_bucket_needs_no_more_than_any_device_has(monkeypatch):
    for keys in (32, 64, 128):
        for values in (32, 64, 128):
            for clusters in (False, True):
                layer = GatedDeltaNet(0, 64, 1, 2, keys, values, 4, 1e-6)
                rule = Case(monkeypatch, 32, (1, 2, 32)).rule.__class__(
                    layer, torch.bfloat16, 32, 0, clusters)
                assert rule.short and rule.short_bytes <= 99 << 10


def test_shared_memory_changes_no_bit(monkeypatch):
    found = []
    for shared in (99 << 10, 227 << 10):
        case = Case(monkeypatch, 256, (1, 1, 128), shared=shared)
        check(case, 250, 4e-3)
        found.append((case.of.state, case.of.out[:250]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize('size', [32, 128])
def test_keys_that_are_all_the_same(monkeypatch, size):
    """The system to solve is then as full as it can be."""
    case = Case(monkeypatch, size, (1, 1, 64), 1e-3)
    case.draw = lambda *shape: torch.full(shape, 2.0) + 0.01 * torch.randn(*shape)
    check(case, size, 1e-2)


@pytest.mark.parametrize('size', [32, 128])
def test_decays_without_end(monkeypatch, size):
    """Gates so strong that log decays are infinite forget everything, and nothing is NaN."""
    case = Case(monkeypatch, size, (1, 1, 32), 1e30)
    check(case, size - 5, 4e-3)


@pytest.mark.parametrize(('size', 'clusters'), [(32, False), (32, True), (128, False)])
def test_same_bytes_in_same_bytes_out(monkeypatch, size, clusters):
    states = []
    for _ in range(2):
        case = Case(monkeypatch, size, (1, 2, 64), clusters=clusters)
        case.fold(size - 5)
        states.append((case.of.state, case.of.out, case.of.window))
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_fp32_stays_token_after_token(monkeypatch):
    case = Case(monkeypatch, 128, (1, 2, 32), dtype=torch.float32)
    assert not case.rule.chunked and not case.rule.short
    check(case, 100, 2e-6)
