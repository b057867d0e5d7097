"""Requests to the engine and its answers: plain data, free of ROS and torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import time
from typing import NamedTuple

from flashrt_ros.capsule.capsule import CapsuleInfo
from flashrt_ros.control import FinishReason


@dataclass
class GenerateRequest:
    """
    What to generate.

    At most one of ``prompt`` (one user turn, or raw text with ``raw``), ``messages`` (pairs of
    role and content) and ``token_ids`` is the source; none continues where the session stands.
    ``None`` for a sampler setting leaves what the state holds; ``seed`` restarts the sequence.

    :param capsule: restore this one first; refused before anything changes if it cannot be.
    :param save_as: name for the end boundary.
    :param max_tokens: -1 for the configured default; 0 folds the source and samples nothing.
    :param rollback_on_cancel: a cancelled, preempted or timed out request leaves the session
        where it was before the request.
    """

    session: str = 'default'
    prompt: str | None = None
    messages: Sequence[tuple[str, str]] = ()
    token_ids: Sequence[int] = ()
    raw: bool = False
    capsule: str = ''
    save_as: str = ''
    max_tokens: int = -1
    stop: Sequence[str] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    rollback_on_cancel: bool = False


class Generation(NamedTuple):
    """The answer; times in seconds, ``time_to_first_token`` counts restore and prefill."""

    session: str
    finish_reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    tokens_reused: int
    tokens_prefilled: int
    completion_tokens: int
    time_to_first_token: float
    tokens_per_second: float
    epoch: int
    position: int
    info: CapsuleInfo | None = None


class SessionInfo(NamedTuple):
    """A session: ``resident`` means live on the arena, ``busy`` that a generation runs on it."""

    name: str
    position: int
    capacity: int
    epoch: int
    busy: bool
    resident: bool


class AppendResult(NamedTuple):
    """Answer of an append; ``elapsed`` in seconds."""

    tokens_prefilled: int
    position: int
    epoch: int
    elapsed: float


class SaveResult(NamedTuple):
    """
    Answer of a save; ``bytes_copied`` is what was not in pages yet, plus the fixed block.

    ``tokens_prefilled`` is what the rebuild of an aligned save cost, 0 otherwise.
    """

    info: CapsuleInfo
    bytes_copied: int
    elapsed: float
    tokens_prefilled: int = 0


class RestoreResult(NamedTuple):
    """Answer of a restore; ``info`` is None for a reset to the empty boundary."""

    info: CapsuleInfo | None
    epoch: int
    tokens_reused: int
    bytes_copied: int
    elapsed: float


class ForkResult(NamedTuple):
    """Answer of a fork: the capsule all branches grow from."""

    info: CapsuleInfo
    sessions: tuple[str, ...]
    bytes_copied: int
    elapsed: float


class RollbackResult(NamedTuple):
    """Answer of a rollback."""

    epoch: int
    position: int
    tokens_replayed: int
    bytes_copied: int
    elapsed: float


class Stopwatch:
    """Times of a request on the steady clock, in seconds from its construction."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._first: float | None = None

    def first(self) -> None:
        """Note the first token; later calls change nothing."""
        if self._first is None:
            self._first = time.monotonic()

    def to_first(self) -> float:
        """Seconds to the first token, or until now if there was none."""
        return (self._first or time.monotonic()) - self._begin

    def rate(self, count: int) -> float:
        """Tokens a second after the first one; 0 where there is nothing to measure."""
        if self._first is None or count < 2:
            return 0.0
        spent = time.monotonic() - self._first
        return (count - 1) / spent if spent > 0 else 0.0
