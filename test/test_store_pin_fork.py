"""A pin ends with the unpinning, though a forked child has the locked file open as well."""

import os

from engine_cases import build, ids

from flashrt_ros.capsule.tiers import DiskTier


def test_a_child_does_not_keep_the_pin(tmp_path):
    engine = build(directory=str(tmp_path))
    engine.append(token_ids=ids(5))
    engine.save(name='x', persist=True, pin=True)
    engine.flush()
    other = DiskTier(tmp_path)
    childs = os.dup(engine.store.disk._holds['x'])  # as after a fork: one lock, two descriptors
    assert other.held('x')
    engine.pin('x', False)
    assert not other.held('x')
    os.close(childs)
    engine.close()
