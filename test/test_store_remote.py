"""Capsules at fsspec URLs, export and import, several nodes, the lineage as a tree."""

import contextlib
import errno
import json
import threading
import xml.etree.ElementTree as ElementTree

from engine_cases import build, digest, ids
import fsspec
import pytest

from flashrt_ros.capsule import faults
from flashrt_ros.capsule.remote import export_file, import_file, is_url, open_tier, UrlTier
from flashrt_ros.capsule.tiers import DiskTier
from flashrt_ros.capsule.tree import forest, Node, svg, walk
from flashrt_ros.cli.main import main
from flashrt_ros.errors import Corrupt, FlashrtError, NameExists, Storage, UnknownCapsule

URL = 'memory://robots/capsules'


@pytest.fixture(autouse=True)
def empty():
    yield
    memory = fsspec.filesystem('memory')
    for path in memory.find('/'):
        memory.rm_file(path)


def save(engine, name, seed, **options):
    engine.reset()
    engine.append(token_ids=ids(150, seed))
    engine.save(name=name, persist=True, **options)
    engine.flush()
    return digest(engine)


def test_places_are_told_apart(tmp_path):
    assert isinstance(open_tier(URL), UrlTier)
    assert isinstance(open_tier(tmp_path), DiskTier)
    assert isinstance(open_tier(f'file://{tmp_path}'), DiskTier)
    assert open_tier(f'file://{tmp_path}').directory == tmp_path
    assert is_url('s3://bucket/x')
    assert not is_url('relative/path')
    assert not is_url('a:b')
    with pytest.raises(Storage, match='check the URL'):
        open_tier('nosuchscheme://host/dir')


@pytest.mark.parametrize('place', [URL, 'file'])
def test_an_engine_on_a_url(place, tmp_path):
    place = f'file://{tmp_path}/capsules' if place == 'file' else place
    engine = build(directory=place)
    expected = {name: save(engine, name, seed) for seed, name in enumerate(('a', 'b', 'c'))}
    save(engine, 'a', 9, overwrite=True)
    expected['a'] = digest(engine)
    engine.drop('b')
    del expected['b']
    engine.audit()
    engine.close()
    again = build(directory=place)
    assert {i.name: i.tiers for i in again.list()} == dict.fromkeys(expected, ('disk',))
    for name, wanted in expected.items():
        again.restore(capsule=name)
        assert digest(again) == wanted
    assert again.facts()['disk_used_bytes'] == sum(again.store.disk.usage().values()) > 0
    with pytest.raises(UnknownCapsule):
        again.restore(capsule='b')
    again.close()


def test_a_url_has_a_budget_too():
    engine = build(directory=URL)
    save(engine, 'a', 1)
    size = engine.store.disk.usage()['a']
    engine.close()
    engine = build(directory=URL, disk_bytes=2 * size + 10)
    for seed in (2, 3):
        save(engine, f'c{seed}', seed)
    assert set(engine.store.disk.usage()) == {'c2', 'c3'}
    assert engine.facts()['disk_evictions'] == 1
    with pytest.raises(UnknownCapsule):
        engine.restore(capsule='a')
    engine.audit()
    engine.close()


@pytest.mark.parametrize('point', ['remote.upload', 'remote.publish'])
def test_a_fault_on_the_way_to_a_url_leaves_nothing(point):
    engine = build(directory=URL)
    before = save(engine, 'c', 1)
    engine.reset()
    engine.append(token_ids=ids(10))
    engine.save(name='c', overwrite=True)
    with faults.fail_at(point, errno.ENOSPC) as passed:
        engine.persist('c')
        with pytest.raises(Storage, match='disk is full'):
            engine.flush()
    assert point in passed
    assert [f for f in fsspec.filesystem('memory').find('/') if '.part-' in f] == []
    other = build(directory=URL)
    other.restore(capsule='c')
    assert digest(other) == before
    engine.close()
    other.close()


def test_a_damaged_or_vanished_capsule_at_a_url():
    engine = build(directory=URL)
    save(engine, 'c', 1)
    memory = fsspec.filesystem('memory')
    data = bytearray(memory.cat_file('/robots/capsules/c.capsule'))
    data[-7] ^= 1
    memory.pipe_file('/robots/capsules/c.capsule', bytes(data))
    memory.pipe_file('/robots/capsules/odd.capsule', b'no capsule')
    other = build(directory=URL)
    assert [name for name, _ in other.store.problems] == ['odd.capsule']
    before = digest(other)
    with pytest.raises(Corrupt):
        other.restore(capsule='c')
    with pytest.raises(Corrupt):
        other.restore(capsule='odd')
    assert digest(other) == before
    memory.rm_file('/robots/capsules/c.capsule')
    with pytest.raises(UnknownCapsule):
        other.restore(capsule='c')
    assert other.list() == []
    engine.close()
    other.close()


@pytest.mark.parametrize('place', [URL, 'path', 'file'])
def test_export_and_import_between_machines(place, tmp_path):
    engine = build(directory=str(tmp_path / 'one'))
    expected = save(engine, 'c', 1)
    engine.close()
    one, two = DiskTier(tmp_path / 'one'), DiskTier(tmp_path / 'two')
    place = {URL: URL, 'path': str(tmp_path / 'out'), 'file': f'file://{tmp_path}/out'}[place]
    where = export_file(one, 'c', place)
    with pytest.raises(NameExists):
        export_file(one, 'c', place)
    assert export_file(one, 'c', f'{place}/d.capsule') == f'{place}/d.capsule'
    assert import_file(two, where, name='guest').name == 'guest'
    with pytest.raises(NameExists):
        import_file(two, where, name='guest')
    import_file(two, where, name='guest', overwrite=True)
    assert import_file(two, f'{place}/d.capsule').name == 'd'
    with pytest.raises(UnknownCapsule):
        import_file(two, f'{place}/none.capsule')
    with pytest.raises(UnknownCapsule, match='name the file'):
        import_file(two, place)
    other = build(directory=str(tmp_path / 'two'))
    for name in ('guest', 'd'):
        other.restore(capsule=name)
        assert digest(other) == expected
    other.close()


def test_a_damaged_file_is_neither_exported_nor_imported(tmp_path):
    engine = build(directory=str(tmp_path / 'one'))
    save(engine, 'c', 1)
    engine.close()
    path = tmp_path / 'one' / 'c.capsule'
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Corrupt):
        export_file(DiskTier(tmp_path / 'one'), 'c', str(tmp_path / 'out'))
    with pytest.raises(Corrupt):
        import_file(DiskTier(tmp_path / 'two'), str(path))
    assert not (tmp_path / 'out').exists()
    assert DiskTier(tmp_path / 'two').usage() == {}


def test_case_24_two_nodes_on_one_directory(tmp_path):
    """Both save, drop and restore the same names at once; nobody ever reads half a file."""
    errors, one = [], build(directory=str(tmp_path))
    two = build(directory=str(tmp_path))
    digests = set()

    def work(engine, seed):
        try:
            for n in range(12):
                engine.reset()
                engine.append(token_ids=ids(100 + seed, seed * 100 + n))
                with contextlib.suppress(NameExists):
                    engine.save(name=f'c{n % 2}', overwrite=True, persist=True)
                    digests.add(digest(engine))
                    engine.flush()
                engine.list()
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=work, args=(e, s)) for s, e in ((1, one), (2, two))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    third = build(directory=str(tmp_path))
    assert {i.name for i in third.list()} == {'c0', 'c1'}
    for name in ('c0', 'c1'):
        third.restore(capsule=name)
        assert digest(third) in digests
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith('.capsule')] == []
    for engine in (one, two):
        try:
            engine.restore(capsule='c0')
        except FlashrtError as error:
            assert 'another' in str(error)
        engine.close()
    third.close()


# -- the tree ------------------------------------------------------------------------------------

def nodes(*edges):
    return [Node(name, name, parent, tokens) for name, parent, tokens in edges]


def test_a_forest_keeps_everybody_whatever_the_files_claim():
    roots = forest(nodes(('root', '', 10), ('b', 'root', 30), ('a', 'root', 20),
                         ('orphan', 'lost', 5), ('x', 'y', 1), ('y', 'x', 2), ('self', 'self', 3)))
    shown = [(node.name, parent.name if parent else None) for node, parent in walk(roots)]
    assert {name for name, _ in shown} == {'root', 'a', 'b', 'orphan', 'x', 'y', 'self', ''}
    assert len(shown) == 8
    assert ('y', 'x') in shown
    assert [n for n, p in shown if p == 'root'] == ['a', 'b']
    assert ('orphan', '') in shown


def test_a_picture_is_well_formed_and_a_long_chain_is_no_recursion():
    chain = nodes(*((f'n{i}', f'n{i - 1}' if i else '', i) for i in range(3000)))
    picture = svg(forest(chain), 'a <title> & more')
    root = ElementTree.fromstring(picture)
    assert len(root.findall('.//{http://www.w3.org/2000/svg}circle')) == 3000
    assert svg([]).endswith('</svg>\n')


def test_the_commands(tmp_path, capsys):
    directory = tmp_path / 'capsules'
    engine = build(directory=str(directory))
    engine.append(token_ids=ids(100))
    engine.save(name='root', persist=True)
    for seed in (1, 2):
        engine.restore(capsule='root')
        engine.append(token_ids=ids(30, seed))
        engine.save(name=f'leaf{seed}', persist=True)
    engine.flush()
    engine.close()
    picture = tmp_path / 'tree.svg'
    assert main(['capsule', 'tree', '-d', str(directory), '--svg', str(picture)]) == 0
    shown = capsys.readouterr().out
    assert '└── root 100 tokens' in shown
    assert '    └── leaf2 130 tokens' in shown
    ElementTree.fromstring(picture.read_text(encoding='utf-8'))
    capsys.readouterr()
    for arguments in (['tree'], ['export', 'leaf1', URL],
                      ['import', f'{URL}/leaf1.capsule', '--name', 'guest']):
        assert main(['capsule', *arguments, '-d', str(directory)]) == 0
    assert DiskTier(directory).find('guest') == 'guest'
    capsys.readouterr()
    assert main(['capsule', 'tree', '-d', str(directory), '--svg', '/nowhere/x.svg']) != 0
    assert main(['capsule', 'import', f'{URL}/none.capsule', '-d', str(directory)]) != 0


def test_the_tree_as_json(tmp_path, capfd):
    engine = build(directory=str(tmp_path))
    engine.append(token_ids=ids(100))
    engine.save(name='root', persist=True)
    engine.append(token_ids=ids(10))
    engine.save(name='leaf', persist=True)
    engine.flush()
    engine.close()
    capfd.readouterr()
    assert main(['capsule', 'tree', '-d', str(tmp_path), '--json']) == 0
    document = json.loads(capfd.readouterr().out)
    (root,) = document['roots']
    assert (root['name'], [c['name'] for c in root['children']]) == ('root', ['leaf'])


def test_a_file_of_an_older_version_goes_through_its_reader(tmp_path, monkeypatch):
    """There is one version so far; the table is tried with an invented older one."""
    from codec_cases import forge

    from flashrt_ros.capsule import codec, wire
    from flashrt_ros.errors import Incompatible
    engine = build(directory=str(tmp_path))
    expected = save(engine, 'c', 1)
    engine.close()

    def older(table, ours):
        table['__metadata__']['format_version'] = '0'
        ours['format_version'] = 0
        del ours['note']
    forge(tmp_path / 'c.capsule', older)
    with pytest.raises(Incompatible, match="version '0'; this package reads version 1"):
        codec.read_header(tmp_path / 'c.capsule')
    monkeypatch.setitem(wire.READERS, '0', lambda header: {
        **header, 'format_version': 1, 'note': 'older'})
    again = build(directory=str(tmp_path))
    assert again.info('c').note == 'older'
    again.restore(capsule='c')
    assert digest(again) == expected
    again.close()
