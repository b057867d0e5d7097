"""Who was used last does not depend on a clock that is set back."""

import time

from engine_cases import build, ids
import pytest


@pytest.fixture
def clock(monkeypatch):
    """Return a clock in a list that a test may set."""
    clock = [time.time()]
    monkeypatch.setattr(time, 'time', lambda: clock[0])
    return clock


def test_the_disk_keeps_what_was_saved_last(tmp_path, clock):
    engine = build(directory=str(tmp_path))
    engine.append(token_ids=ids(100))
    engine.save(name='probe', persist=True)
    engine.flush()
    size = (tmp_path / 'probe.capsule').stat().st_size
    engine.drop('probe')
    engine.save(name='first', persist=True)
    engine.flush()
    engine.close()

    clock[0] -= 86400  # a robot that starts before it has asked for the time
    engine = build(directory=str(tmp_path), disk_bytes=2 * size + size // 2)
    engine.append(token_ids=ids(100))
    for name in ('second', 'third'):
        engine.save(name=name, persist=True)
        engine.flush()
    assert sorted(path.stem for path in tmp_path.iterdir()) == ['second', 'third']
    clock[0] -= 3600
    engine.restore(capsule='second')
    engine.save(name='fourth', persist=True)
    engine.flush()
    assert sorted(path.stem for path in tmp_path.iterdir()) == ['fourth', 'second']
    engine.close()
