"""
Qwen3, dense: an attention with QK norm and a gated MLP a layer, and no other state.

Semantics follow the published ``Qwen3ForCausalLM`` of ``transformers``. The file reads like the
model's ``config.json``: configuration, presets of the published sizes, model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashrt_ros.models.config import Fields
from flashrt_ros.models.layers.attention import QKNormAttention
from flashrt_ros.models.layers.mlp import SwiGLU
from flashrt_ros.models.model import Layer, Model


@dataclass(frozen=True)
class Qwen3Config:
    """Everything that shapes the function, under the names of this house."""

    vocab_size: int
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    tied: bool
    max_positions: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated: all."""
        return self.head_dim

    @classmethod
    def from_fields(cls, fields: Fields) -> Qwen3Config:
        """
        Read a checkpoint's configuration.

        :raises Corrupt: for a value that is missing or makes no sense.
        :raises Incompatible: for a variant that this family does not run.
        """
        fields.only('hidden_act', 'silu', default='silu')
        fields.only('attention_bias', False, default=False)
        fields.only('use_sliding_window', False, default=False)
        fields.absent('num_experts', 'num_local_experts', 'num_experts_per_tok',
                      'moe_intermediate_size', what='mixture-of-experts layers')
        layers = fields.integer('num_hidden_layers', high=4096)
        fields.strings('layer_types', layers, ('full_attention',),
                       default=['full_attention'] * layers)
        heads, kv_heads = fields.multiple('num_attention_heads', 'num_key_value_heads')
        head_dim = fields.integer('head_dim', default=128)
        return cls(
            vocab_size=fields.integer('vocab_size'),
            hidden=fields.integer('hidden_size'),
            layers=layers,
            intermediate=fields.integer('intermediate_size'),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope_theta=fields.rope_theta(head_dim),
            norm_eps=fields.positive('rms_norm_eps'),
            tied=fields.tied(),
            max_positions=fields.integer('max_position_embeddings', high=2 ** 31),
            eos_token_ids=fields.eos_token_ids(),
        )


def _preset(hidden: int, layers: int, attention: tuple[int, int, int], intermediate: int,
            **other: Any) -> dict:
    """Return a checkpoint configuration; ``attention``: KV heads, heads, head size."""
    return {
        'hidden_size': hidden, 'num_hidden_layers': layers, 'intermediate_size': intermediate,
        'num_key_value_heads': attention[0], 'num_attention_heads': attention[1],
        'head_dim': attention[2], 'rms_norm_eps': 1e-6, 'vocab_size': 151936,
        'max_position_embeddings': 40960, 'tie_word_embeddings': True, 'rope_theta': 1e6,
        'hidden_act': 'silu', 'dtype': 'bfloat16', **other,
    }


class Qwen3(Model):
    """The family; see :class:`flashrt_ros.models.model.Model` for what it offers."""

    family = 'qwen3'
    published = 'Qwen3ForCausalLM'
    model_types = ('qwen3',)
    #: sizes that ``random:<name>`` makes without a file
    presets = {
        'qwen3-tiny': _preset(64, 3, (2, 4, 32), 128, vocab_size=512, dtype='float32'),
        'qwen3-0.6b': _preset(1024, 28, (8, 16, 128), 3072),
        'qwen3-1.7b': _preset(2048, 28, (8, 16, 128), 6144),
        'qwen3-4b': _preset(2560, 36, (8, 32, 128), 9728),
    }
    config_class = Qwen3Config

    @classmethod
    def build_layers(cls, config: Qwen3Config) -> list[Layer]:
        """Return attention and MLP of every layer in turn."""
        c = config
        layers: list[Layer] = []
        for index in range(c.layers):
            layers.append(QKNormAttention(
                index, c.hidden, c.heads, c.kv_heads, c.head_dim, c.norm_eps))
            layers.append(SwiGLU(index, c.hidden, c.intermediate, c.norm_eps))
        return layers
