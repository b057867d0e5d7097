"""What an own capsule does whose file another node has put another one in the place of."""

import os

from engine_cases import build, ids
import pytest

from flashrt_ros.errors import Corrupt


@pytest.mark.parametrize('place', ['directory', 'url'])
def test_the_file_of_another_node_stays(tmp_path, place):
    where = str(tmp_path) if place == 'directory' else f'memory://{tmp_path.name}'
    one, other = build(directory=where), build(directory=where)
    one.append(token_ids=ids(30))
    one.save(name='x', persist=True)
    one.flush()
    one.list()
    before = os.stat(tmp_path).st_mtime_ns
    other.append(token_ids=ids(50, 1))
    theirs = other.save(name='x', persist=True, overwrite=True).info.id
    other.flush()
    os.utime(tmp_path, ns=(before, before))  # in one tick of the clock of the file system
    one.drop('x')
    assert [info.id for info in other.list()] == [theirs]
    assert other.restore(capsule='x').tokens_reused == 50
    assert one.restore(capsule='x').tokens_reused == 50
    one.drop('x')
    assert not other.store.disk.holds('x')
    one.close()
    other.close()


@pytest.mark.parametrize('place', ['directory', 'url'])
def test_who_names_it_again_gets_the_other(tmp_path, place):
    where = str(tmp_path) if place == 'directory' else f'memory://{tmp_path.name}'
    one, other = build(directory=where), build(directory=where)
    one.append(token_ids=ids(30))
    one.save(name='x', persist=True)
    one.demote('x')
    other.append(token_ids=ids(50, 1))
    other.save(name='x', persist=True, overwrite=True)
    other.flush()
    with pytest.raises(Corrupt, match='replaced'):
        one.restore(capsule='x')
    assert one.restore(capsule='x').tokens_reused == 50
    one.close()
    other.close()
