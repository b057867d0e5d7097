"""`flashrt-ros top`: what a node does, live: state, tokens a second, latency, tiers, lineage."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
import time
from typing import Annotated, Any, TYPE_CHECKING

import typer

from flashrt_ros.cli import exits, output
from flashrt_ros.cli.live import full_name, NamespaceOption, not_found, plain, ros_node
from flashrt_ros.cli.opening import JsonOption
from flashrt_ros.cli.output import megabytes
from flashrt_ros.errors import NotActive

if TYPE_CHECKING:
    from rich.console import RenderableType

WINDOW = 2.0     # seconds that tokens a second are counted over
ONCE = 1.6       # seconds that --once listens: diagnostics come once a second
_LEVELS = {0: 'green', 1: 'yellow', 2: 'red', 3: 'magenta'}
_WORDS = {0: 'ok', 1: 'warn', 2: 'error', 3: 'stale'}


@dataclass
class View:
    """What was heard of one node so far."""

    name: str
    state: Any = None
    capsules: Any = None
    statuses: dict[str, Any] = field(default_factory=dict)
    text: str = ''
    speaker: str = ''
    messages: int = 0
    gaps: int = 0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)
    _seq: dict[bytes, int] = field(default_factory=dict)

    def listen(self, node: Any) -> None:
        """Subscribe to everything."""
        from diagnostic_msgs.msg import DiagnosticArray
        from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

        from flashrt_ros.msg import CapsuleList, NodeState, Token
        qos = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE,
                         durability=DurabilityPolicy.TRANSIENT_LOCAL)
        node.create_subscription(NodeState, f'{self.name}/state', self._take_state, qos)
        node.create_subscription(CapsuleList, f'{self.name}/capsules', self._take_capsules, qos)
        node.create_subscription(Token, f'{self.name}/tokens', self.take_token, 256)
        for topic in {'/diagnostics', self.name.rpartition('/')[0] + '/diagnostics'}:
            node.create_subscription(DiagnosticArray, topic, self.take_diagnostics, 10)

    def _take_state(self, message: Any) -> None:
        self.state = message

    def _take_capsules(self, message: Any) -> None:
        self.capsules = message

    def take_token(self, token: Any) -> None:
        """Count tokens, and messages that were missed."""
        goal = bytes(token.goal_id.uuid)
        if goal in self._seq:
            self.gaps += max(0, token.seq - self._seq[goal] - 1)
        elif len(self._seq) > 256:
            self._seq.clear()
        if goal not in self._seq:
            self.text, self.speaker = '', token.session
        self._seq[goal] = token.seq
        self.messages += 1
        self.text = (self.text + token.text)[-2000:]
        self._recent.append((time.monotonic(), len(token.token_ids)))

    def take_diagnostics(self, message: Any) -> None:
        """Keep the latest of each kind; its names begin with the node's."""
        for status in message.status:
            node, _, kind = status.name.rpartition(': ')
            if node == self.name:
                self.statuses[kind] = status

    def rate(self) -> float:
        """Return tokens a second over the last moments."""
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - WINDOW:
            self._recent.popleft()
        return sum(count for _, count in self._recent) / WINDOW

    def values(self, kind: str) -> dict[str, str]:
        """Return the values of a diagnostic status."""
        status = self.statuses.get(kind)
        return {pair.key: pair.value for pair in status.values} if status else {}

    def document(self) -> dict[str, Any]:
        """Return everything as what JSON can hold."""
        return {
            'node': self.name, 'state': plain(self.state),
            'capsules': plain(self.capsules.capsules) if self.capsules else [],
            'tokens_per_second': round(self.rate(), 2), 'messages': self.messages,
            'missed_messages': self.gaps,
            'diagnostics': {kind: {
                'level': _WORDS.get(_level(status), str(_level(status))),
                'message': status.message, 'values': self.values(kind)}
                for kind, status in sorted(self.statuses.items())}}


def _level(status: Any) -> int:
    level = status.level
    return level[0] if isinstance(level, bytes) else int(level)


def draw(view: View) -> RenderableType:
    """Return the picture of one moment."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text
    state = view.state
    if state is None:
        return Panel(Text(f'waiting for {view.name} ...', style='dim'), title='flashrt-ros top')
    latency = view.values('latency')
    first = Text.assemble(
        (state.lifecycle, 'bold green' if state.lifecycle == 'active' else 'bold yellow'),
        f'  {state.model}   ', (f'{view.rate():.1f} tokens/s', 'bold cyan'),
        f'   queue {state.queue_length}   missed {view.gaps}')
    parts: list[RenderableType] = [first]
    if latency:
        parts.append(Text('p50 / p99 ms   ' + '   '.join(
            f'{words} {latency.get(f"{key} p50 (ms)", "-")} / {latency.get(f"{key} p99 (ms)", "-")}'
            for key, words in (('first_token', 'first token'), ('inter_token', 'token'),
                               ('restore', 'restore')))))
    parts += [Text(''), _sessions(state), Text(''), _lineage(view), Text(''), _statuses(view)]
    if view.text:
        said = ' '.join(view.text.split())[-160:]
        parts += [Text(''), Text(f'{view.speaker}: …{said}', style='italic', overflow='ellipsis')]
    return Panel(Group(*parts), title=f'[bold]{view.name}[/]', title_align='left')


def _table(*headings: str) -> Any:
    from rich.table import Table
    table = Table(box=None, pad_edge=False, header_style='bold dim', expand=False)
    for heading in headings:
        right = heading in ('position', 'tokens', 'size', 'own')
        table.add_column(heading, justify='right' if right else 'left', no_wrap=True)
    return table


def _sessions(state: Any) -> RenderableType:
    table = _table('session', 'position', 'full', '', '')
    for session in state.sessions:
        share = session.position / max(1, session.capacity)
        bar = '█' * round(share * 20)
        table.add_row(session.name, str(session.position), f'{share:4.0%}', f'{bar:<20}',
                      '[bold cyan]speaks[/]' if session.busy else
                      'live' if session.resident else '[dim]parked[/]')
    return table


def _lineage(view: View) -> RenderableType:
    """Draw the capsules as the tree that they descend in."""
    from flashrt_ros.cli.call import tiers
    capsules = list(view.capsules.capsules) if view.capsules else []
    memory = view.values('memory')
    used, total = (int(memory.get(key, 0)) for key in ('pool_used_bytes', 'pool_bytes'))
    table = _table('capsule', 'tokens', 'size', 'own', 'where')
    children: dict[str, list[Any]] = {}
    known = {info.id for info in capsules}
    for info in capsules:
        children.setdefault(info.parent_id if info.parent_id in known else '', []).append(info)

    def grow(parent: str, indent: str) -> None:
        family = children.get(parent, [])
        for index, info in enumerate(family):
            last = index == len(family) - 1
            branch = '' if not parent else '└ ' if last else '├ '
            table.add_row(indent + branch + info.name + (' ●' if info.pinned else ''),
                          str(info.tokens), megabytes(info.bytes), megabytes(info.bytes_exclusive),
                          tiers(info.tiers))
            grow(info.id, indent + ('' if not parent else '  ' if last else '│ '))

    grow('', '')
    if total:
        table.caption = f'pool {megabytes(used)} of {megabytes(total)} ({used / total:.1%})'
        table.caption_justify = 'left'
    return table


def _statuses(view: View) -> RenderableType:
    table = _table('diagnostics', '', '')
    for kind, status in sorted(view.statuses.items()):
        level = _level(status)
        table.add_row(kind, f'[{_LEVELS.get(level, "red")}]{_WORDS.get(level, level)}[/]',
                      status.message)
    return table


def top(
    namespace: NamespaceOption = '',
    once: Annotated[bool, typer.Option('--once', help='Print one picture and end.')] = False,
    discovery: Annotated[float, typer.Option(
        '--discovery-timeout', min=0.1, help='Seconds until the node has to be found, with '
        '--once or --json.')] = 5.0,
    interval: Annotated[float, typer.Option(min=0.05, help='Seconds between two pictures.')] = 0.25,
    as_json: JsonOption = False,
) -> int:
    """
    Show a node live: state, tokens a second, latency, sessions, capsules and diagnostics.

    Diagnostics are read from /diagnostics and from that of the namespace, which robots.launch.py
    gives each robot.
    """
    name = full_name(namespace)
    with ros_node('top') as node:
        import rclpy
        view = View(name)
        view.listen(node)
        if once or as_json:
            _hear(node, view, discovery)
            if as_json:
                output.emit(view.document())
            else:
                output.people().print(draw(view))
            return exits.OK
        from rich.console import Console
        from rich.live import Live
        with Live(draw(view), console=Console(highlight=False), screen=True,
                  auto_refresh=False) as live:
            shown = 0.0
            while True:
                rclpy.spin_once(node, timeout_sec=interval)
                if time.monotonic() - shown >= interval:
                    shown = time.monotonic()
                    live.update(draw(view), refresh=True)


def _hear(node: Any, view: View, discovery: float) -> None:
    """
    Listen until there is something to say.

    :raises NotActive: the node is not there.
    """
    import rclpy
    begun = time.monotonic()
    while True:
        rclpy.spin_once(node, timeout_sec=0.05)
        elapsed = time.monotonic() - begun
        if view.state is None:
            if elapsed >= discovery:
                raise NotActive(not_found(node, view.name, discovery))
        elif elapsed >= ONCE and (view.statuses or elapsed >= ONCE + 2.0):
            return
