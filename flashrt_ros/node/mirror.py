"""The latched topics: what the node tells of itself without being asked."""

from __future__ import annotations

from functools import partial
import threading
import time
from typing import Any, TYPE_CHECKING

from flashrt_ros.errors import DeadlineExceeded, NotActive
from flashrt_ros.node import convert
from flashrt_ros.node.jobs import describe

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine
    from flashrt_ros.node.node import CapsuleNode
    from flashrt_ros.node.runtime import Runtime

_PERIOD = 0.05  # seconds between two looks, at least
_SHARE = 0.05  # of the worker's time that looks may take: a thousand capsules take 5 to 10 ms


class Mirror:
    """
    Keeps ~/state and ~/capsules true.

    Sessions and capsules belong to the worker's thread, so it looks there, at a boundary, and
    publishes where something changed. A client that calls without pause must not make the worker
    look without pause: there are at most twenty looks a second, and fewer where there is much to
    see.

    :param node: gives the runtime, and takes the engine's facts.
    """

    def __init__(self, node: CapsuleNode) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._looking = self._stale = False
        self._planned = 0.0
        self._looked_at = 0.0
        self._pause = _PERIOD
        self._on_disk: set[str] = set()
        self.known: dict[Any, Any] = {}  # messages of the capsules, as they were seen last

    def forget(self) -> None:
        """Drop what is known of a runtime that is being freed."""
        with self._lock:
            self._looking = self._stale = False
        self._on_disk = set()

    def refresh(self) -> None:
        """Publish state and capsules anew, soon, where they changed. From any thread."""
        now = time.monotonic()
        with self._lock:
            if self._planned > now:
                return
            wait = self._looked_at + self._pause - now
            if wait > 0:
                self._planned = now + wait
        if wait > 0:
            self._node.alarms.at(now + wait, self._look)
        else:
            self._look()

    def watch_disk(self, capsule: str, patience: float = 0.05) -> None:
        """Refresh until a capsule shows the disk tier: it is written after the answer."""
        def look() -> None:
            self.refresh()
            if patience < 30 and self._node.runtime is not None and capsule not in self._on_disk:
                self.watch_disk(capsule, patience * 2)
        self._node.alarms.at(time.monotonic() + patience, look)

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        node, runtime = self._node, self._node.runtime
        if runtime is None:
            node.outbox.put_state(convert.node_state(node.lifecycle, '', (), set(), 0))
            node.outbox.put_capsules(convert.capsule_list(()))
            return
        with self._lock:
            self._stale = self._looking  # what is being looked at may be from before
            if self._looking:
                return
            self._looking = True
        try:
            runtime.worker.call(self._read, at_boundary=True, session=None).add_done_callback(
                partial(self._publish, runtime))
        except Exception:
            self._looking = False  # the worker is stopping

    def _read(self, engine: Engine) -> tuple[Any, Any, dict[str, Any]]:
        """Read the engine, on the worker thread."""
        began = time.monotonic()
        try:
            engine.flush(0)
        except DeadlineExceeded:
            pass  # writes are going on
        except Exception as error:
            self._node.failure = f'a capsule was not written to disk, {describe(error)}'
            self._node.get_logger().error(self._node.failure)
        seen = engine.sessions(), engine.list(), engine.facts()
        self._pause = max(_PERIOD, (time.monotonic() - began) / _SHARE)
        return seen

    def _publish(self, runtime: Runtime, future: Any) -> None:
        """Hand on what the worker saw. On its thread: the messages are filled elsewhere."""
        with self._lock:
            self._looking = False
            stale, self._stale = self._stale, False
        if stale:
            self.refresh()
        node = self._node
        if future.cancelled() or isinstance(future.exception(), NotActive):
            return
        if future.exception() is not None:
            node.get_logger().error(
                f'Sessions and capsules cannot be read, {describe(future.exception())}',
                throttle_duration_sec=10.0)
            return
        sessions, capsules, facts = future.result()
        if node.runtime is not runtime:
            return
        node.facts = facts
        self._on_disk = {info.name for info in capsules if 'disk' in info.tiers}

        def publish() -> None:
            self.known = {info: self.known.get(info) or convert.capsule_info(info)
                          for info in capsules}
            node.outbox.put_capsules(convert.capsule_list(capsules, self.known))
            node.outbox.put_state(convert.node_state(
                node.lifecycle, runtime.model, sessions, node.goals.busy_sessions(),
                node.goals.waiting()))
        node.outbox.put(publish)
