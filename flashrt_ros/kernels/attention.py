"""
Attention: QK norm, rotary embedding, row append, attention over live rows, and an output gate.

Only rows ``[0, position + T)`` are ever sliced out, so rows behind them may hold anything, NaN
included. Scores are scaled by ``1 / sqrt(D)``; the gate, where a family has one, is ``sigmoid`` of
a projection that lies beside each query head.
"""

from __future__ import annotations

import torch
from torch import Tensor
import torch.nn.functional as F

from flashrt_ros.kernels.norm import Norm, rms_norm


def rope_tables(count: int, rotary_dim: int, theta: float,
                device: torch.device | str = 'cpu') -> tuple[Tensor, Tensor]:
    """
    Return the rotary tables (Su et al. 2021, arXiv 2104.09864) for positions ``[0, count)``.

    Rotated are pairs ``(i, i + R/2)`` of the first ``R = rotary_dim`` dimensions by the angle
    ``p * theta^(-2i/R)``. The sign of the half swap lies in the sine table.

    :return: fp32 ``cos`` and signed ``sin``, both ``[count, 1, R]``.
    """
    steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    angles = torch.outer(torch.arange(count, dtype=torch.float32), 1.0 / theta ** steps)
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return tables[0].unsqueeze(1).to(device), tables[1].unsqueeze(1).to(device)


def gated_attention(
    mixed: Tensor, k_rows: Tensor, v_rows: Tensor, position: int,
    qk_norm: Norm, cos: Tensor, sin: Tensor,
) -> Tensor:
    """
    Append ``T`` rows at ``position`` and return the gated attention over the live rows.

    :param mixed: ``[T, 2 Hq D + 2 Hk D]``: per query head its query and its gate, then keys,
        then values, as the stacked projection leaves them.
    :param k_rows: ``[capacity, Hk, D]`` key rows, written in ``[position, position + T)``.
    :param v_rows: ``[capacity, Hk, D]`` value rows, likewise.
    :param qk_norm: norm of queries and keys with a factor a head, ``[Hq + Hk, D]``.
    :param cos: ``[capacity, 1, R]`` fp32, see :func:`rope_tables`; ``sin`` likewise.
    :return: ``[T, Hq D]``.
    """
    tokens, (kv_heads, dim) = mixed.shape[0], k_rows.shape[1:]
    heads = mixed.view(tokens, -1, dim)
    q_heads = (heads.shape[1] - 2 * kv_heads) // 2
    queries = heads[:, 0:2 * q_heads:2]
    qk = torch.cat((queries, heads[:, 2 * q_heads:2 * q_heads + kv_heads]), 1)
    out = _append_and_attend(qk, heads[:, 2 * q_heads + kv_heads:], k_rows, v_rows, position,
                             qk_norm, cos, sin)
    return torch.sigmoid(heads[:, 1:2 * q_heads:2]).mul_(out).view(tokens, q_heads * dim)


def attention(
    mixed: Tensor, k_rows: Tensor, v_rows: Tensor, position: int,
    qk_norm: Norm, cos: Tensor, sin: Tensor,
) -> Tensor:
    """
    As :func:`gated_attention` without gates.

    :param mixed: ``[T, Hq D + 2 Hk D]``: queries, keys, values.
    :return: ``[T, Hq D]``.
    """
    tokens, (kv_heads, dim) = mixed.shape[0], k_rows.shape[1:]
    heads = mixed.view(tokens, -1, dim)
    qk, values = heads[:, :-kv_heads], heads[:, -kv_heads:]
    out = _append_and_attend(qk, values, k_rows, v_rows, position, qk_norm, cos, sin)
    return out.reshape(tokens, -1)


def _append_and_attend(qk: Tensor, values: Tensor, k_rows: Tensor, v_rows: Tensor, position: int,
                       qk_norm: Norm, cos: Tensor, sin: Tensor) -> Tensor:
    """Norm and rotate ``qk [T, Hq + Hk, D]``, append the rows; return ``[T, Hq, D]``."""
    tokens, kv_heads = values.shape[:2]
    q_heads, end = qk.shape[1] - kv_heads, position + tokens
    qk = _rotate(rms_norm(qk, qk_norm), cos[position:end], sin[position:end])
    k_rows[position:end].copy_(qk[:, q_heads:])
    v_rows[position:end].copy_(values)
    q, k, v = qk[:, :q_heads], k_rows[:end], v_rows[:end]
    return _attend_one(q, k, v) if tokens == 1 else _attend_chunk(q, k, v, position)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R of the last axis of ``x [T, H, D]`` in place; tables are ``[T, 1, R]``."""
    half = cos.shape[-1] // 2
    turned = x[..., :2 * half]
    swapped = torch.cat((turned[..., half:], turned[..., :half]), -1)
    if x.dtype is torch.float32:
        turned.mul_(cos).addcmul_(swapped, sin)
    else:
        turned.copy_(turned * cos + swapped * sin)
    return x


def _attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """
    Attend with one token: ``q [1, Hq, D]`` over ``k, v [n, Hk, D]``; return ``[1, Hq, D]``.

    The query heads that share a KV head stand as its query rows, so KV is neither repeated nor
    read twice.
    """
    kv_heads, dim = k.shape[1:]
    grouped = q.view(1, kv_heads, -1, dim)
    out = F.scaled_dot_product_attention(
        grouped, k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0))
    return out.reshape(1, -1, dim)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
    """
    Attend causally with ``q [T, Hq, D]`` whose first row stands at ``position``.

    The rows before the chunk need no mask and the chunk's own square is causal, so each is one
    flash call; the two are merged by their log-sum-exp. Nothing is computed and then masked away,
    which on a CPU takes 0.7 of the time of one masked call.
    """
    tokens, q_heads, dim = q.shape
    if position == 0 or q.device.type != 'cpu':
        return _attend_masked(q, k, v, position)
    kv_heads = k.shape[1]
    group = q_heads // kv_heads
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    heads = q.transpose(0, 1).contiguous()  # [Hq, T, D]
    keys, values = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
    # before: the heads of a group stand below one another as rows of their KV head
    before, before_lse = flash(heads.view(1, kv_heads, group * tokens, dim),
                               keys[:, :, :position], values[:, :, :position])
    own, own_lse = flash(heads.unsqueeze(0), _spread(keys[:, :, position:], group),
                         _spread(values[:, :, position:], group), 0.0, True)
    shape = (q_heads, tokens, 1)
    weight = torch.sigmoid(before_lse.reshape(shape) - own_lse.reshape(shape)).to(q.dtype)
    return torch.lerp(own[0], before.reshape(q_heads, tokens, dim), weight).transpose(0, 1)


def _spread(rows: Tensor, group: int) -> Tensor:
    """Let ``rows [1, Hk, T, D]`` stand for ``[1, Hk * group, T, D]`` query heads."""
    one, heads, tokens, dim = rows.shape
    return rows.unsqueeze(2).expand(one, heads, group, tokens, dim).reshape(
        one, heads * group, tokens, dim)


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
    """Attend causally by one call; the reference, and the form where nothing came before."""
    mask = None
    if position:
        tokens = q.shape[0]
        mask = torch.ones(tokens, position + tokens, dtype=torch.bool, device=q.device)
        mask = mask.tril_(position)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0), attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out[0].transpose(0, 1)
