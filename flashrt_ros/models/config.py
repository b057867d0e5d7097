"""Typed reading of a checkpoint's configuration: every refusal names field, value and remedy."""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

from flashrt_ros.errors import Corrupt, Incompatible

_MISSING = object()


class Fields:
    """
    The configuration of the text model of a checkpoint.

    :param text: the text configuration (``text_config`` of a multimodal checkpoint, else the
        whole file).
    :param outer: the whole file, for what the outer model decides.
    :param generation: ``generation_config.json``, empty where there is none.
    :param where: path or spec to name in messages.
    """

    def __init__(self, text: dict, outer: dict | None = None, generation: dict | None = None,
                 where: str = 'config') -> None:
        self.text = text
        self.outer = text if outer is None else outer
        self.generation = generation or {}
        self.where = where

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """Return the value, or the default where the key is missing or null."""
        value = self.text.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise Corrupt(f'{self.where} lacks {key!r}; fetch the checkpoint again or complete '
                          'its config.json')
        return default

    def _bad(self, key: str, value: Any, need: str) -> Corrupt:
        return Corrupt(f'{self.where}: {key} is {value!r} but must be {need}; correct config.json')

    def integer(self, key: str, default: Any = _MISSING, low: int = 1,
                high: int = 2 ** 24) -> int:
        """Return an integer of ``[low, high]``."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._bad(key, value, f'an integer from {low} to {high}')
        return value

    def positive(self, key: str, default: Any = _MISSING) -> float:
        """Return a finite number above zero."""
        return self._positive(key, self.get(key, default))

    def _positive(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) \
                or not math.isfinite(value) or value <= 0:
            raise self._bad(key, value, 'a finite number above zero')
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, value, 'true or false')
        return value

    def indices(self, key: str, count: int, default: list[int]) -> list[int]:
        """Return a list of integers of ``[0, count)``."""
        values = self.get(key, default)
        if not isinstance(values, list) or any(
                isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < count
                for v in values):
            raise self._bad(key, values, f'a list of integers from 0 to {count - 1}')
        return values

    def multiple(self, many: str, few: str) -> tuple[int, int]:
        """Return two head counts of which the first is a multiple of the second."""
        a, b = self.integer(many), self.integer(few)
        if a % b:
            raise self._bad(many, a, f'a multiple of {few} = {b}')
        return a, b

    def strings(self, key: str, count: int, allowed: Sequence[str],
                default: Any = _MISSING) -> tuple[str, ...]:
        """Return ``count`` strings out of ``allowed``."""
        values = self.get(key, default)
        if not isinstance(values, list) or len(values) != count:
            raise self._bad(key, values, f'a list of {count} entries')
        for value in values:
            if value not in allowed:
                raise Incompatible(f'{self.where}: {key} has {value!r}; supported are '
                                   f'{", ".join(allowed)}')
        return tuple(values)

    def only(self, key: str, *supported: Any, default: Any) -> None:
        """Refuse a value that the family does not run."""
        value = self.get(key, default)
        if value not in supported:
            raise Incompatible(f'{self.where}: {key}={value!r} is not supported, only '
                               f'{" or ".join(map(repr, supported))}; choose another checkpoint')

    def absent(self, *keys: str, what: str) -> None:
        """Refuse a checkpoint that has any of ``keys`` set."""
        for key in keys:
            if self.text.get(key):
                raise Incompatible(f'{self.where}: {what} ({key}={self.text[key]!r}) are not '
                                   'supported; choose a dense checkpoint')

    def tied(self, *aliases: str, default: bool = False) -> bool:
        """
        Whether the head is the embedding table; what the outer model says comes first.

        :param aliases: what older checkpoints of the family call it; these count first.
        """
        for key in (*aliases, 'tie_word_embeddings'):
            for source in (self.outer, self.text):
                value = source.get(key)
                if isinstance(value, bool):
                    return value
                if value is not None:
                    raise self._bad(key, value, 'true or false')
        return default

    def rope_theta(self, head_dim: int) -> float:
        """Return the rotary base of a family that rotates whole heads."""
        theta, rotary = self.rope(head_dim, default_fraction=1.0)
        if rotary != head_dim:
            raise Incompatible(f'{self.where}: partial_rotary_factor is not supported for this '
                               'family, which rotates whole heads; choose another checkpoint')
        return theta

    def rope(self, head_dim: int, default_fraction: float) -> tuple[float, int]:
        """
        Return rotary base and number of rotated dimensions.

        ``rope_parameters`` is the present place; ``rope_scaling`` with ``rope_theta`` and
        ``partial_rotary_factor`` beside it are the older ones. Where both are, the older one
        counts, as in transformers: it is what people add by hand for longer contexts.
        """
        rope = self.text.get('rope_scaling') or self.text.get('rope_parameters') or {}
        if not isinstance(rope, dict):
            raise self._bad('rope_parameters', rope, 'an object')
        kind = rope.get('rope_type', rope.get('type', 'default'))
        if kind not in ('default', 'mrope'):
            raise Incompatible(f'{self.where}: rope_type {kind!r} is not supported, only '
                               "'default'; use the checkpoint without length scaling")
        theta = rope.get('rope_theta', self.text.get('rope_theta'))
        if theta is None:
            raise Corrupt(f'{self.where} lacks rope_theta; complete rope_parameters in '
                          'config.json')
        fraction = rope.get('partial_rotary_factor')
        if fraction is None:
            fraction = self.text.get('partial_rotary_factor', default_fraction)
        fraction = self._positive('partial_rotary_factor', fraction)
        rotary = int(head_dim * fraction)
        if fraction > 1 or rotary < 2 or rotary % 2:
            raise self._bad('partial_rotary_factor', fraction,
                            f'such that an even part of head_dim = {head_dim} is rotated')
        return self._positive('rope_theta', theta), rotary

    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens: those of generation_config.json, else of the configuration."""
        value = None
        for source in (self.generation, self.text, self.outer):
            value = source.get('eos_token_id')
            if value is not None:
                break
        if value is None:
            return ()
        vocab = self.integer('vocab_size')
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise self._bad('eos_token_id', value, f'token ids below vocab_size = {vocab}')
        return tuple(dict.fromkeys(ids))
