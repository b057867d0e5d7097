#!/usr/bin/env python3
"""
List who may restore what by trying it: each field of the fingerprint in turn is another one.

Prints a table in Markdown: field, value in the capsule, value here, answer. Exits with 1 if a hard
field lets a capsule pass, a soft one does not tell, or a refusal leaves another live state.

    python tools/refusals.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
import sys
from tempfile import TemporaryDirectory
from typing import Any

from flashrt_ros.capsule.fingerprint import Fingerprint
from flashrt_ros.engine import Engine, EngineConfig
from flashrt_ros.errors import FlashrtError, Incompatible

SHORT = 24  # characters of a value that are shown
MODEL = 'random:tiny'


def paths(part: dict[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Yield each field that is no object, by its dotted path, with its value."""
    for key, value in part.items():
        if isinstance(value, dict) and value:
            yield from paths(value, f'{prefix}{key}.')
        else:
            yield prefix + key, value


def changed(part: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a copy with one field set to another value of its type."""
    head, _, rest = path.partition('.')
    if head not in part:  # a dot within a key
        head, rest = path, ''
    if rest:
        return {**part, head: changed(part[head], rest)}
    old = part[head]
    if isinstance(old, bool):
        return {**part, head: not old}
    if isinstance(old, int | float):
        return {**part, head: old + 1}
    return {**part, head: f'other than {old}' if old else 'another'}


def value_at(part: dict[str, Any], path: str) -> Any:
    """Return the value of a field."""
    return dict(paths(part)).get(path)


def build(directory: str, **options: Any) -> Engine:
    settings = {'model': MODEL, 'context': 256, 'pool_bytes': 8 << 20, 'threads': 1,
                'device': 'cpu', 'directory': directory, **options}
    return Engine(EngineConfig(**settings))


def answer(engine: Engine, path: str) -> str:
    """Restore with the present fingerprint; say what happened."""
    before = engine.arena.storage.clone()
    engine.store._capsules.clear()
    engine.store.scan()
    try:
        result = engine.restore(capsule='c')
    except Incompatible as error:
        if f'{path} is ' not in str(error) or not bool((engine.arena.storage == before).all()):
            return f'WRONG: {error}'
        return 'refused, naming it and both values'
    engine.reset()
    if result.info.exact_future:
        return 'restored'
    named = engine.store.find('c').warnings[0].startswith(f'{path} is ')
    return 'restored, exact_future=false' if named else 'WRONG: it is not named'


def rows(directory: str) -> Iterator[tuple[str, str, Any, Any, str]]:
    """Yield kind, field, value in the capsule, value here, answer."""
    engine = build(directory)
    engine.append(token_ids=list(range(130)))
    engine.save(name='c', persist=True)
    engine.flush()
    engine.reset()
    engine.demote('c')
    ours = engine.store.fingerprint
    for kind in ('hard', 'soft', 'recorded'):
        part = getattr(ours, kind)
        for path, saved in paths(part):
            engine.store.fingerprint = replace(ours, **{kind: changed(part, path)})
            present = value_at(getattr(engine.store.fingerprint, kind), path)
            yield kind, path, saved, present, answer(engine, path)
    engine.close()
    for path, options in (('weights', {'model': f'{MODEL}?seed=2'}),
                          ('dtype', {'dtype': 'bfloat16'}), ('context', {'context': 100})):
        other = build(directory, **options)
        theirs: Fingerprint = other.store.fingerprint
        try:
            other.restore(capsule='c')
            told = 'WRONG: restored'
        except FlashrtError as error:
            told = f'refused, {error.code}'
        present = options.get('context') or value_at(theirs.hard, path)
        yield 'another engine', path, value_at(ours.hard, path) or 130, present, told
        other.close()


def short(value: Any) -> str:
    """Shorten a value for a cell."""
    text = 'none' if value is None else str(value)
    return text if len(text) <= SHORT else f'{text[:SHORT - 1]}…'


def main() -> int:
    """Print the table."""
    print('| part | field | in the capsule | here | answer |\n| --- | --- | --- | --- | --- |')
    good = True
    with TemporaryDirectory() as directory:
        for kind, path, saved, present, told in rows(directory):
            wanted = {'hard': 'refused', 'soft': 'restored, exact_future=false',
                      'recorded': 'restored', 'another engine': 'refused'}[kind]
            good &= told.startswith(wanted)
            print(f'| {kind} | `{path}` | {short(saved)} | {short(present)} | {told} |')
    return 0 if good else 1


if __name__ == '__main__':
    sys.exit(main())
