"""The reference kernels against plain formulas in fp64."""

import math

import pytest
import torch

from flashrt_ros.kernels.attention import (
    _attend_chunk,
    _attend_masked,
    _attend_one,
    gated_attention,
    rope_tables,
)
from flashrt_ros.kernels.delta import CHUNK, DeltaWeights, gated_delta_net
from flashrt_ros.kernels.head import head
from flashrt_ros.kernels.linear import linear_residual, normed_linear
from flashrt_ros.kernels.mlp import gated_mlp
from flashrt_ros.kernels.norm import Norm, rms_norm


def draw(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def plain_norm(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize('scale', [1e-20, 1e-4, 1.0, 1e15])
def test_rms_norm(scale):
    x, weight = draw(3, 5, 48, scale=scale), draw(48, seed=1)
    out = rms_norm(x, Norm.of(weight, 1e-6))
    assert torch.allclose(out.double(), plain_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-30)
    half = rms_norm(x.bfloat16(), Norm.of(weight, 1e-6))
    assert half.dtype is torch.bfloat16


def test_rms_norm_of_zero_is_zero():
    assert not rms_norm(torch.zeros(2, 8), Norm.of(torch.ones(8), 1e-6)).any()


@pytest.mark.parametrize('columns', [False, True])
def test_linear_takes_either_memory_order(columns):
    x, weight, residual = draw(3, 16), draw(40, 16, seed=1), draw(3, 40, seed=2)
    laid = weight.t().contiguous().t() if columns else weight
    norm = Norm.of(draw(16, seed=3), 1e-6)
    expected = plain_norm(x, draw(16, seed=3), 1e-6) @ weight.double().t()
    assert torch.allclose(normed_linear(x, norm, laid).double(), expected, atol=1e-5)
    assert torch.allclose(linear_residual(x, laid, residual), residual + x @ weight.t(), atol=1e-5)
    assert torch.allclose(head(x, norm, laid).double(), expected[-1], atol=1e-5)


def test_gated_mlp():
    x, weight, gate_up, down = (
        draw(3, 16), draw(16, seed=1), draw(24, 16, seed=2), draw(16, 12, seed=3))
    gate, up = (plain_norm(x, weight, 1e-6) @ gate_up.double().t()).chunk(2, -1)
    expected = x.double() + (gate * gate.sigmoid() * up) @ down.double().t()
    out = gated_mlp(x, Norm.of(weight, 1e-6), gate_up, down)
    assert torch.allclose(out.double(), expected, atol=1e-4)


def plain_attention(q, k, v, position):
    """Attend ``q [T, Hq, D]`` from ``position`` on, one query at a time, in fp64."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        live = position + t + 1
        for h in range(q.shape[1]):
            keys, values = (x[:live, h // group].double() for x in (k, v))
            scores = keys @ q[t, h].double() / math.sqrt(q.shape[2])
            out[t, h] = scores.softmax(0) @ values
    return out


@pytest.mark.parametrize('position', [0, 1, 5, 130])
@pytest.mark.parametrize('tokens', [1, 2, 70])
@pytest.mark.parametrize('heads, kv_heads', [(4, 4), (4, 2), (3, 1)])
def test_attention_forms_agree(position, tokens, heads, kv_heads):
    q = draw(tokens, heads, 16)
    k, v = (draw(position + tokens, kv_heads, 16, seed=seed) for seed in (1, 2))
    expected = plain_attention(q, k, v, position)
    forms = [_attend_chunk, _attend_masked]
    if tokens == 1:
        forms.append(lambda q, k, v, position: _attend_one(q, k, v))
    for form in forms:
        assert torch.allclose(form(q, k, v, position).double(), expected, atol=1e-5)


@pytest.mark.parametrize('tokens, position', [(1, 0), (1, 9), (12, 0), (12, 9)])
def test_gated_attention(tokens, position):
    heads, kv_heads, dim, rotary, capacity = 4, 2, 16, 8, 40
    cos, sin = rope_tables(capacity, rotary, 1e4)
    k_rows, v_rows = (draw(capacity, kv_heads, dim, seed=seed) for seed in (1, 2))
    k_rows[position:], v_rows[position:] = float('nan'), float('nan')
    before = k_rows.clone(), v_rows.clone()
    weights = 1 + draw(2, dim, seed=3, scale=0.1)
    mixed = draw(tokens, (2 * heads + 2 * kv_heads) * dim, seed=4)
    table = weights.repeat_interleave(torch.tensor([heads, kv_heads]), 0)
    out = gated_attention(mixed, k_rows, v_rows, position, Norm.of(table, 1e-6), cos, sin)

    parts = mixed.view(tokens, -1, dim)
    q, gate = parts[:, :2 * heads].view(tokens, heads, 2, dim).unbind(2)
    k, v = parts[:, 2 * heads:].split(kv_heads, 1)

    def turn(x):
        angle = torch.outer(torch.arange(position, position + tokens).double(),
                            1e4 ** (-torch.arange(0, rotary, 2).double() / rotary))[:, None]
        a, b, rest = x.split((rotary // 2, rotary // 2, dim - rotary), -1)
        return torch.cat((a * angle.cos() - b * angle.sin(),
                          b * angle.cos() + a * angle.sin(), rest), -1)

    q, k = turn(plain_norm(q, weights[0], 1e-6)), turn(plain_norm(k, weights[1], 1e-6))
    end = position + tokens
    assert torch.allclose(k_rows[position:end].double(), k, atol=1e-5)
    assert torch.equal(v_rows[position:end], v)
    for rows, old in zip((k_rows, v_rows), before, strict=True):
        assert torch.equal(rows[:position], old[:position]) and rows[end:].isnan().all()
    expected = plain_attention(q, k_rows[:end], v_rows[:end], position) * gate.double().sigmoid()
    assert torch.allclose(out.double(), expected.reshape(tokens, -1), atol=1e-5)


def plain_delta_net(mixed, window, state, conv, a_log, dt_bias, norm, key_heads):
    """Follow the recurrence token by token in fp64; return output, window and state."""
    v_heads, k_dim, v_dim = state.shape
    mixed, window, state = mixed.double(), window.double(), state.double()
    keys = key_heads * k_dim
    out = []
    for row in mixed:
        x, z, b, a = row.split((conv.shape[1], v_heads * v_dim, v_heads, v_heads))
        window = torch.cat((window, x[None]))
        y = (window * conv.double()).sum(0)
        window, y = window[1:], y * y.sigmoid()
        q, k, v = y.split((keys, keys, v_heads * v_dim))
        q, k = (u.view(key_heads, k_dim) for u in (q, k))
        q, k = (u / (u.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
        group = v_heads // key_heads
        q, k = q.repeat_interleave(group, 0) / k_dim ** 0.5, k.repeat_interleave(group, 0)
        decay = (-a_log.double().exp() * torch.nn.functional.softplus(a + dt_bias)).exp()
        state = state * decay[:, None, None]
        delta = (v.view(v_heads, v_dim) - torch.einsum('hkv,hk->hv', state, k)) \
            * b.sigmoid()[:, None]
        state = state + torch.einsum('hk,hv->hkv', k, delta)
        o = plain_norm(torch.einsum('hkv,hk->hv', state, q), norm, 1e-6)
        z = z.view(v_heads, v_dim)
        out.append((o * z * z.sigmoid()).reshape(-1))
    return torch.stack(out), window, state


@pytest.mark.parametrize('tokens', [1, 2, 3, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
@pytest.mark.parametrize('key_heads, v_heads, taps', [(2, 2, 4), (2, 6, 2), (1, 4, 5)])
def test_delta_net_follows_the_recurrence(tokens, key_heads, v_heads, taps):
    k_dim, v_dim = 8, 12
    channels = 2 * key_heads * k_dim + v_heads * v_dim
    mixed = draw(tokens, channels + v_heads * v_dim + 2 * v_heads)
    window, state = draw(taps - 1, channels, seed=1), draw(v_heads, k_dim, v_dim, seed=2)
    conv, dt_bias = draw(taps, channels, seed=3), draw(v_heads, seed=4)
    a_log = torch.linspace(-4, 2.5, v_heads)  # from long memory to none
    norm = 1 + draw(v_dim, seed=5, scale=0.1)
    expected = plain_delta_net(mixed, window, state, conv, a_log, dt_bias, norm, key_heads)
    weights = DeltaWeights.of(conv, a_log, dt_bias, Norm.of(norm, 1e-6), k_dim)
    out = gated_delta_net(mixed, window, state, weights, key_heads)
    assert torch.allclose(state.double(), expected[2], atol=2e-5)
    assert torch.equal(window.double(), expected[1])
    # the gated norm magnifies what rounding leaves of outputs near zero
    assert (out.double() - expected[0]).abs().max() < 2e-3
    assert (out.double() - expected[0]).abs().median() < 1e-5


def test_strong_decay_stays_finite():
    """``exp`` of the dropped triangle overflows; nothing of it may come through."""
    mixed = draw(200, 3 * 8 + 8 + 2)
    mixed[:, -1] = 60.0
    window, state = torch.zeros(3, 24), torch.zeros(1, 8, 8)
    weights = DeltaWeights.of(draw(4, 24), torch.tensor([2.7]), torch.ones(1),
                              Norm.of(torch.ones(8), 1e-6), 8)
    assert torch.isfinite(gated_delta_net(mixed, window, state, weights, 1)).all()
    assert torch.isfinite(state).all()
