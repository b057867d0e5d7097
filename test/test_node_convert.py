"""Filling messages: plain numbers in range, text that survives DDS (acceptance 37)."""

import dataclasses
import math

import pytest

pytest.importorskip('rclpy')

import numpy as np  # noqa: E402
from rclpy.serialization import deserialize_message, serialize_message  # noqa: E402
from unique_identifier_msgs.msg import UUID  # noqa: E402

from flashrt_ros import errors  # noqa: E402
from flashrt_ros.action import Generate  # noqa: E402
from flashrt_ros.msg import CapsuleInfo, ErrorCode, NodeState, Token  # noqa: E402
from flashrt_ros.node import convert  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Info:
    name: str = 'kit\0chen'
    id: str = 'ab'
    parent_id: str = None
    session: str = 'default'
    fingerprint: str = 'f'
    tokens: int = np.int64(7)
    bytes: int = np.int64(2 ** 40)
    bytes_exclusive: int = np.float64(3.0)
    tiers: tuple = ('device', 'disk')
    pinned: bool = np.bool_(True)
    aligned: bool = np.bool_(False)
    exact_future: bool = np.bool_(True)
    created: float = np.float64(1.5)
    note: str = 'half \ud83d'
    position: int = np.int32(4)
    capacity: int = 8
    epoch: int = 2 ** 63
    busy: bool = np.bool_(False)
    resident: bool = True


def round_trip(message):
    """Numbers of numpy abort the process here on Kilted; NUL ends the text."""
    return deserialize_message(serialize_message(message), type(message))


def test_capsule_info_survives():
    message = round_trip(convert.capsule_info(Info()))
    assert message.name == 'kit\N{REPLACEMENT CHARACTER}chen'
    assert message.note == 'half \N{REPLACEMENT CHARACTER}'
    assert message.tiers == CapsuleInfo.DEVICE | CapsuleInfo.DISK
    assert message.tokens == 7 and message.bytes == 2 ** 40 and message.pinned is True
    assert message.created.sec == 1 and message.created.nanosec == 500_000_000
    assert message.parent_id == ''


def test_state_survives():
    message = round_trip(convert.node_state('active', 'm', [Info()], {'kit\0chen'}, 2 ** 40))
    assert isinstance(message, NodeState) and message.queue_length == 2 ** 32 - 1
    assert message.sessions[0].epoch == 2 ** 63 and message.sessions[0].busy is True


def test_token_keeps_its_ids_where_text_cannot():
    message = round_trip(convert.token(
        convert.wall_time(0), 's', UUID(), epoch=1, seq=2, index=3, position=4,
        words='a\0b', ids=[np.int64(0), np.int32(5)]))
    assert message.text == 'a\N{REPLACEMENT CHARACTER}b'
    assert list(message.token_ids) == [0, 5] and message.finish_reason == Token.RUNNING


@pytest.mark.parametrize('value, bits, expected', [
    (-1, 64, 0), (2 ** 70, 64, 2 ** 64 - 1), (70000, 16, 65535), (None, 32, 0),
    (np.int64(9), 8, 9), (True, 8, 1)])
def test_numbers_are_cut_not_wrapped(value, bits, expected):
    out = convert.unsigned(value, bits)
    assert out == expected and type(out) is int


@pytest.mark.parametrize('value', [0.0, 1.25, 1e-9, 2.0 ** 40, -3.0, np.float32(2.5)])
def test_durations_fit(value):
    message = round_trip(convert.duration(value))
    wanted = min(max(float(value), 0.0), 2.0 ** 31 - 1)
    assert math.isclose(message.sec + message.nanosec * 1e-9, wanted, abs_tol=1e-6)


def test_each_error_has_its_code():
    for name, error in errors.BY_CODE.items():
        assert convert.error_code(error('A sentence.')) == getattr(ErrorCode, name)
    assert convert.error_code(None) == 0
    assert convert.error_code(ValueError('x')) == ErrorCode.INTERNAL
    assert 'ValueError' in convert.error_text(ValueError('x'))
    result = round_trip(convert.generate_result(errors.Busy('Taken.'), Token.ERROR, None))
    assert isinstance(result, Generate.Result) and result.error_code == ErrorCode.BUSY


def test_a_message_that_was_filled_before_is_taken_again():
    first, second = Info(name='b'), Info(name='a')
    known = {first: convert.capsule_info(first)}
    listed = convert.capsule_list([first, second], known).capsules
    assert [message.name for message in listed] == ['a', 'b'] and listed[1] is known[first]
