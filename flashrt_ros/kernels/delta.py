"""
Short convolution, gates, gated delta rule and gated norm, with the layer's state in place.

Per value head the recurrent state ``S [Dk, Dv]`` follows (Yang et al. 2024, "Gated Delta
Networks", arXiv 2412.06464)::

    S_t = exp(g_t) S_{t-1} + k_t (x) beta_t (v_t - exp(g_t) S_{t-1}^T k_t),   o_t = S_t^T q_t

with ``g = -exp(A_log) softplus(a + dt_bias)``, ``beta = sigmoid(b)``, ``q`` and ``k`` of unit
length and ``q`` scaled by ``1 / sqrt(Dk)``. One token takes the rule as it stands; more take its
chunked form (the WY representation of Yang et al. 2024, arXiv 2406.06484, with decay), 64 tokens
a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashrt_ros.kernels.norm import rms_norm

CHUNK = 64  # tokens; the block inside the rule, not the 512-token grid of prefill
L2_EPS = 1e-6


def gated_delta_net(
    mixed: Tensor, window: Tensor, state: Tensor, conv: Tensor,
    neg_a: Tensor, dt_bias: Tensor, norm: Tensor, eps: float, key_heads: int,
) -> Tensor:
    """
    Fold ``T`` tokens into ``window`` and ``state`` and return the normed, gated output.

    :param mixed: ``[T, C + Hv Dv + 2 Hv]``: conv channels (queries, keys, values), the output
        gate ``z``, ``b``, ``a``, as the stacked projection leaves them.
    :param window: ``[K - 1, C]`` the last inputs of the convolution, oldest first; in place.
    :param state: ``[Hv, Dk, Dv]`` fp32 recurrent state; in place.
    :param conv: ``[K, C]`` fp32 taps, oldest first.
    :param neg_a: ``[Hv]`` fp32 ``-exp(A_log)``; ``dt_bias`` ``[Hv]`` fp32.
    :param norm: ``[Dv]`` fp32 factor of the gated norm.
    :param key_heads: ``Hk``; each serves ``Hv / Hk`` neighbouring value heads.
    :return: ``[T, Hv Dv]`` in the type of ``mixed``.
    """
    tokens, channels = mixed.shape[0], conv.shape[1]
    v_heads, k_dim, v_dim = state.shape
    x, z, b, a = mixed.split((channels, v_heads * v_dim, v_heads, v_heads), -1)
    x = _convolve(x, window, conv)
    g = F.softplus(a.float() + dt_bias).mul_(neg_a)
    beta = torch.sigmoid(b.float())
    key_channels = key_heads * k_dim
    qk = _unit(x[:, :2 * key_channels].view(tokens, 2, key_heads, k_dim))
    v = x[:, 2 * key_channels:].view(tokens, v_heads, v_dim)
    step = _one_token if tokens == 1 else _chunked
    out = step(qk, v, g, beta, state)
    out = rms_norm(out, norm, eps).mul_(F.silu(z.float()).view_as(out))
    return out.reshape(tokens, -1).to(mixed.dtype)


def _convolve(x: Tensor, window: Tensor, conv: Tensor) -> Tensor:
    """Causal depthwise convolution of ``x [T, C]`` with SiLU, fp32; moves ``window`` on."""
    taps, tokens = conv.shape[0], x.shape[0]
    history = torch.cat((window, x))
    window.copy_(history[tokens:])
    if tokens == 1:
        return F.silu((history * conv).sum(0, keepdim=True), inplace=True)
    history = history.float()
    out = history[:tokens] * conv[0]
    for tap in range(1, taps):
        out.addcmul_(history[tap:tap + tokens], conv[tap])
    return F.silu(out, inplace=True)


def _unit(x: Tensor) -> Tensor:
    """Return ``x / sqrt(sum(x^2) + eps)`` over the last axis."""
    return x * torch.linalg.vecdot(x, x).add_(L2_EPS).rsqrt_().unsqueeze(-1)


def _one_token(qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """
    Fold one token: ``qk [1, 2, Hk, Dk]``, ``v [1, Hv, Dv]``, ``g`` and ``beta [1, Hv]``.

    ``S^T k`` and ``S^T q`` of the old state come from one product; the new output needs the new
    state only through ``k . q``: ``o = exp(g) S^T q + (k . q) delta``.
    """
    v_heads, k_dim, v_dim = state.shape
    scale = k_dim ** -0.5
    heads = qk[0].transpose(0, 1)  # [Hk, 2, Dk]
    if heads.shape[0] != v_heads:
        heads = heads.repeat_interleave(v_heads // heads.shape[0], 0)
    decay = g.exp_().view(v_heads, 1, 1)
    read = torch.bmm(heads, state).mul_(decay)  # [Hv, 2, Dv]
    delta = (v[0] - read[:, 1]).mul_(beta.view(v_heads, 1))
    state.mul_(decay).addcmul_(heads[:, 1].unsqueeze(2), delta.unsqueeze(1))
    overlap = torch.linalg.vecdot(heads[:, 0], heads[:, 1]).unsqueeze(1)
    return torch.addcmul(read[:, 0], overlap, delta).mul_(scale).unsqueeze(0)


def _chunked(qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """
    Fold ``T`` tokens chunk by chunk; shapes as in :func:`_one_token` with ``T`` in front.

    Everything inside a chunk is done for all chunks and heads at once; only three products a
    chunk are sequential. A ragged tail is filled up with tokens of zero key and zero decay, which
    leave the state exactly as it is.
    """
    tokens, v_heads, v_dim = v.shape
    k_heads, k_dim = qk.shape[2:]
    chunk = min(CHUNK, tokens)
    count = -(-tokens // chunk)
    pad = count * chunk - tokens
    if pad:
        qk, v = F.pad(qk, (0, 0, 0, 0, 0, 0, 0, pad)), F.pad(v, (0, 0, 0, 0, 0, pad))
        g, beta = F.pad(g, (0, 0, 0, pad)), F.pad(beta, (0, 0, 0, pad))
    group = v_heads // k_heads

    def chunks(x: Tensor) -> Tensor:  # [n c, H, D] -> [n, H, c, D]
        return x.view(count, chunk, -1, x.shape[-1]).transpose(1, 2).contiguous()

    def per_key(x: Tensor) -> Tensor:  # [n, Hv, ...] -> [n, Hk, group, ...]
        return x.view(count, k_heads, group, *x.shape[2:])

    q, k = chunks(qk[:, 0]).mul_(k_dim ** -0.5), chunks(qk[:, 1])
    v = chunks(v)
    beta = beta.view(count, chunk, v_heads).transpose(1, 2).unsqueeze(-1)  # [n, Hv, c, 1]
    total = g.view(count, chunk, v_heads).cumsum(1).transpose(1, 2).contiguous()  # [n, Hv, c]
    # exp of the upper triangle may overflow; tril drops it without multiplying
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp_().tril_()
    into = total.exp().unsqueeze(-1)  # decay from the start of the chunk to a token
    onto = (total[..., -1:] - total).exp_().unsqueeze(-1)  # from a token to the end of the chunk
    whole = into[:, :, -1:]

    attend = per_key(decay) * torch.matmul(q, k.mT).unsqueeze(2)
    system = per_key(decay) * torch.matmul(k, k.mT).unsqueeze(2)
    system = system.view(count, v_heads, chunk, chunk).mul_(beta)
    attend = attend.view(count, v_heads, chunk, chunk)
    keys = (per_key(beta * into) * k.unsqueeze(2)).view(count, v_heads, chunk, k_dim)
    solved = torch.linalg.solve_triangular(
        system, torch.cat((v * beta, keys), -1), upper=False, unitriangular=True)
    fresh, seen = solved[..., :v_dim], solved[..., v_dim:]
    reads = (per_key(into) * q.unsqueeze(2)).view(count, v_heads, chunk, k_dim)
    writes = (per_key(onto) * k.unsqueeze(2)).view(count, v_heads, chunk, k_dim)

    out = torch.empty_like(v)
    for i in range(count):
        new = torch.baddbmm(fresh[i], seen[i], state, alpha=-1)
        torch.baddbmm(torch.bmm(attend[i], new), reads[i], state, out=out[i])
        state.mul_(whole[i]).baddbmm_(writes[i].mT, new)
    return out.transpose(1, 2).reshape(count * chunk, v_heads, v_dim)[:tokens]
