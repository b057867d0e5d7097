"""The capsule: an immutable, frozen boundary with a name and a lineage."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashrt_ros.capsule.boundary import HostState
from flashrt_ros.capsule.pool import Frozen


@dataclass(frozen=True)
class CapsuleInfo:
    """
    What is told about a capsule.

    ``tokens`` counts known tokens, the unfolded tail of an aligned capsule included;
    ``bytes_exclusive`` is what dropping it would free in the pool; ``tiers`` lists where it is;
    ``created`` is Unix time in seconds.
    """

    name: str
    id: str
    parent_id: str
    session: str
    fingerprint: str
    tokens: int
    bytes: int
    bytes_exclusive: int
    tiers: tuple[str, ...]
    pinned: bool
    aligned: bool
    exact_future: bool
    created: float
    note: str


@dataclass
class Capsule:
    """
    A frozen boundary and who it is.

    The bytes never change after the save; the fields below ``note`` are bookkeeping of the store.

    :param frozen: blocks and pages in the pool, one reference; None while only on disk.
    :param exact_future: False where a soft field of the fingerprint differs, so that going on
        from here may give other last bits than the machine that saved it would have.
    """

    id: str
    name: str
    parent_id: str
    session: str
    position: int
    aligned: bool
    created: float
    note: str
    host: HostState
    frozen: Frozen | None = None
    pinned: bool = False
    on_disk: bool = False
    exact_future: bool = True
    warnings: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Known tokens: folded ones and the unfolded tail."""
        return self.position + len(self.host.tail)
