"""What the behaviours of a process share towards one flashrt node."""

from __future__ import annotations

from collections.abc import Iterator
import threading
import time
from typing import Any

from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.node import Node

from flashrt_ros.client import FlashrtClient, Stream

DEFAULT_SESSION = 'default'  # what '' means, on ~/tokens and ~/state
_PATIENCE = 10.0             # seconds after a cancel; then the node is not believed in any more
_PERIOD = 0.02               # seconds between two looks at what is cleaned up


class Connection:
    """
    One client, the goals that are on their way, and what is cleaned up behind a tree's back.

    A behaviour that is interrupted may not wait, but what it leaves must not meet what comes next:
    a cancelled goal may still reach the node, a branch has to be closed. So goals that were
    abandoned and scripts that clean up are kept here, by session, and each behaviour waits with
    RUNNING until its session is settled.
    """

    def __init__(self, node: Node, server: str, client: FlashrtClient | None = None) -> None:
        self.node = node
        self.client = client or FlashrtClient(node, server)
        self._owned = client is None
        self._streams: dict[Stream, str] = {}
        self._abandoned: dict[Stream, float] = {}
        self._scripts: list[tuple[frozenset[str], Iterator[Any]]] = []
        self._timer: Any = None
        self._lock = threading.Lock()
        self._group = MutuallyExclusiveCallbackGroup()

    # -- goals ------------------------------------------------------------------------------

    def generate(self, session: str, **fields: Any) -> Stream:
        """Send a goal, without waiting; the action has to be there. Fields as the client's."""
        stream = self.client.generate(session=session, **fields)
        self._streams[stream] = session or DEFAULT_SESSION
        stream.done.add_done_callback(lambda _: self._ended(stream))
        return stream

    def abandon(self, stream: Stream) -> None:
        """Cancel a goal that nobody waits for any more, also before it was acknowledged."""
        if not stream.done.done():
            self._abandoned[stream] = time.monotonic() + _PATIENCE
            stream.cancel()
            if stream.done.done():  # in between, on the thread that spins
                self._ended(stream)

    def _ended(self, stream: Stream) -> None:
        self._streams.pop(stream, None)
        self._abandoned.pop(stream, None)

    def ending(self, session: str) -> bool:
        """Tell whether an abandoned goal of a session has not ended yet."""
        session, now = session or DEFAULT_SESSION, time.monotonic()
        return any(self._streams.get(stream) == session and now < deadline
                   for stream, deadline in list(self._abandoned.items()))

    # -- cleaning up ------------------------------------------------------------------------

    def attend(self, script: Iterator[Any], *sessions: str) -> None:
        """Run a script to its end on the thread that spins; those of one session in order."""
        with self._lock:
            self._scripts.append((frozenset(name or DEFAULT_SESSION for name in sessions), script))
            if self._timer is None:
                self._timer = self.node.create_timer(
                    _PERIOD, self._advance, callback_group=self._group)

    def settling(self, session: str) -> bool:
        """Tell whether something that was interrupted in a session is not over yet."""
        name = session or DEFAULT_SESSION
        return self.ending(name) or any(name in names for names, _ in list(self._scripts))

    @property
    def busy(self) -> bool:
        """Tell whether anything that was interrupted is not over yet."""
        return bool(self._scripts) or any(
            self.ending(session) for session in set(list(self._streams.values())))

    def _advance(self) -> None:
        blocked: set[str] = set()
        for entry in list(self._scripts):
            names, script = entry
            if not names & blocked:
                try:
                    next(script)
                except StopIteration:
                    self._scripts.remove(entry)
                    continue
                except Exception as error:  # an exception here would end the user's executor
                    self._scripts.remove(entry)
                    self.node.get_logger().error(f'Cleaning up behind a tree failed: {error!r}')
                    continue
            blocked |= names
        with self._lock:  # a script may come from the thread that ticks right now
            if not self._scripts and self._timer is not None:
                timer, self._timer = self._timer, None
                self.node.destroy_timer(timer)

    def close(self) -> None:
        """Destroy the client, where it was made here."""
        if self._owned:
            self.client.destroy()


def _connections(node: Node) -> dict[tuple[str, FlashrtClient | None], Connection]:
    # Kept by the node itself: a table here would keep nodes alive that nobody uses any more.
    return node.__dict__.setdefault('_flashrt_connections', {})


def connect(server: str, owner: str, **kwargs: Any) -> Connection:
    """
    Return the connection to a flashrt node, the same one for all behaviours.

    It stays as long as the node, since rclpy raises in the user's executor where an action client
    is destroyed while that one spins.

    :param server: full name of the flashrt node.
    :param owner: name of the behaviour, for the error.
    :param kwargs: those of ``setup``: ``node``, an rclpy node, or ``client``, a FlashrtClient,
        which then serves the behaviours of that server.
    :raises KeyError: neither was given.
    """
    server = server.rstrip('/')
    client = kwargs.get('client')
    if client is not None and client.name != server:
        client = None
    node = kwargs.get('node') or (client.node if client is not None else None)
    if node is None:
        raise KeyError(f"{owner} found no 'node' in setup's keyword arguments: call "
                       'tree.setup(node=...) with an rclpy node.')
    connections = _connections(node)
    if (server, client) not in connections:
        connections[server, client] = Connection(node, server, client)
    return connections[server, client]


def disconnect(node: Node) -> None:
    """Destroy what the behaviours made on a node; only where nobody spins it any more."""
    connections = _connections(node)
    while connections:
        connections.popitem()[1].close()


def is_settled(node: Node) -> bool:
    """
    Tell whether all that interrupted behaviours left behind is cleaned up.

    Spin `node` until this is True before a process leaves that interrupted its tree; else branches
    and snapshots stay in the flashrt node.
    """
    return not any(connection.busy for connection in list(_connections(node).values()))
