"""The planner's shape, and a packed forward pass for training.

The weights always live in transformers' own `Qwen3_5ForCausalLM`; `packed_logits` runs the same
arithmetic over many conversations laid end to end (nothing leaks over a border), in plain torch.
`test_planner_assets.py` holds it against transformers' forward pass.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

HIDDEN, LAYERS, MLP = 256, 8, 384


def planner_config(vocab_size: int = 1536, **changes) -> Qwen3_5TextConfig:
    """
    Return the configuration; by default three gated-delta layers, then one of attention, twice.
    """
    layers = changes.get('num_hidden_layers', LAYERS)
    every = changes.get('full_attention_interval', 4)
    fields = {
        'vocab_size': vocab_size,
        'hidden_size': HIDDEN,
        'intermediate_size': MLP,
        'num_hidden_layers': layers,
        'num_attention_heads': 4,
        'num_key_value_heads': 2,
        'head_dim': 64,
        'linear_num_key_heads': 4,
        'linear_num_value_heads': 8,
        'linear_key_head_dim': 32,
        'linear_value_head_dim': 32,
        'linear_conv_kernel_dim': 4,
        'layer_types': [
            'linear_attention' if (i + 1) % every else 'full_attention' for i in range(layers)
        ],
        'full_attention_interval': 4,
        'attn_output_gate': True,
        'mamba_ssm_dtype': 'float32',
        'max_position_embeddings': 65536,
        'tie_word_embeddings': True,
        'rms_norm_eps': 1e-6,
        'rope_parameters': {
            'rope_type': 'default',
            'rope_theta': 100000.0,
            'partial_rotary_factor': 0.25,
            'mrope_section': [3, 3, 2],
            'mrope_interleaved': True,
        },
        'bos_token_id': None,
        'eos_token_id': 2,
        'pad_token_id': 0,
        'initializer_range': 0.02,
    }
    fields.update(changes)
    return Qwen3_5TextConfig(**fields)


def new_model(config: Qwen3_5TextConfig, seed: int) -> Qwen3_5ForCausalLM:
    """Return fp32 weights, with the decay of the delta rule spread from short to long memories."""
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith('dt_bias'):
                step = torch.exp(torch.empty_like(p).uniform_(math.log(1e-3), math.log(0.1)))
                p.copy_(step + torch.log(-torch.expm1(-step)))
            elif 'embed' in name:
                p.normal_(0, 0.05)
            elif p.ndim == 2:
                std = 0.7 / math.sqrt(p.shape[1])
                p.normal_(
                    0,
                    std / 4
                    if name.endswith(('o_proj.weight', 'out_proj.weight', 'down_proj.weight'))
                    else std,
                )
    return model


def rms(x, weight, eps: float = 1e-6):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight)


def linear(x, weight, dtype):
    return F.linear(x.to(dtype), weight.to(dtype))


def mlp(x, norm, gate, up, down, dtype):
    y = rms(x, norm)
    return x + linear(F.silu(linear(y, gate, dtype)) * linear(y, up, dtype), down, dtype)


def delta_in(x, pos, norm, qkv, z, b, a, conv, dt_bias, a_log, dtype):
    """Return q, k, v, log decay, write strength and gate of a delta layer; x is [N, hidden]."""
    y = rms(x, norm)
    mixed = linear(y, qkv, dtype)
    taps = conv.squeeze(1).to(dtype)
    total = mixed * taps[:, -1]
    for back in range(1, taps.shape[1]):
        past = torch.cat([mixed.new_zeros(back, mixed.shape[1]), mixed[:-back]])
        total = total + torch.where((pos >= back)[:, None], past, 0) * taps[:, -1 - back]
    total = F.silu(total)
    heads = a_log.shape[0]
    value_dim = z.shape[0]
    q, k, v = total.split([(total.shape[1] - value_dim) // 2] * 2 + [value_dim], dim=-1)
    v = v.reshape(1, -1, heads, value_dim // heads)
    dim = value_dim // heads
    q = q.reshape(1, len(x), -1, dim).repeat_interleave(heads * dim // q.shape[1], 2)
    k = k.reshape(1, len(x), -1, dim).repeat_interleave(heads * dim // k.shape[1], 2)
    g = -a_log.exp() * F.softplus(linear(y, a, dtype).float() + dt_bias)
    return (
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        g[None],
        linear(y, b, dtype).float().sigmoid()[None],
        linear(y, z, dtype),
    )


def delta_out(x, o, z, norm, out, dtype):
    o = o.reshape(-1, norm.shape[0]).float()
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-6) * norm
    o = o * F.silu(z.reshape(o.shape).float())
    return x + linear(o.reshape(len(x), -1), out, dtype)


def attention_in(x, cos, sin, norm, q, k, v, q_norm, k_norm, dtype):
    """Return q, k, v as [N, heads, dim] (keys and values repeated for each query) and the gate."""
    y, dim = rms(x, norm), q_norm.shape[0]
    query, gate = linear(y, q, dtype).view(len(x), -1, 2 * dim).chunk(2, -1)
    query = rms(query, q_norm)
    key = rms(linear(y, k, dtype).view(len(x), -1, dim), k_norm)
    value = linear(y, v, dtype).view(len(x), -1, dim)
    query, key = rotate(query, cos, sin).to(dtype), rotate(key, cos, sin).to(dtype)
    times = query.shape[1] // key.shape[1]
    return (
        query.contiguous(),
        key.repeat_interleave(times, 1),
        value.repeat_interleave(times, 1),
        gate.reshape(len(x), -1),
    )


def rotate(x, cos, sin):
    n = cos.shape[-1]
    part, rest = x[..., :n], x[..., n:]
    half = torch.cat([-part[..., n // 2 :], part[..., : n // 2]], -1)
    return torch.cat([part * cos[:, None] + half * sin[:, None], rest], -1)


def attention_out(x, o, gate, out, dtype):
    return x + linear(o.reshape(len(x), -1) * torch.sigmoid(gate), out, dtype)


CHUNK = 32  # conversations are laid out on this grid, see batches.pack
MAX_LEVELS = 7  # so a conversation may have 2 ** 7 chunks: 4096 tokens


def delta_chunks(q, k, v, g, beta, first, levels: int):
    """Return the gated delta rule's output [N, heads, dim] over conversations that start on
    chunks.

    Inside a chunk: the triangular system of transformers' reference
    (`torch_chunk_gated_delta_rule`).
    Between chunks the state obeys S' = A S + B with A = d I - K'W and B = K'U, so all states come
    from a parallel scan of `levels` doublings; `first` [chunks] marks where a conversation starts,
    and A = 0 before it keeps the state from crossing.
    """
    heads, dim = v.shape[1:]
    q, k, v = (t.float().reshape(-1, CHUNK, heads, dim).transpose(1, 2) for t in (q, k, v))
    g, beta = (t.reshape(-1, CHUNK, heads).transpose(1, 2) for t in (g, beta))
    q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * dim**-0.5
    k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
    total = g.cumsum(-1)
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(future, float('-inf')).exp()
    k_beta = k * beta[..., None]
    system = (k_beta @ k.transpose(-1, -2)) * decay
    inner = (q @ k.transpose(-1, -2)) * decay
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat([v * beta[..., None], k_beta * total.exp()[..., None]], -1),
        upper=False,
        unitriangular=True,
    )
    u, w = solved.split(dim, -1)
    late = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    eye = torch.eye(dim, device=q.device)
    a = total[..., -1].exp()[..., None, None] * eye - late @ w
    b = late @ u
    # State at the start of each chunk: shift by one chunk, cut at the first chunk of a
    # conversation.
    keep = (~first).float()[:, None, None, None]
    a = torch.cat([torch.zeros_like(a[:1]), a[:-1]]) * keep
    b = torch.cat([torch.zeros_like(b[:1]), b[:-1]]) * keep
    for level in range(levels):
        step = 1 << level
        a_far = torch.cat([torch.zeros_like(a[:step]), a[:-step]])
        b_far = torch.cat([torch.zeros_like(b[:step]), b[:-step]])
        b = a @ b_far + b
        a = a @ a_far if level < levels - 1 else a
    out = (q * total.exp()[..., None]) @ b + inner @ (u - w @ b)
    return out.transpose(1, 2).reshape(-1, heads, dim)


def run_delta(q, k, v, g, beta, cu, chunks):
    first = torch.zeros(q.shape[1] // CHUNK, dtype=torch.bool, device=q.device)
    first[(cu[:-1] // CHUNK).long()] = True
    return chunks(q[0], k[0], v[0], g[0], beta[0], first, MAX_LEVELS)


def run_attention(q, k, v, cu, longest):
    if q.is_cuda:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, longest, longest, 0.0, True, False
        )[0]
    parts = [
        F.scaled_dot_product_attention(
            *(t[a:b].transpose(0, 1) for t in (q, k, v)), is_causal=True
        ).transpose(0, 1)
        for a, b in zip(cu[:-1].tolist(), cu[1:].tolist())
    ]
    return torch.cat(parts)


FUNCTIONS = {
    f.__name__: f for f in (mlp, delta_in, delta_chunks, delta_out, attention_in, attention_out)
}

def compiled_functions() -> dict:
    """
    Return the elementwise-heavy pieces compiled; tensors come as arguments, so layers share code.
    """
    return {name: torch.compile(f, dynamic=False) for name, f in FUNCTIONS.items()}


def packed_hidden(model, ids, cu, pos, longest: int, fns=FUNCTIONS, dtype=torch.float32):
    """Return final hidden states [N, hidden] of conversations whose borders are `cu` (int32)."""
    p = dict(model.named_parameters())
    config = model.config
    width = int(config.head_dim * config.rope_parameters['partial_rotary_factor'])
    freq = config.rope_parameters['rope_theta'] ** (
        -torch.arange(0, width, 2, device=ids.device, dtype=torch.float32) / width
    )
    angle = torch.cat([pos[:, None].float() * freq] * 2, -1)
    cos, sin = angle.cos(), angle.sin()
    x = F.embedding(ids, p['model.embed_tokens.weight'])
    for i, kind in enumerate(config.layer_types):
        at = f'model.layers.{i}.'
        norm = p[at + 'input_layernorm.weight']
        if kind == 'linear_attention':
            w = {
                n: p[f'{at}linear_attn.{n}']
                for n in (
                    'in_proj_qkv.weight',
                    'in_proj_z.weight',
                    'in_proj_b.weight',
                    'in_proj_a.weight',
                    'conv1d.weight',
                    'dt_bias',
                    'A_log',
                )
            }
            *parts, z = fns['delta_in'](x, pos, norm, *w.values(), dtype)
            o = run_delta(*parts, cu, fns['delta_chunks'])
            x = fns['delta_out'](
                x,
                o,
                z,
                p[at + 'linear_attn.norm.weight'],
                p[at + 'linear_attn.out_proj.weight'],
                dtype,
            )
        else:
            w = [
                p[f'{at}self_attn.{n}.weight']
                for n in ('q_proj', 'k_proj', 'v_proj', 'q_norm', 'k_norm')
            ]
            q, k, v, gate = fns['attention_in'](x, cos, sin, norm, *w, dtype)
            o = run_attention(q, k, v, cu, longest)
            x = fns['attention_out'](x, o, gate, p[at + 'self_attn.o_proj.weight'], dtype)
        x = fns['mlp'](
            x,
            p[at + 'post_attention_layernorm.weight'],
            *(p[f'{at}mlp.{n}_proj.weight'] for n in ('gate', 'up', 'down')),
            dtype,
        )
    return rms(x, p['model.norm.weight'])


def packed_logits(model, ids, cu, pos, longest: int, fns=FUNCTIONS, dtype=torch.float32):
    """Return logits [N, vocab]."""
    hidden = packed_hidden(model, ids, cu, pos, longest, fns, dtype)
    return linear(hidden, model.get_input_embeddings().weight, dtype)
