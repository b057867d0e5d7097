"""
Whom to ask to leave: the choice behind every eviction, in one function.

Capsules of a family share pages, so what counts is not the size of one but what its going frees:
demoting a parent whose children stay may free nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np

from flashrt_ros.capsule.pool import Ids, Pages

T = TypeVar('T')


def choose(ids: Ids, candidates: Iterable[tuple[T, Pages]], wanted: int) -> list[T] | None:
    """
    Choose holders to give their places back until ``wanted`` places are free.

    :param candidates: who may go, in the order they should (least recently used first), each with
        the places it holds one reference to.
    :return: those who must go, without any whose going would not be needed; None, before anybody
        was asked, if all of them together do not free enough.
    """
    missing = wanted - ids.available
    if missing <= 0:
        return []
    left = ids.references.copy()
    chosen: list[tuple[T, Pages]] = []
    gained = 0
    for item, places in candidates:
        left[places] -= 1
        gained += int(np.count_nonzero(left[places] == 0))
        chosen.append((item, places))
        if gained >= missing:
            break
    else:
        return None
    for entry in reversed(chosen[:-1]):  # the last one is needed; who before it is not?
        left[entry[1]] += 1
        lost = int(np.count_nonzero(left[entry[1]] == 1))
        if gained - lost >= missing:
            gained -= lost
            chosen.remove(entry)
        else:
            left[entry[1]] -= 1
    return [item for item, _ in chosen]
