"""`flashrt-ros capsule tree`, `export` and `import`: lineage, and files between machines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, TYPE_CHECKING

import typer

from flashrt_ros.cli import exits, output
from flashrt_ros.errors import Storage

if TYPE_CHECKING:
    from flashrt_ros.capsule.tree import Node

OverwriteOption = Annotated[bool, typer.Option(
    '--overwrite', help='Replace a capsule of that name.')]


def tree(directory: str, svg: str, as_json: bool) -> int:
    """Show who grew from whom."""
    from flashrt_ros.capsule.tree import forest, Node
    from flashrt_ros.capsule.tree import svg as draw
    from flashrt_ros.cli.capsules import open_directory
    tier = open_directory(directory)
    roots = forest([Node(header.id, header.name, header.parent_id, header.position
                         + len(header.host.get('tail', ())), size, header.aligned)
                    for header, size in tier.headers()])
    if svg:
        try:
            Path(svg).write_text(draw(roots, f'capsules of {tier.directory.name}'),
                                 encoding='utf-8')
        except OSError as error:
            raise Storage(f'Writing {svg!r} failed: {error.strerror}.') from error
    if as_json:
        output.emit({'directory': os.fspath(tier.directory), 'svg': svg or None,
                     'roots': [_nested(node) for node in roots]})
        return exits.OK
    from rich.markup import escape
    from rich.tree import Tree
    console = output.people()
    if not roots:
        console.print(f'No capsules in {escape(os.fspath(tier.directory))}.')
        return exits.OK
    top = Tree(f'[dim]{escape(os.fspath(tier.directory))}[/]', guide_style='dim')
    stack = [(top, node) for node in reversed(roots)]
    while stack:  # not recursive: a chain may be longer than the stack of Python
        branch, node = stack.pop()
        below = branch.add(_label(node))
        stack.extend((below, child) for child in reversed(node.children))
    console.print(top)
    if svg:
        console.print(f'drawn in [bold]{escape(svg)}[/]')
    return exits.OK


def _label(node: Node) -> str:
    from rich.markup import escape
    if node.gone:
        return f'[dim]dropped ({escape(node.id[:8])})[/]'
    mark = ' [magenta]aligned[/]' if node.aligned else ''
    return (f'[bold]{escape(node.name)}[/] {node.tokens:,} tokens, '
            f'{output.megabytes(node.size)}{mark}')


def _nested(root: Node) -> dict[str, Any]:
    def document(node: Node) -> dict[str, Any]:
        return {'name': node.name, 'id': node.id, 'tokens': node.tokens, 'file_bytes': node.size,
                'aligned': node.aligned, 'dropped': node.gone, 'children': []}
    result = document(root)
    stack = [(root, result)]
    while stack:
        node, into = stack.pop()
        for child in node.children:
            into['children'].append(document(child))
            stack.append((child, into['children'][-1]))
    return result


def export(name: str, url: str, directory: str, overwrite: bool, as_json: bool) -> int:
    """Copy a capsule to a path or URL."""
    from flashrt_ros.capsule.remote import export_file
    from flashrt_ros.cli.capsules import open_directory
    place = export_file(open_directory(directory), name, url, overwrite=overwrite)
    if as_json:
        output.emit({'name': name, 'url': place})
    else:
        output.people().print(f'exported [bold]{name}[/] to {place}', markup=True)
    return exits.OK


def import_(url: str, name: str, directory: str, overwrite: bool, as_json: bool) -> int:
    """Fetch a capsule from a path or URL."""
    from flashrt_ros.capsule.remote import import_file
    from flashrt_ros.cli.capsules import open_directory
    header = import_file(open_directory(directory, create=True), url, name=name,
                         overwrite=overwrite)
    if as_json:
        output.emit({'name': header.name, 'id': header.id, 'tokens': header.position, 'url': url})
    else:
        output.people().print(f'imported [bold]{header.name}[/], {header.position:,} tokens')
    return exits.OK
