"""
The host part of a boundary: what a capsule keeps beside its buffers.

None of it grows with length: token ids are rows of the arena, the fold schedule is run-length
coded, and turn marks are one entry a turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

Sampler = tuple[float, int, float, int, int]  # temperature, top_k, top_p, seed, counter


@dataclass(frozen=True)
class Run:
    """
    ``count`` folds of ``length`` tokens each.

    ``sampler`` is None for appended tokens; for sampled ones (length 1) it holds
    ``[temperature, top_k, top_p, seed, counter]`` at the first of them, so that a replay leaves
    the sampler as the generation did.
    """

    length: int
    count: int
    sampler: Sampler | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return self.length * self.count


@dataclass(frozen=True)
class Schedule:
    """How the rows came to be: the list of folds from row 0 on. Immutable."""

    runs: tuple[Run, ...] = ()

    @property
    def tokens(self) -> int:
        """Position after the last fold."""
        return sum(run.tokens for run in self.runs)

    def appended(self, length: int) -> Schedule:
        """Return the schedule with one more appended chunk."""
        return self._plus(Run(length, 1))

    def sampled(self, sampler: Sampler, count: int = 1) -> Schedule:
        """Return the schedule with ``count`` more sampled tokens, the first at this counter."""
        return self._plus(Run(1, count, sampler))

    def _plus(self, run: Run) -> Schedule:
        if self.runs:
            last = self.runs[-1]
            after = last.sampler and (*last.sampler[:4], last.sampler[4] + last.count)
            if last.length == run.length and run.sampler == after:
                return Schedule((*self.runs[:-1], Run(run.length, last.count + run.count,
                                                      last.sampler)))
        return Schedule((*self.runs, run))

    def cut(self, position: int) -> Schedule:
        """Return the schedule of the first ``position`` tokens; a chunk may be cut in two."""
        result, done = Schedule(), 0
        for run in self.runs:
            whole = min(run.count, (position - done) // run.length)
            if whole:
                result = result._plus(replace(run, count=whole))
                done += whole * run.length
            if whole < run.count:
                return result.appended(position - done) if position > done else result
        return result

    def folds(self, start: int, stop: int,
              block: int = 1) -> Iterator[tuple[int, int, Sampler | None]]:
        """
        Yield ``(position, length, sampler)`` of each fold of ``[start, stop)``.

        ``start`` must be a border between folds; the last chunk is cut at ``stop``. Up to ``block``
        sampled tokens come at once; the sampler is that of the last of them.
        """
        done = 0
        for run in self.runs:
            skip = min(run.count, max(0, -(-(start - done) // run.length)))
            position = done + skip * run.length
            together = block if run.sampler else 1
            for index in range(skip, run.count, together):
                if position >= stop:
                    return
                tokens = min(together, run.count - index) * run.length
                tokens = min(tokens, stop - position)
                sampler = run.sampler and (*run.sampler[:4], run.sampler[4] + index + tokens - 1)
                yield position, tokens, sampler
                position += tokens
            done += run.tokens

    def pure_grid(self, grid: int) -> int:
        """Return the last multiple of ``grid`` that was reached purely by whole grid chunks."""
        first = self.runs[0] if self.runs else None
        if first is None or first.length != grid or first.sampler is not None:
            return 0
        return grid * first.count

    def to_json(self) -> list:
        """Return ``[[length, count, sampler or null], ...]``."""
        return [[r.length, r.count, r.sampler and list(r.sampler)] for r in self.runs]

    @classmethod
    def from_json(cls, data: list) -> Schedule:
        """Invert :meth:`to_json`."""
        runs = tuple(Run(int(length), int(count), None if sampler is None else tuple(sampler))
                     for length, count, sampler in data)
        for run in runs:
            if run.length < 1 or run.count < 1 or run.sampler and (
                    run.length > 1 or len(run.sampler) != 5
                    or not all(type(value) in (int, float) for value in run.sampler)
                    or not 0 <= run.sampler[4] < (1 << 63) - run.count):
                raise ValueError('its schedule cannot be')
        return cls(runs)


@dataclass(frozen=True)
class HostState:
    """
    Immutable host part of a boundary.

    :param schedule: the folds that made the rows.
    :param turns: ``(position, turn state)`` at the start of each turn, for "back one turn".
    :param turn: where the chat stands; a ``TurnState`` of the text room.
    :param role: role of the message folded last, for templates that care who speaks next.
    :param detokenizer: JSON state with bytes that are not yet a whole character; None if none.
    :param held: text held back because it may still become a stop string.
    :param tail: ids behind the position that are known but not folded (aligned capsules only).
    :param seeds: ``(position, seed)`` where a restore or a fork began another random sequence,
        which no fold tells of.
    """

    schedule: Schedule = field(default_factory=Schedule)
    turns: tuple[tuple[int, str], ...] = ()
    turn: str = 'empty'
    role: str | None = None
    detokenizer: dict | None = None
    held: str = ''
    tail: tuple[int, ...] = ()
    seeds: tuple[tuple[int, int], ...] = ()

    def seeded(self, seed: int) -> HostState:
        """Return the host part after another random sequence was begun at this boundary."""
        position = self.schedule.tokens
        earlier = (s for s in self.seeds if s[0] < position)
        return replace(self, seeds=(*earlier, (position, int(seed))))

    def to_json(self) -> dict:
        """Return a JSON-able form for files."""
        return {'schedule': self.schedule.to_json(), 'turns': [list(t) for t in self.turns],
                'turn': self.turn, 'role': self.role, 'detokenizer': self.detokenizer,
                'held': self.held, 'tail': list(self.tail),
                **({'seeds': [list(s) for s in self.seeds]} if self.seeds else {})}

    @classmethod
    def from_json(cls, data: dict) -> HostState:
        """Invert :meth:`to_json`; raises KeyError, TypeError or ValueError on other shapes."""
        return cls(
            schedule=Schedule.from_json(data['schedule']),
            turns=tuple((int(position), str(state)) for position, state in data['turns']),
            turn=str(data['turn']), role=data['role'], detokenizer=data['detokenizer'],
            held=str(data['held']), tail=tuple(int(token) for token in data['tail']),
            seeds=tuple((int(position), int(seed)) for position, seed in data.get('seeds', ())))

    def check(self, position: int) -> None:
        """
        Refuse what no boundary at ``position`` has.

        A file may come from anywhere, and nobody looks again before a verb relies on this.

        :raises ValueError: saying what cannot be.
        """
        for what, sound in (
                ('schedule', self.schedule.tokens == position),
                ('role', self.role is None or isinstance(self.role, str)),
                ('detokenizer', self.detokenizer is None or isinstance(self.detokenizer, dict)),
                ('turns', _rising([at for at, _ in self.turns], position + len(self.tail) - 1)),
                ('seeds', _rising([at for at, _ in self.seeds], position)
                 and all(0 <= seed < 1 << 64 for _, seed in self.seeds)),
                ('tail', all(0 <= token < 1 << 31 for token in self.tail))):
            if not sound:
                raise ValueError(f'its {what} cannot be')


EMPTY = HostState()  # of the empty boundary


def _rising(positions: list[int], last: int) -> bool:
    """Tell whether positions rise, from 0 at least to ``last`` at most."""
    return all(low < high for low, high in zip([-1, *positions], [*positions, last + 1]))
