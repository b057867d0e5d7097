"""
LFM2 (arXiv 2511.23404): gated short convolutions and a few attentions, each with a gated MLP.

Made for small processors: ten of sixteen mixers keep two past inputs and nothing else. Semantics
follow the published ``Lfm2ForCausalLM`` of ``transformers``. The file reads like the model's
``config.json``: configuration, presets of the published sizes, model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashrt_ros.models.config import Fields
from flashrt_ros.models.layers.attention import AttentionNames, QKNormAttention
from flashrt_ros.models.layers.mlp import MLPNames, SwiGLU
from flashrt_ros.models.layers.short_conv import ShortConv
from flashrt_ros.models.model import Layer, Model

CONV, FULL = 'conv', 'full_attention'
ATTENTION = AttentionNames('operator_norm', 'self_attn.out_proj', 'self_attn.q_layernorm',
                           'self_attn.k_layernorm')
MLP = MLPNames('ffn_norm', 'feed_forward.w1', 'feed_forward.w3', 'feed_forward.w2')


@dataclass(frozen=True)
class Lfm2Config:
    """Everything that shapes the function, under the names of this house."""

    vocab_size: int
    hidden: int
    layers: int
    layer_types: tuple[str, ...]
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    conv_kernel: int
    norm_eps: float
    tied: bool
    max_positions: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated: all."""
        return self.head_dim

    @classmethod
    def from_fields(cls, fields: Fields) -> Lfm2Config:
        """
        Read a checkpoint's configuration.

        :raises Corrupt: for a value that is missing or makes no sense.
        :raises Incompatible: for a variant that this family does not run.
        """
        fields.only('conv_bias', False, default=False)
        fields.only('block_use_swiglu', True, default=True)
        fields.only('use_pos_enc', True, default=True)
        fields.absent('num_experts', 'num_experts_per_tok', 'moe_intermediate_size',
                      what='mixture-of-experts layers')
        layers = fields.integer('num_hidden_layers', high=4096)
        attending = fields.indices('full_attn_idxs', layers, default=list(range(layers)))
        layer_types = fields.strings(
            'layer_types', layers, (CONV, FULL),
            default=[FULL if i in attending else CONV for i in range(layers)])
        heads, kv_heads = fields.multiple('num_attention_heads', 'num_key_value_heads')
        hidden = fields.integer('hidden_size')
        head_dim = fields.integer('head_dim', default=hidden // heads)
        theta = fields.rope_theta(head_dim)
        return cls(
            vocab_size=fields.integer('vocab_size'),
            hidden=hidden,
            layers=layers,
            layer_types=layer_types,
            intermediate=_intermediate(fields),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope_theta=theta,
            conv_kernel=fields.integer('conv_L_cache', default=3, low=2),
            norm_eps=fields.positive('norm_eps', default=1e-5),
            tied=fields.tied('tie_embedding', default=True),
            max_positions=fields.integer('max_position_embeddings', high=2 ** 31),
            eos_token_ids=fields.eos_token_ids(),
        )


def _intermediate(fields: Fields) -> int:
    """Return the width of the MLP: two thirds of the declared one, rounded up, where asked for."""
    width = fields.integer('block_ff_dim', default=fields.text.get('intermediate_size'))
    if not fields.boolean('block_auto_adjust_ff_dim', default=True):
        return width
    width = 2 * width // 3
    if fields.text.get('block_ffn_dim_multiplier', 1.0) is None:
        return width
    width = int(fields.positive('block_ffn_dim_multiplier', default=1.0) * width)
    step = fields.integer('block_multiple_of', default=256)
    return -(-width // step) * step


def _preset(hidden: int, heads: int, ff: int, **other: Any) -> dict:
    return {
        'hidden_size': hidden, 'num_hidden_layers': 16, 'block_ff_dim': ff,
        'num_attention_heads': heads, 'num_key_value_heads': 8,
        'full_attn_idxs': [2, 5, 8, 10, 12, 14], 'conv_L_cache': 3, 'norm_eps': 1e-5,
        'vocab_size': 65536, 'max_position_embeddings': 128000, 'tie_embedding': True,
        'rope_theta': 1e6, 'dtype': 'bfloat16', **other,
    }


class Lfm2(Model):
    """The family; see :class:`flashrt_ros.models.model.Model` for what it offers."""

    family = 'lfm2'
    published = 'Lfm2ForCausalLM'
    model_types = ('lfm2',)
    #: sizes that ``random:<name>`` makes without a file
    presets = {
        'lfm2-tiny': _preset(64, 4, 192, num_hidden_layers=4, num_key_value_heads=2,
                             full_attn_idxs=[1, 3], vocab_size=512, block_multiple_of=32,
                             dtype='float32'),
        'lfm2-350m': _preset(1024, 16, 6656),
        'lfm2-700m': _preset(1536, 24, 10240),
        'lfm2-1.2b': _preset(2048, 32, 12288),
    }
    config_class = Lfm2Config
    norm_name = 'model.embedding_norm.weight'

    @classmethod
    def build_layers(cls, config: Lfm2Config) -> list[Layer]:
        """Return mixer and MLP of every layer in turn."""
        c = config
        layers: list[Layer] = []
        for index, kind in enumerate(c.layer_types):
            if kind == FULL:
                layers.append(QKNormAttention(
                    index, c.hidden, c.heads, c.kv_heads, c.head_dim, c.norm_eps, ATTENTION))
            else:
                layers.append(ShortConv(index, c.hidden, c.conv_kernel, c.norm_eps))
            layers.append(SwiGLU(index, c.hidden, c.intermediate, c.norm_eps, MLP))
        return layers
