"""`flashrt-ros capsule`: the files of a capsule directory, without loading a model."""

from __future__ import annotations

from datetime import datetime, timezone
import os
from pathlib import Path
from typing import Annotated, Any, TYPE_CHECKING

import typer

from flashrt_ros.cli import exchange, exits, output
from flashrt_ros.cli.opening import default_directory, JsonOption
from flashrt_ros.errors import FlashrtError, Storage

if TYPE_CHECKING:
    from flashrt_ros.capsule.header import Header
    from flashrt_ros.capsule.tiers import DiskTier

app = typer.Typer(no_args_is_help=True,
                  help='List, draw, show, verify, move and remove capsule files.')

DirectoryOption = Annotated[str, typer.Option(
    '--directory', '-d', envvar='FLASHRT_CAPSULES', show_default='the XDG data home',
    help='Directory of capsule files.')]


def open_directory(directory: str, create: bool = False) -> DiskTier:
    """
    Open the directory that a command was given, or the default one.

    :param create: a directory that is not there will be made by whoever writes first.
    :raises Storage: a directory that was named is none, or cannot be looked at.
    """
    from flashrt_ros.capsule.remote import is_url
    from flashrt_ros.capsule.tiers import DiskTier
    if is_url(directory):
        raise Storage(f'{directory!r} is a URL, and --directory is a place on this machine; '
                      '`flashrt-ros capsule import` fetches a file from a URL.')
    try:
        path = Path(directory).expanduser() if directory else default_directory()
        if directory and not create and not path.is_dir():
            raise Storage(f'{os.fspath(path)!r} is no directory; name one with --directory, or '
                          'let a node save a capsule first.')
    except (OSError, RuntimeError, ValueError) as error:  # no permission, too long, ~nobody
        raise Storage(f'{directory or os.environ.get("FLASHRT_CAPSULES", "")!r} cannot be used as '
                      f'a directory ({error}); name another one with --directory.') from error
    return DiskTier(path)


def _document(header: Header, size: int) -> dict[str, Any]:
    from flashrt_ros.capsule.fingerprint import Fingerprint
    return {
        'name': header.name, 'id': header.id, 'parent_id': header.parent_id,
        'session': header.session, 'tokens': header.position, 'file_bytes': size,
        'payload_bytes': header.payload_bytes, 'aligned': header.aligned,
        'created': datetime.fromtimestamp(header.created, timezone.utc).isoformat(),
        'note': header.note, 'fingerprint': Fingerprint.from_json(header.fingerprint).digest}


@app.command('ls')
def list_files(directory: DirectoryOption = '', as_json: JsonOption = False) -> int:
    """List the capsules of a directory; exit code 1 if a file there cannot be read."""
    tier = open_directory(directory)
    rows = [_document(header, size) for header, size in tier.headers()]
    problems = [{'file': path.name, 'reason': reason} for path, reason in tier.problems()]
    status = exits.FAILED if problems else exits.OK
    if as_json:
        output.emit({'directory': os.fspath(tier.directory), 'capsules': rows,
                     'unreadable': problems})
        return status
    from rich.markup import escape
    from rich.table import Table
    console = output.people()
    if not rows and not problems:
        console.print(f'No capsules in {escape(os.fspath(tier.directory))}.')
    if rows:
        table = Table(box=None, pad_edge=False, header_style='bold')
        for title, right in (('name', False), ('tokens', True), ('size', True),
                             ('created (UTC)', False), ('model', False), ('note', False)):
            table.add_column(title, justify='right' if right else 'left', overflow='fold')
        for row in rows:
            table.add_row(row['name'], f'{row["tokens"]:,}', output.megabytes(row['file_bytes']),
                          row['created'][:19].replace('T', ' '), row['fingerprint'][:8],
                          escape(row['note'][:30]))
        console.print(table)
    for problem in problems:
        console.print(f'[red]unreadable[/] {escape(problem["file"])}: '
                      f'{escape(problem["reason"])}')
    return status


@app.command('show')
def show(name: Annotated[str, typer.Argument(help='Name or id of a capsule.')],
         directory: DirectoryOption = '', as_json: JsonOption = False) -> int:
    """Show everything that the header of a capsule says; the payload is not read."""
    from flashrt_ros.capsule.codec import read_header
    tier = open_directory(directory)
    path = tier.path(tier.find(name))
    header = read_header(path)
    fingerprint = header.fingerprint
    document = {**_document(header, path.stat().st_size), 'file': os.fspath(path),
                'format_version': header.format_version, 'identity': fingerprint,
                'host': header.host, 'manifest': header.manifest, 'digests': header.digests}
    if as_json:
        output.emit(document)
        return exits.OK
    from rich.markup import escape
    from rich.table import Table
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style='bold')
    table.add_column(overflow='fold')
    for key in ('name', 'id', 'parent_id', 'session', 'tokens', 'created', 'aligned', 'note',
                'fingerprint', 'format_version', 'file'):
        table.add_row(key, escape(str(document[key])))
    table.add_row('size', f'{output.megabytes(document["file_bytes"])} '
                          f'({document["file_bytes"]:,} bytes)')
    roles: dict[str, int] = {}
    for buffer in header.manifest:
        roles[buffer['role']] = roles.get(buffer['role'], 0) + 1
    table.add_row('buffers', ', '.join(f'{count} {role}' for role, count in roles.items()))
    for part in ('hard', 'soft'):
        for key, value in fingerprint[part].items():
            text = str(value)
            table.add_row(f'{part}: {key}', escape(text if len(text) < 130 else text[:127] + '…'))
    output.people().print(table)
    return exits.OK


@app.command('verify')
def verify(names: Annotated[list[str] | None, typer.Argument(
        help='Names or ids; all of the directory where none is given.')] = None,
        directory: DirectoryOption = '', as_json: JsonOption = False) -> int:
    """Check header, sizes and the digest of every region; exit code 1 if a file fails."""
    from flashrt_ros.capsule import codec
    tier = open_directory(directory)
    results: list[dict[str, Any]] = []
    if not names:
        names = [header.name for header, _ in tier.headers()]
        results = [{'name': path.stem, 'passed': False, 'code': 'CORRUPT', 'message': reason}
                   for path, reason in tier.problems()]
    for name in names:
        path = tier.path(tier.find(name))
        try:
            header = codec.verify(path)
            results.append({'name': name, 'passed': True, 'code': '', 'message': (
                f'{len(header.digests or {})} regions, {header.payload_bytes} bytes, all digests '
                'hold')})
        except FlashrtError as error:
            results.append({'name': name, 'passed': False, 'code': error.code,
                            'message': str(error)})
    passed = all(result['passed'] for result in results)
    if as_json:
        output.emit({'passed': passed, 'directory': os.fspath(tier.directory),
                     'capsules': results})
    else:
        from rich.markup import escape
        console = output.people()
        for result in results:
            mark = '[green]✓[/]' if result['passed'] else '[bold red]✗[/]'
            console.print(f'{mark} [bold]{escape(result["name"])}[/] '
                          f'{escape(result["message"])}')
        if not results:
            console.print(f'No capsules in {escape(os.fspath(tier.directory))}.')
    return exits.OK if passed else exits.FAILED


@app.command('rm')
def remove(names: Annotated[list[str], typer.Argument(help='Names or ids of capsules.')],
           directory: DirectoryOption = '', as_json: JsonOption = False) -> int:
    """Delete capsule files; if one of the names is unknown nothing is deleted."""
    tier = open_directory(directory)
    found = list(dict.fromkeys(tier.find(name) for name in names))
    removed: list[dict[str, Any]] = [
        {'name': name, 'bytes_freed': tier.remove(name)} for name in found]
    if as_json:
        output.emit({'directory': os.fspath(tier.directory), 'removed': removed})
    else:
        for item in removed:
            output.people().print(f'removed [bold]{item["name"]}[/], '
                                  f'{output.megabytes(item["bytes_freed"])}')
    return exits.OK


@app.command('tree')
def tree(svg: Annotated[str, typer.Option('--svg', help='Also draw it into this file.')] = '',
         directory: DirectoryOption = '', as_json: JsonOption = False) -> int:
    """Show which capsule grew from which."""
    return exchange.tree(directory, svg, as_json)


@app.command('export')
def export(name: Annotated[str, typer.Argument(help='Name or id of a capsule.')],
           url: Annotated[str, typer.Argument(
               help='Directory or file (*.capsule), as a path or any URL that fsspec opens.')],
           overwrite: exchange.OverwriteOption = False, directory: DirectoryOption = '',
           as_json: JsonOption = False) -> int:
    """Copy a capsule somewhere else; every digest is checked first."""
    return exchange.export(name, url, directory, overwrite, as_json)


@app.command('import')
def import_(url: Annotated[str, typer.Argument(
        help='A capsule file, as a path or any URL that fsspec opens.')],
        name: Annotated[str, typer.Option('--name', help='Another name for it here.')] = '',
        overwrite: exchange.OverwriteOption = False, directory: DirectoryOption = '',
        as_json: JsonOption = False) -> int:
    """Fetch a capsule file; it gets its name only when every digest holds."""
    return exchange.import_(url, name, directory, overwrite, as_json)
