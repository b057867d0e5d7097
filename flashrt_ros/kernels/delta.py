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

import math
from typing import NamedTuple

import torch
from torch import Tensor
import torch.nn.functional as F

from flashrt_ros.kernels.convolution import short_convolution
from flashrt_ros.kernels.norm import Norm, rms_norm

CHUNK = 64  # tokens; the block inside the rule, not the 512-token grid of prefill
L2_EPS = 1e-6


class DeltaWeights(NamedTuple):
    """What the operation reads, constants folded; see :meth:`of`."""

    conv: Tensor  # fp32 [K, C], oldest tap first
    neg_a: Tensor  # fp32 [Hv], -exp(A_log)
    dt_bias: Tensor  # fp32 [Hv]
    norm: Norm  # of the output, [Dv]
    unit: Tensor  # fp32 scalar, sqrt(eps) of the unit length
    spread: Tensor  # fp32 [2, 1, 1]: what q and k are divided by beyond their length

    @classmethod
    def of(cls, conv: Tensor, a_log: Tensor, dt_bias: Tensor, norm: Norm,
           k_dim: int) -> DeltaWeights:
        """Return the weights made ready; ``Dk = k_dim`` scales queries by ``1 / sqrt(Dk)``."""
        device = conv.device
        return cls(conv, -a_log.float().exp(), dt_bias.float(), norm,
                   torch.tensor(math.sqrt(L2_EPS), device=device),
                   torch.tensor([math.sqrt(k_dim), 1.0], device=device).view(2, 1, 1))


def gated_delta_net(mixed: Tensor, window: Tensor, state: Tensor, weights: DeltaWeights,
                    key_heads: int) -> Tensor:
    """
    Fold ``T`` tokens into ``window`` and ``state`` and return the normed, gated output.

    :param mixed: ``[T, C + Hv Dv + 2 Hv]``: conv channels (queries, keys, values), the output
        gate ``z``, ``b``, ``a``, as the stacked projection leaves them.
    :param window: ``[K - 1, C]`` the last inputs of the convolution, oldest first; in place.
    :param state: ``[Hv, Dk, Dv]`` fp32 recurrent state; in place.
    :param key_heads: ``Hk``; each serves ``Hv / Hk`` neighbouring value heads.
    :return: ``[T, Hv Dv]`` in the type of ``mixed``.
    """
    tokens = mixed.shape[0]
    v_heads, k_dim, v_dim = state.shape
    values, keys = v_heads * v_dim, 2 * key_heads * k_dim
    x, z, b, a = mixed.split((keys + values, values, v_heads, v_heads), -1)
    x = F.silu(short_convolution(x, window, weights.conv), True)
    qk, v = x.split((keys, values), -1)
    qk = qk.view(tokens, 2, key_heads, k_dim)
    length = torch.linalg.vector_norm(qk, 2, -1, True).hypot_(weights.unit)
    qk = qk / length.mul_(weights.spread)
    g = F.softplus(a.float() + weights.dt_bias).mul_(weights.neg_a)
    beta = torch.sigmoid(b.float())
    step = _one_token if tokens == 1 else _chunked
    out = step(qk, v.view(tokens, v_heads, v_dim), g, beta, state)
    out = rms_norm(out, weights.norm).reshape(tokens, values)
    return out.mul_(F.silu(z.float())).to(mixed.dtype)


def _one_token(qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """
    Fold one token: ``qk [1, 2, Hk, Dk]``, ``v [1, Hv, Dv]``, ``g`` and ``beta [1, Hv]``.

    :return: ``[1, Hv, Dv]``.
    """
    v_heads, k_dim, v_dim = state.shape
    k_heads = qk.shape[2]
    heads = qk.view(2, k_heads, 1, k_dim)
    if k_heads != v_heads:
        heads = heads.expand(2, k_heads, v_heads // k_heads, k_dim).reshape(2, v_heads, 1, k_dim)
    q, k = heads.unbind(0)  # [Hv, 1, Dk]
    state.mul_(g.exp_().view(v_heads, 1, 1))
    delta = torch.baddbmm(v.view(v_heads, 1, v_dim), k, state, alpha=-1)
    delta.mul_(beta.view(v_heads, 1, 1))
    state.addcmul_(k.mT, delta)
    return torch.bmm(q, state).view(1, v_heads, v_dim)


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

    q, k = chunks(qk[:, 0]), chunks(qk[:, 1])
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
