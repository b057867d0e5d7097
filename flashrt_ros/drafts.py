"""
Drafts: guesses of the next tokens, to be verified by the plan.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): where the last few tokens stood before, what
followed them there is the guess. It needs no second model, and what a robot says repeats what it
was told: names of objects, skills, places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LONGEST, SHORTEST = 4, 2  # tokens that must agree, tried in this order


class PromptLookup:
    """
    The tokens of a session, searched for what its last ones are followed by.

    :param ids: integer ids ``[n]`` of the folded tokens.
    :param capacity: most tokens there will be.
    """

    def __init__(self, ids: np.ndarray, capacity: int) -> None:
        self._ids = np.empty(capacity, dtype=np.int64)
        self._ids[:len(ids)] = ids
        self._count = len(ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens that were folded."""
        self._ids[self._count:self._count + len(tokens)] = tokens
        self._count += len(tokens)

    def guess(self, count: int) -> list[int]:
        """Return up to ``count`` tokens that may come next; the latest place that agrees counts."""
        known = self._ids[:self._count]
        for length in range(LONGEST, SHORTEST - 1, -1):
            if len(known) <= length:
                continue
            fits = np.ones(len(known) - length, dtype=bool)
            for offset in range(length):
                fits &= known[offset:offset + len(fits)] == known[offset - length]
            places = np.flatnonzero(fits)
            if len(places):
                start = places[-1] + length
                return known[start:start + count].tolist()
        return []
