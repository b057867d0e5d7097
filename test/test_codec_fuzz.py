"""Mutated capsule files: nothing but typed refusals ever comes out, and in time."""

from __future__ import annotations

import json
from pathlib import Path
import sys

from hypothesis import given, HealthCheck, settings
from hypothesis import strategies as st
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import codec_cases as cases  # noqa: E402

from flashrt_ros.capsule import codec  # noqa: E402
from flashrt_ros.errors import Corrupt, Incompatible  # noqa: E402

MANIFEST = cases.manifests()['bf16']
FUZZ = settings(max_examples=200, deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.function_scoped_fixture,
                                       HealthCheck.too_slow, HealthCheck.data_too_large])
WEIRD = st.one_of(
    st.none(), st.booleans(), st.integers(-2 ** 70, 2 ** 70), st.floats(),
    st.sampled_from(['', '\0', 'a' * 300, '\ud800', '../x', 'rows', 'float32', 'F32', '~padding']),
    st.text(max_size=8), st.lists(st.integers(), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=3))


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp('fuzz') / 'base'
    codec.write(cases.image(MANIFEST, 5), path, MANIFEST, overwrite=False)
    return path.read_bytes()


def attempt(path: Path) -> bool:
    """Read in all ways; return whether the file was taken."""
    good = True
    for read in (codec.read_header, codec.verify, lambda p: codec.read(p, MANIFEST)):
        try:
            read(path)
        except (Corrupt, Incompatible) as error:
            good = False
            assert str(error).endswith('.') and len(str(error)) < 2000
            str(error).encode('utf-8')  # it will travel in a message
    return good


@FUZZ
@given(data=st.data())
def test_mutated_bytes(base, tmp_path, data):
    size = len(base)
    changed = bytearray(base)
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(['set', 'cut', 'insert', 'copy', 'length']))
        at = data.draw(st.integers(0, min(size, max(len(changed) - 1, 0))))
        if kind == 'set' and changed:
            changed[at] = data.draw(st.integers(0, 255))
        elif kind == 'cut':
            del changed[at:at + data.draw(st.integers(0, size))]
        elif kind == 'insert':
            changed[at:at] = data.draw(st.binary(max_size=20))
        elif kind == 'copy':
            changed[at:at] = changed[:data.draw(st.integers(0, 100))]
        else:
            changed[:8] = data.draw(st.integers(0, 2 ** 64 - 1)).to_bytes(8, 'little')
    path = tmp_path / 'f'
    path.write_bytes(changed)
    assert attempt(path) == (changed == base)


def places(value, path=()):
    """All paths into a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(
        value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


@FUZZ
@given(data=st.data())
def test_forged_headers(base, tmp_path, data):
    path = tmp_path / 'f'
    path.write_bytes(base)

    def edit(table, ours):
        table = {k: v for k, v in table.items() if k != '__metadata__'}
        root = data.draw(st.sampled_from([table, ours]))
        for _ in range(data.draw(st.integers(1, 3))):
            where = data.draw(st.sampled_from(list(places(root))[1:]))
            parent = root
            for key in where[:-1]:
                parent = parent[key]
            kind = data.draw(st.sampled_from(['set', 'delete', 'rename']))
            if kind == 'set':
                parent[where[-1]] = data.draw(WEIRD)
            elif kind == 'rename' and isinstance(parent, dict):
                parent[data.draw(st.text(max_size=5))] = parent.pop(where[-1])
            else:
                del parent[where[-1]]
            if not root:
                return

    cases.forge(path, edit)
    if attempt(path):  # whatever was taken must still be the same bytes
        cases.assert_equal(cases.image(MANIFEST, 5), codec.read(path, MANIFEST))
        json.dumps(codec.read_header(path).to_json(), allow_nan=False)


@FUZZ
@given(text=st.text(max_size=300) | st.recursive(
    WEIRD, lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=12), inner, max_size=4), max_leaves=20).map(json.dumps))
def test_any_json_as_header(tmp_path, text):
    path = tmp_path / 'f'
    raw = text.encode('utf-8', 'surrogatepass')
    path.write_bytes(len(raw).to_bytes(8, 'little') + raw)
    assert not attempt(path)
