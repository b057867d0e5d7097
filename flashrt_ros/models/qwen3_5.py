"""
Qwen3.5 text: three gated delta nets to one gated attention, each with a gated MLP.

Semantics follow the published ``Qwen3_5ForCausalLM`` of ``transformers``. The file reads like the
model's ``config.json``: configuration, presets of the published sizes, model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashrt_ros.kernels.norm import Norm
from flashrt_ros.models.config import Fields
from flashrt_ros.models.layers.attention import GatedAttention
from flashrt_ros.models.layers.delta_net import GatedDeltaNet
from flashrt_ros.models.layers.mlp import GatedMLP
from flashrt_ros.models.model import Layer, Model

LINEAR, FULL = 'linear_attention', 'full_attention'


@dataclass(frozen=True)
class Qwen35Config:
    """Everything that shapes the function, under the names of this house."""

    vocab_size: int
    hidden: int
    layers: int
    layer_types: tuple[str, ...]
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_kernel: int
    norm_eps: float
    tied: bool
    max_positions: int
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_fields(cls, fields: Fields) -> Qwen35Config:
        """
        Read a checkpoint's configuration.

        :raises Corrupt: for a value that is missing or makes no sense.
        :raises Incompatible: for a variant that this family does not run.
        """
        fields.only('hidden_act', 'silu', default='silu')
        fields.only('attention_bias', False, default=False)
        fields.only('attn_output_gate', True, default=True)
        fields.only('output_gate_type', 'swish', 'silu', default='swish')
        fields.absent('num_experts', 'num_local_experts', 'num_experts_per_tok',
                      'moe_intermediate_size', what='mixture-of-experts layers')
        layers = fields.integer('num_hidden_layers', high=4096)
        interval = fields.integer('full_attention_interval', default=4)
        pattern = [LINEAR if (i + 1) % interval else FULL for i in range(layers)]
        layer_types = fields.strings('layer_types', layers, (LINEAR, FULL), default=pattern)
        heads, kv_heads = fields.multiple('num_attention_heads', 'num_key_value_heads')
        value_heads, key_heads = fields.multiple('linear_num_value_heads', 'linear_num_key_heads')
        head_dim = fields.integer('head_dim')
        theta, rotary_dim = fields.rope(head_dim, default_fraction=0.25)
        return cls(
            vocab_size=fields.integer('vocab_size'),
            hidden=fields.integer('hidden_size'),
            layers=layers,
            layer_types=layer_types,
            intermediate=fields.integer('intermediate_size'),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=theta,
            linear_key_heads=key_heads,
            linear_value_heads=value_heads,
            linear_key_dim=fields.integer('linear_key_head_dim'),
            linear_value_dim=fields.integer('linear_value_head_dim'),
            conv_kernel=fields.integer('linear_conv_kernel_dim', low=2),
            norm_eps=fields.positive('rms_norm_eps'),
            tied=fields.tied(),
            max_positions=fields.integer('max_position_embeddings', high=2 ** 31),
            eos_token_ids=fields.eos_token_ids(),
        )


def _preset(hidden: int, layers: int, linear: tuple[int, int, int], attention: tuple[int, int, int],
            intermediate: int, **other: Any) -> dict:
    """Return a checkpoint configuration; ``linear``/``attention``: KV heads, heads, head size."""
    return {
        'hidden_size': hidden, 'num_hidden_layers': layers, 'intermediate_size': intermediate,
        'linear_num_key_heads': linear[0], 'linear_num_value_heads': linear[1],
        'linear_key_head_dim': linear[2], 'linear_value_head_dim': linear[2],
        'num_key_value_heads': attention[0], 'num_attention_heads': attention[1],
        'head_dim': attention[2], 'linear_conv_kernel_dim': 4, 'rms_norm_eps': 1e-6,
        'vocab_size': 248320, 'max_position_embeddings': 262144, 'tie_word_embeddings': False,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e7,
                            'partial_rotary_factor': 0.25},
        'hidden_act': 'silu', 'dtype': 'bfloat16', **other,
    }


class Qwen35(Model):
    """The family; see :class:`flashrt_ros.models.model.Model` for what it offers."""

    family = 'qwen3_5'
    published = 'Qwen3_5ForCausalLM'
    #: ``model_type`` of the text part of a checkpoint
    model_types = ('qwen3_5_text', 'qwen3_5')
    #: sizes that ``random:<name>`` makes without a file
    presets = {
        'tiny': _preset(64, 4, (2, 4, 16), (2, 4, 32), 128, vocab_size=512,
                        full_attention_interval=2, max_position_embeddings=65536,
                        dtype='float32'),
        'small': _preset(256, 8, (4, 8, 32), (2, 4, 64), 768, vocab_size=4096,
                         tie_word_embeddings=True, max_position_embeddings=65536,
                         dtype='float32'),
        'qwen3.5-0.8b': _preset(1024, 24, (16, 16, 128), (2, 8, 256), 3584,
                                tie_word_embeddings=True),
        'qwen3.5-9b': _preset(4096, 32, (16, 32, 128), (4, 16, 256), 12288),
        'qwen3.5-27b': _preset(5120, 64, (16, 48, 128), (4, 24, 256), 17408),
    }
    config_class = Qwen35Config
    norm_init = 'zeros'

    @classmethod
    def build_layers(cls, config: Qwen35Config) -> list[Layer]:
        """Return mixer and MLP of every layer in turn."""
        c = config
        layers: list[Layer] = []
        for index, kind in enumerate(c.layer_types):
            if kind == FULL:
                layers.append(GatedAttention(
                    index, c.hidden, c.heads, c.kv_heads, c.head_dim, c.norm_eps))
            else:
                layers.append(GatedDeltaNet(
                    index, c.hidden, c.linear_key_heads, c.linear_value_heads, c.linear_key_dim,
                    c.linear_value_dim, c.conv_kernel, c.norm_eps))
            layers.append(GatedMLP(index, c.hidden, c.intermediate, c.norm_eps))
        return layers

    def final_norm(self) -> Norm:
        """Norms of this family store ``w`` and use ``1 + w``."""
        return Norm.of(self.parameters[self.norm_name] + 1, self.config.norm_eps)
