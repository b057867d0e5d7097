"""Requests are filled as they arrive: nothing wraps, is cut, or aborts the process."""

import math
from pathlib import Path
import sys

import numpy as np
import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from node_cases import code_of, running  # noqa: E402
from rclpy.serialization import deserialize_message, serialize_message  # noqa: E402

from flashrt_ros.action import Generate  # noqa: E402
from flashrt_ros.chat_messages import pairs  # noqa: E402
from flashrt_ros.errors import InvalidArgument  # noqa: E402
from flashrt_ros.filling import fill, to_duration  # noqa: E402
from flashrt_ros.srv import ForkCapsule, Rollback, SaveCapsule  # noqa: E402


@pytest.mark.parametrize(('kind', 'field', 'value'), [
    (Rollback.Request, 'max_replay', 1 << 32), (Rollback.Request, 'value', 1 << 64),
    (Rollback.Request, 'value', -1), (Rollback.Request, 'to', 256),
    (Generate.Goal, 'max_tokens', 1 << 31), (Generate.Goal, 'top_k', -(1 << 31) - 1),
    (ForkCapsule.Request, 'seeds', [1, 1 << 64])])
def test_a_number_that_would_wrap_is_refused_with_its_range(kind, field, value):
    with pytest.raises(InvalidArgument, match=f'^{field} must be a whole number from -?[0-9]+ to'):
        fill(kind, **{field: value})


@pytest.mark.parametrize('text', ['cut\0short', 'no UTF-8: \udcff'])
def test_text_that_would_not_arrive_is_refused(text):
    for kind, field, value in ((SaveCapsule.Request, 'note', text),
                               (Generate.Goal, 'prompt', text), (Generate.Goal, 'stop', [text])):
        with pytest.raises(InvalidArgument, match=f'^{field} holds'):
            fill(kind, **{field: value})


@pytest.mark.parametrize('message', [
    {'role': 'user', 'content': 'hello'}, 'hi', ('user',), ('user', 'hello', 'there')])
def test_a_message_that_is_no_pair_is_refused(message):
    with pytest.raises(InvalidArgument, match='pairs of role and content'):
        pairs([('system', 'x'), message])


def test_values_become_plain_ones():
    goal = fill(Generate.Goal, max_tokens=np.int64(7), temperature=np.float32(0.5),
                raw=np.bool_(True), token_ids=np.arange(3), stop=('a', 'b'))
    assert type(goal.max_tokens) is int and type(goal.temperature) is float
    assert goal.raw is True and list(goal.token_ids) == [0, 1, 2] and goal.stop == ['a', 'b']
    assert math.isnan(fill(Generate.Goal, top_p=math.nan).top_p)  # the node says what is wrong


def test_what_is_no_value_of_the_field_is_a_type_error():
    for fields in ({'max_tokens': 2.5}, {'max_tokens': None}, {'prompt': 7}, {'promt': 'x'},
                   {'stop': 'END'}):  # three stop strings of one character
        with pytest.raises(TypeError):
            fill(Generate.Goal, **fields)
    with pytest.raises(TypeError, match="'promt'; there are session, prompt, "):
        fill(Generate.Goal, promt='x')


@pytest.mark.parametrize('seconds', [math.inf, math.nan, 1e300, -1e10])
def test_times_that_no_message_holds(seconds):
    with pytest.raises(InvalidArgument, match='a time must be'):
        to_duration(seconds)


@pytest.mark.parametrize(('seconds', 'sec', 'nanosec'), [
    (1.25, 1, 250_000_000), (-0.5, -1, 500_000_000), (-1.75, -2, 250_000_000), (-3.0, -3, 0)])
def test_a_negative_time_arrives_and_is_refused_by_the_node(seconds, sec, nanosec):
    made = to_duration(seconds)
    assert (made.sec, made.nanosec) == (sec, nanosec)
    assert deserialize_message(serialize_message(made), type(made)) == made


def test_the_client_refuses_before_anything_is_sent(tmp_path):
    with running(tmp_path) as (_, peer):
        client = peer.client
        client.generate('a scene', max_tokens=3).result(20)
        for refused in (lambda: client.rollback(tokens=1, max_replay=1 << 32),
                        lambda: client.rollback(tokens=1 << 64),
                        lambda: client.save('x', note='a\0b'),
                        lambda: client.restore('x', seed=1 << 64),
                        lambda: client.fork(['a'], seeds=[-1]),
                        lambda: client.generate('go', max_tokens=1 << 40),
                        lambda: client.generate(messages=[('user', '\udcff')]),
                        lambda: client.generate('go', timeout=math.inf),
                        lambda: client.generate('go', timeout=-0.5).result(20)):
            assert code_of(refused) == 'INVALID_ARGUMENT'
        assert client.list() == [] and client.rollback(tokens=1).error_code == 0
