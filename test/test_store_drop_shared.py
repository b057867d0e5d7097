"""Dropping an own capsule leaves the file that another node has put in its place meanwhile."""

import os

from engine_cases import build, ids
import pytest


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
