"""The capsule: an immutable, frozen boundary with a name and a lineage."""

from __future__ import annotations

from dataclasses import dataclass, field
import threading
import time
from typing import NamedTuple

from flashrt_ros.capsule.anonymous import Anonymous
from flashrt_ros.capsule.boundary import HostState
from flashrt_ros.capsule.pool import Frozen, Pages


class _Clock:
    """Unix time in seconds that never goes back, as clocks of robots do when they are set."""

    def __init__(self) -> None:
        self._last = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            self._last = max(time.time(), self._last + 1e-6)
            return self._last


now = _Clock()


class CapsuleInfo(NamedTuple):
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

    :param frozen: block and pages in the pool, one reference; None while not on the device.
    :param on_host: block and pages in the pool of the host tier, one reference.
    :param replaces: a file of this name in the disk tier may be overwritten: it is an earlier
        capsule of ours, not that of another node.
    :param uids: of block and pages when it was last in memory, so that what is still there needs
        no copy when it comes back.
    :param moving: on its way up, not to be touched by the writer of files.
    :param hidden: the boundary of a parked session: listed nowhere, kept as any capsule, and on
        disk in a file without a name (``file``).
    :param used: when it was last saved or restored, by a clock that never goes back.
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
    on_host: Frozen | None = None
    on_disk: bool = False
    replaces: bool = False
    moving: bool = False
    hidden: bool = False
    file: Anonymous | None = None
    uids: tuple[int, Pages] | None = None
    used: float = field(default_factory=now)
    exact_future: bool = True
    warnings: list[str] = field(default_factory=list)
    #: pages that only it holds, by :meth:`Store.info`, and what that was read off
    alone: tuple[int, Pages, int] | None = None
    told: CapsuleInfo | None = None  # what was told last

    @property
    def tokens(self) -> int:
        """Known tokens: folded ones and the unfolded tail."""
        return self.position + len(self.host.tail)

    @property
    def in_memory(self) -> bool:
        """Whether the device or the host tier holds it."""
        return self.frozen is not None or self.on_host is not None

    @property
    def tiers(self) -> tuple[str, ...]:
        """Where it is, the fastest first."""
        return (*(('device',) if self.frozen is not None else ()),
                *(('host',) if self.on_host is not None else ()),
                *(('disk',) if self.on_disk else ()))
