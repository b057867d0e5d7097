"""What a check is: a small function that takes an engine and sizes, and answers with a figure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass
class Check:
    """
    One promise of the capsule contract, measured.

    ``figure`` is a number in ``unit``; it is None only where nothing was measured: the check does
    not apply to this model or device (``applicable`` is False, ``passed`` None, for it neither
    held nor failed) or it ended with an exception.
    """

    name: str
    passed: bool | None
    figure: float | int | None
    unit: str
    detail: str
    applicable: bool = True
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @property
    def verdict(self) -> str:
        """Return the outcome in words."""
        if not self.applicable:
            return 'not applicable'
        return 'passed' if self.passed else 'FAILED'


def not_applicable(name: str, reason: str) -> Check:
    """Return the answer of a check that has nothing to look at here."""
    return Check(name, None, None, '', f'not applicable: {reason}', applicable=False)


@dataclass(frozen=True)
class Sizes:
    """How much a run of the checks does, and where it may put files."""

    model: str
    dtype: str
    context: int
    directory: Path       #: the disk tier of the engine under test
    prompt: int = 700     #: tokens; more than one grid chunk and not a multiple of it
    steps: int = 64       #: compared steps after a restore
    cycles: int = 10_000  #: of save, restore and generate in `steady_memory`
    seconds: float = 90.0  #: after which `steady_memory` stops and says how far it came
    operations: int = 400  #: random operations in `lineage`
    seed: int = 20


class InjectedError(RuntimeError):
    """The exception that checks inject; nothing else raises it."""
