"""Counts and latencies that diagnostics tell."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
import threading
import time
from typing import Any, TYPE_CHECKING

from flashrt_ros.errors import FlashrtError

if TYPE_CHECKING:
    from flashrt_ros.results import Generation

_KEPT = 1024


class Statistics:
    """Recent latencies (seconds) and outcomes since activate; cheap enough for every token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        with self._lock:
            self.outcomes: Counter[str] = Counter()
            self.tokens = 0
            self._inter_token: deque[float] = deque(maxlen=_KEPT)
            self._first_token: deque[float] = deque(maxlen=_KEPT)
            self._restore: deque[float] = deque(maxlen=_KEPT)
            self._before: tuple[Any, float] | None = None

    def piece(self, goal_id: Any, tokens: int) -> None:
        """Count tokens of a goal, at the moment the host has them."""
        now = time.monotonic()
        before, self._before = self._before, (goal_id, now)
        self.tokens += tokens
        if before is not None and before[0] is goal_id and tokens > 0:
            self._inter_token.append((now - before[1]) / tokens)

    def end(self, error: BaseException | None, generation: Generation | None) -> None:
        """Count the end of a goal."""
        code = 'NONE' if error is None else getattr(error, 'code', 'INTERNAL')
        with self._lock:
            self.outcomes[code] += 1
            if generation is not None and generation.completion_tokens > 0:
                self._first_token.append(float(generation.time_to_first_token or 0.0))

    def service(self, name: str, error: BaseException | None, elapsed: float) -> None:
        """Count the answer of a service."""
        if error is not None and not isinstance(error, FlashrtError):
            code = 'INTERNAL'
        else:
            code = 'NONE' if error is None else error.code
        with self._lock:
            self.outcomes[f'{name} {code}'] += 1
            if name == 'restore_capsule' and error is None:
                self._restore.append(elapsed)

    def quantiles(self) -> dict[str, tuple[float, float, int]]:
        """Return median, 99th percentile and count of each latency."""
        with self._lock:
            kept = {'first_token': list(self._first_token), 'inter_token': list(self._inter_token),
                    'restore': list(self._restore)}
        return {name: (quantile(values, 0.5), quantile(values, 0.99), len(values))
                for name, values in kept.items()}


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value below which `share` of the values lie; 0 where there are none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
