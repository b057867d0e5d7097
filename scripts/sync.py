#!/usr/bin/env python3
"""
Bring an installed flashrt_ros up to date with the source tree, without a rebuild.

Usage: sync.py PREFIX

Copies what changed in flashrt_ros/, launch/ and config/, and removes installed files that the
source tree no longer has. The generated interfaces are left alone: a changed .msg, .srv or .action
needs `make build`.
"""
import filecmp
import pathlib
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What rosidl generates into the package, told by how its relative path begins.
GENERATED = ('msg/', 'srv/', 'action/', '_flashrt_ros_s', 'flashrt_ros_s__')


def sources(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return the files below a folder by their relative path, caches left out."""
    return {
        str(path.relative_to(folder)): path for path in sorted(folder.rglob('*'))
        if path.is_file() and '__pycache__' not in path.parts}


def sync(source: pathlib.Path, target: pathlib.Path, generated: bool = False) -> list[str]:
    """Make target equal to source and return what changed; keep generated files if told so."""
    changed = []
    wanted = sources(source)
    for name, path in wanted.items():
        copy = target / name
        if not copy.is_file() or not filecmp.cmp(path, copy, shallow=False):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
            changed.append(name)
    for name, path in sources(target).items():
        if name in wanted:
            continue
        if generated and name.startswith(GENERATED):
            continue
        path.unlink()
        changed.append(f'-{name}')
    return changed


def main() -> int:
    """Sync the prefix of the command line."""
    prefix = pathlib.Path(sys.argv[1])
    packages = list(prefix.glob('lib/python3*/*-packages/flashrt_ros')) + list(
        prefix.glob('local/lib/python3*/*-packages/flashrt_ros'))
    if len(packages) != 1:
        print(f'flashrt_ros is not installed in {prefix}: run `make build`', file=sys.stderr)
        return 1
    changed = sync(ROOT / 'flashrt_ros', packages[0], generated=True)
    for folder in ('launch', 'config'):
        if (ROOT / folder).is_dir():
            changed += sync(ROOT / folder, prefix / 'share' / 'flashrt_ros' / folder)
    if changed:
        shown = ', '.join(changed[:4]) + (' ...' if len(changed) > 4 else '')
        print(f'synced {len(changed)} file(s) into {prefix}: {shown}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
