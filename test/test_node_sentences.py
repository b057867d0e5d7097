"""The sentences of answers: they count right, and advise what helps in this very case."""

from pathlib import Path
import sys

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from node_cases import clean, running, start_long, until, WAIT  # noqa: E402
from std_srvs.srv import Trigger  # noqa: E402

from flashrt_ros.errors import Capacity, InvalidArgument  # noqa: E402


@pytest.fixture(scope='module')
def peer(tmp_path_factory):
    with running(tmp_path_factory.mktemp('node'), sessions__max=4) as (_, peer):
        yield peer


@pytest.fixture
def client(peer):
    clean(peer.client)
    return peer.client


def test_goals_that_were_told_to_end_are_counted(client):
    def cancel():
        return client.call('cancel_all', Trigger.Request()).message
    assert cancel() == 'No goal was open.'
    stream = start_long(client)
    assert cancel() == '1 goal was told to end.'
    stream.result(WAIT, check=False)
    streams = [start_long(client), client.generate('x', session='a')]
    until(lambda: streams[1].handle)
    assert cancel() == '2 goals were told to end.'
    for stream in streams:
        stream.result(WAIT, check=False)


def test_a_long_note_is_told_the_rule_for_notes(client):
    client.generate('a scene', max_tokens=0).result(WAIT)
    for note in ('n' * 4097, 'ö' * 2049):  # bytes count, not characters
        with pytest.raises(InvalidArgument) as refusal:
            client.save('x', note=note)
        assert '4096' in str(refusal.value) and 'bytes of UTF-8' in str(refusal.value)
        assert 'shorten' in str(refusal.value) and 'turns' not in str(refusal.value)
    assert client.save('x', note='ö' * 2048).info.note == 'ö' * 2048


def test_a_fork_beyond_sessions_max_says_the_limit_and_the_way_out(client):
    client.generate('a scene', max_tokens=0).result(WAIT)
    with pytest.raises(Capacity) as refusal:
        client.fork(['a', 'b', 'c', 'd'])
    assert 'sessions.max allows 4' in str(refusal.value)
    assert 'close 1, or configure sessions.max 5 or more' in str(refusal.value)
