"""
The lineage of capsules as a forest, and as a picture.

Parents are known by id, so a capsule whose parent was dropped keeps its place: the gap is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

ROW = 34  # pixels between two capsules
LEFT, TOP, WIDTH, LABEL = 24, 46, 460, 250  # pixels: margins, the token axis, room for names
_STYLE = (
    'text{font-family:ui-sans-serif,system-ui,"DejaVu Sans",sans-serif;font-size:13px;fill:#1f2328;'
    'paint-order:stroke;stroke:#fff;stroke-width:3px}'
    '.dim{fill:#6e7781;font-size:11px}.edge{fill:none;stroke:#8c959f;stroke-width:1.6}'
    '.lost{stroke-dasharray:3 4}.axis{stroke:#d0d7de;stroke-width:1}'
    '.node{fill:#0969da}.aligned{fill:#8250df}.gone{fill:#fff;stroke:#8c959f;stroke-width:1.6}')


@dataclass
class Node:
    """
    A capsule in the forest; ``gone`` stands for a parent that is no longer there.

    :param tokens: known tokens; of a gone parent the fewest that any child has, its upper bound.
    """

    id: str
    name: str
    parent_id: str
    tokens: int
    size: int = 0
    aligned: bool = False
    gone: bool = False
    children: list[Node] = field(default_factory=list)


def forest(capsules: Iterable[Node]) -> list[Node]:
    """
    Hang capsules under their parents; return the roots, each level by tokens and name.

    Files may claim any parent, also in a circle; a circle is cut, nobody is lost.
    """
    nodes = {node.id: node for node in capsules}
    for node in list(nodes.values()):
        if node.parent_id and node.parent_id not in nodes:
            nodes[node.parent_id] = Node(node.parent_id, '', '', node.tokens, gone=True)
    cut = _cuts(nodes)
    roots = []
    for node in nodes.values():
        if node.parent_id and node.id not in cut:
            nodes[node.parent_id].children.append(node)
        else:
            roots.append(node)
    for node in nodes.values():
        node.children.sort(key=_order)
        if node.gone:
            node.tokens = min(child.tokens for child in node.children)
    return sorted(roots, key=_order)


def _cuts(nodes: dict[str, Node]) -> set[str]:
    """Return the first node, by id, of each circle of parents."""
    cuts: set[str] = set()
    done: set[str] = set()
    for start in nodes:
        path: dict[str, None] = {}
        here = start
        while here in nodes and here not in done and here not in path:
            path[here] = None
            here = nodes[here].parent_id
        if here in path:
            order = list(path)
            cuts.add(min(order[order.index(here):]))
        done.update(path)
    return cuts


def _order(node: Node) -> tuple[int, str, str]:
    return node.tokens, node.name, node.id


def walk(roots: Iterable[Node]) -> Iterator[tuple[Node, Node | None]]:
    """Yield every node with its parent, a parent before its children, branches together."""
    stack: list[tuple[Node, Node | None]] = [(root, None) for root in reversed(list(roots))]
    while stack:
        node, parent = stack.pop()
        yield node, parent
        stack.extend((child, node) for child in reversed(node.children))


def svg(roots: list[Node], title: str = '') -> str:
    """Draw a forest: to the right by tokens, downwards one capsule a row."""
    order = list(walk(roots))
    most = max((node.tokens for node, _ in order), default=1) or 1
    places = {id(node): (LEFT + round(WIDTH * node.tokens / most, 1), TOP + index * ROW + ROW / 2)
              for index, (node, _) in enumerate(order)}
    height = TOP + len(order) * ROW + 30
    width = LEFT + WIDTH + LABEL
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
             f'viewBox="0 0 {width} {height}">', f'<style>{_STYLE}</style>',
             f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
             f'<text x="{LEFT}" y="24">{escape(title)}</text>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = LEFT + WIDTH * share
        parts.append(f'<line class="axis" x1="{x}" y1="{TOP - 8}" x2="{x}" y2="{height - 22}"/>'
                     f'<text class="dim" x="{x}" y="{height - 8}" text-anchor="middle">'
                     f'{round(most * share):,}{" tokens" if share == 1 else ""}</text>')
    for node, parent in order:
        if parent is not None:
            (x0, y0), (x1, y1) = places[id(parent)], places[id(node)]
            middle = min(x0 + 14, (x0 + x1) / 2)
            lost = ' lost' if parent.gone else ''
            parts.append(f'<path class="edge{lost}" d="M{x0} {y0} C{x0} {y1}, {middle} {y1}, '
                         f'{x1} {y1}"/>')
    for node, _ in order:
        x, y = places[id(node)]
        kind = 'gone' if node.gone else 'aligned' if node.aligned else 'node'
        name = 'dropped' if node.gone else node.name
        detail = node.id[:8] if node.gone else f'{node.tokens:,} tokens'
        dim = ' class="dim"' if node.gone else ''
        parts.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="5"/>'
                     f'<text x="{x + 11}" y="{y + 4}"{dim}>{escape(_short(name))} '
                     f'<tspan class="dim">{detail}</tspan></text>')
    parts.append('</svg>')
    return '\n'.join(parts) + '\n'


def _short(name: str) -> str:
    return name if len(name) <= 22 else f'{name[:14]}…{name[-7:]}'
