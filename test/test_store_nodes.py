"""Several processes and one directory: ids that outlive a restart, pins that others respect."""

import fcntl
import json
from pathlib import Path
import subprocess
import sys

from engine_cases import build, digest, ids
import pytest

from flashrt_ros.capsule.tiers import DiskTier
from flashrt_ros.cli.main import main
from flashrt_ros.errors import UnknownCapsule

HERE = Path(__file__).parent
PRELUDE = f'import json, sys; sys.path.insert(0, {str(HERE)!r}); from engine_cases import *\n'


def process(code: str, *arguments: object) -> subprocess.Popen:
    """Start a process that has ``build`` and the like, and its directory as ``sys.argv[1]``."""
    return subprocess.Popen([sys.executable, '-c', PRELUDE + code, *map(str, arguments)],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def output(code: str, *arguments: object):
    out, _ = (child := process(code, *arguments)).communicate(timeout=120)
    assert child.returncode == 0
    return json.loads(out.splitlines()[-1])


FIRST = """
e = build(directory=sys.argv[1])
e.append(token_ids=ids(100)); e.save(name='root', persist=True)
e.append(token_ids=ids(30, 1)); e.save(name='lost')
e.append(token_ids=ids(30, 2)); e.save(name='leaf', persist=True)
e.restore(capsule='root')
e.append(token_ids=ids(30, 3)); e.save(name='other', persist=True)
e.close()
print(json.dumps({i.name: (i.id, i.parent_id) for i in e.list()}))
"""
SECOND = """
e = build(directory=sys.argv[1])
before = {i.name: (i.id, i.parent_id) for i in e.list()}
e.restore('s', before['leaf'][0])
e.append('s', token_ids=ids(9, 4)); e.save('s', 'grown', persist=True)
e.demote('grown'); e.flush()
e.close()
print(json.dumps([before, {i.name: (i.id, i.parent_id) for i in e.list()}]))
"""


def test_ids_and_parents_are_the_same_after_a_restart(tmp_path, capfd):
    """Two processes one after the other, and the picture that a third one draws."""
    saved = output(FIRST, tmp_path)
    before, after = output(SECOND, tmp_path)
    del saved['lost']
    assert before == saved
    assert {n: after[n] for n in saved} == saved
    assert after['grown'][1] == saved['leaf'][0]
    assert saved['other'][1] == saved['root'][0]
    assert main(['capsule', 'tree', '-d', str(tmp_path), '--json']) == 0
    text = capfd.readouterr().out
    for identity, _ in after.values():
        assert identity in text
    (root,) = [n for n in json.loads(text)['roots'] if n['name'] == 'root']
    assert [child['name'] for child in root['children']] == ['other']


OWNER = """
e = build(directory=sys.argv[1], context=700, pool_bytes=2 << 20)
for n, pin in ((0, True), (1, False)):
    e.reset(); e.append(token_ids=ids(200, n)); e.save(name=f'theirs{n}', persist=True, pin=pin)
e.flush()
print(digest(e), flush=True)
for line in sys.stdin:
    try:
        result = eval(line)
        print(json.dumps(result), flush=True)
    except Exception as error:
        print(json.dumps(type(error).__name__), flush=True)
"""


class Node:
    """A node in a process of its own that answers expressions."""

    def __init__(self, directory):
        self.child = process(OWNER, directory)
        self.child.stdout.readline()

    def kill(self) -> None:
        self.child.kill()
        self.child.communicate()

    def ask(self, expression: str):
        self.child.stdin.write(expression + '\n')
        self.child.stdin.flush()
        return json.loads(self.child.stdout.readline())


def fill(engine, names):
    for seed, name in enumerate(names):
        engine.reset()
        engine.append(token_ids=ids(200, 50 + seed))
        engine.save(name=name, persist=True)
        engine.flush()


def files(directory):
    return {path.stem for path in directory.iterdir()}


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path)
    yield node
    node.kill()


def test_a_pinned_file_of_another_node_is_not_evicted(tmp_path, node):
    size = (tmp_path / 'theirs0.capsule').stat().st_size
    engine = build(directory=str(tmp_path), context=700, pool_bytes=2 << 20,
                   disk_bytes=3 * size + 100)
    fill(engine, ['a', 'b', 'c'])
    assert files(tmp_path) == {'theirs0', 'b', 'c'}, 'the unpinned one and the oldest went'
    assert node.ask("e.pin('theirs0', False).pinned") is False
    fill(engine, ['d'])
    assert 'theirs0' not in files(tmp_path), 'unpinned it is as any other'
    assert node.ask("e.pin('theirs0', True).pinned") is True
    assert node.ask("e.persist('theirs0') and e.flush()") is None
    fill(engine, ['e', 'f'])
    assert 'theirs0' in files(tmp_path), 'pinned before it was written'
    node.kill()
    assert 'theirs0' in [i.name for i in engine.list()]
    fill(engine, ['g', 'h', 'i'])
    assert files(tmp_path) == {'g', 'h', 'i'}, 'a pin ends with its node'
    engine.audit()
    engine.close()


def test_dropping_and_demoting_what_another_node_pinned(tmp_path, node):
    engine = build(directory=str(tmp_path), context=700, pool_bytes=2 << 20, host_bytes=1 << 20)
    engine.restore(capsule='theirs0')
    whole = digest(engine)
    assert not engine.info('theirs0').pinned, "a pin is its own node's"
    assert engine.demote('theirs0').tiers == ('host', 'disk')
    assert node.ask("e.info('theirs0').tiers") == ['device', 'disk'], 'demoting is local'
    assert node.ask("e.demote('theirs0')") == 'Capacity'
    engine.drop('theirs0')
    assert files(tmp_path) == {'theirs1'}, 'to drop by name is an order'
    assert node.ask("[i.tiers for i in e.list() if i.name == 'theirs0']") == [['device']]
    assert node.ask("(e.restore(capsule='theirs0'), digest(e))[1]") == whole
    assert node.ask("(e.pin('theirs0', False), e.demote('theirs0').tiers)[1]") == ['disk'], (
        'it is written again, not lost')
    engine.restore(capsule='theirs0')
    assert digest(engine) == whole
    assert node.ask("e.drop('theirs1').name") == 'theirs1'
    with pytest.raises(UnknownCapsule):
        engine.restore(capsule='theirs1')
    engine.audit()
    engine.close()


@pytest.mark.parametrize('way', ['overwritten', 'forgotten', 'vanished'])
def test_a_pin_ends_with_its_capsule(tmp_path, way):
    engine, other = build(directory=str(tmp_path)), DiskTier(tmp_path)
    engine.append(token_ids=ids(90))
    engine.save(name='c', persist=True, pin=True)
    engine.flush()
    assert other.held('c')
    if way == 'overwritten':
        engine.save(name='c', overwrite=True)
    elif way == 'forgotten':
        engine.drop('c', disk=False)
    else:
        engine.pin('c', False)
        engine.demote('c')
        engine.pin('c', True)
        content = (tmp_path / 'c.capsule').read_bytes()
        other.remove('c')
        with pytest.raises(UnknownCapsule):
            engine.restore(capsule='c')
        (tmp_path / 'c.capsule').write_bytes(content)
    assert not other.held('c')
    assert engine.store.disk.held('c') is False and not engine.store.disk._holds
    engine.close()


def test_a_pin_is_held_although_another_node_looks_at_the_moment(tmp_path, monkeypatch):
    engine, other, real = build(directory=str(tmp_path)), DiskTier(tmp_path), fcntl.flock
    fill(engine, ['c'])
    looks = iter([True, True])

    def flock(fd, how):
        if how & fcntl.LOCK_SH and next(looks, False):
            raise BlockingIOError('the other one tries for an exclusive lock')
        real(fd, how)
    monkeypatch.setattr(fcntl, 'flock', flock)
    engine.pin('c', True)
    assert other.held('c')
    engine.close()
