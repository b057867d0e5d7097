"""Stop strings over a stream of text: what may still become one is held back, nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashrt_ros.errors import Corrupt, InvalidArgument

MAX_STOPS = 16
MAX_STOP_CHARS = 256


class StopMatcher:
    """
    Cut a stream of text at the first stop string.

    The outcome depends on the characters only, never on how they were split into pushes: the
    stop that *completes* first wins, and of those that complete together the longest one.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """
        Check the stop strings.

        :raises InvalidArgument: too many, empty, too long or not text.
        """
        if isinstance(stops, (str, bytes)) or not isinstance(stops, Sequence):
            raise InvalidArgument('stop must be a list of strings; write ["..."] for a single one.')
        if len(stops) > MAX_STOPS:
            raise InvalidArgument(
                f'{len(stops)} stop strings were given; at most {MAX_STOPS} are allowed.')
        for stop in stops:
            if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
                raise InvalidArgument(
                    f'Each stop string must have 1 to {MAX_STOP_CHARS} characters.')
        self.stops = tuple(dict.fromkeys(stops))
        self._prefixes = {stop[:n] for stop in self.stops for n in range(1, len(stop))}
        self._longest = max(map(len, self.stops), default=1) - 1
        self.held = ''  # may still become a stop string
        self._matched: str | None = None

    @property
    def stopped(self) -> bool:
        """Tell whether a stop string was met; nothing is emitted from then on."""
        return self._matched is not None

    def push(self, text: str) -> tuple[str, bool, str | None]:
        """
        Take more text and return ``(emit, stopped, matched)``.

        ``emit`` can no longer belong to a stop string. At a match it ends where the stop string
        begins, and the rest of ``text`` is dropped.
        """
        if self._matched is not None:
            return '', True, self._matched
        if not self.stops:
            return text, False, None
        text = self.held + text
        self.held = ''
        hits = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self._matched = min(hits)
            return text[:at], True, self._matched
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._prefixes:
                self.held = text[-size:]
                return text[:-size], False, None
        return text, False, None

    def flush(self) -> str:
        """Return what was held back: the stream has ended and it became no stop string."""
        held, self.held = self.held, ''
        return held

    def state(self) -> dict[str, Any]:
        """Return all that :meth:`restore` needs, as JSON-able values."""
        return {'stops': list(self.stops), 'held': self.held, 'matched': self._matched}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> StopMatcher:
        """
        Continue from a value of :meth:`state`.

        :raises Corrupt: ``state`` is malformed.
        """
        try:
            matcher = cls(state['stops'])
            held, matched = state['held'], state['matched']
            sound = (held == '' or held in matcher._prefixes) and (
                matched is None or matched in matcher.stops)
        except (KeyError, TypeError, InvalidArgument) as error:
            raise Corrupt('The saved stop strings are malformed; use another capsule.') from error
        if not sound:
            raise Corrupt('The saved stop strings are malformed; use another capsule.')
        matcher.held, matcher._matched = held, matched
        return matcher
