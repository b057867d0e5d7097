"""The generated interfaces: numbers, field order, defaults, documentation, no need of a model."""
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from flashrt_ros import action, errors, msg, srv

pytest.importorskip('rclpy', reason='needs ROS 2: run through `make test`')

ROOT = pathlib.Path(__file__).resolve().parent.parent

CODES = {
    'NONE': 0, 'GOAL_REJECTED': 1, 'SEND_GOAL_FAILURE': 2,
    'UNKNOWN': 42000, 'NOT_ACTIVE': 42001, 'BUSY': 42002, 'TIMEOUT': 42003, 'CANCELED': 42004,
    'PREEMPTED': 42005, 'UNKNOWN_SESSION': 42006, 'UNKNOWN_CAPSULE': 42007, 'INVALID_NAME': 42008,
    'INVALID_ARGUMENT': 42009, 'NAME_EXISTS': 42010, 'CAPACITY': 42011, 'INCOMPATIBLE': 42012,
    'CORRUPT': 42013, 'CONTEXT_FULL': 42014, 'STORAGE': 42015, 'DEVICE': 42016, 'INTERNAL': 42017,
}
FOR_NAV2 = ('NONE', 'GOAL_REJECTED', 'SEND_GOAL_FAILURE', 'UNKNOWN', 'TIMEOUT')

SERVICES = {
    'SaveCapsule': 'save_capsule', 'RestoreCapsule': 'restore_capsule',
    'ForkCapsule': 'fork_capsule', 'Rollback': 'rollback', 'ListCapsules': 'list_capsules',
    'DropCapsule': 'drop_capsule', 'PinCapsule': 'pin_capsule', 'CloseSession': 'close_session',
}
RESPONSES = [getattr(srv, name).Response for name in SERVICES] + [action.Generate.Result]
DEFINITIONS = [
    *sorted(ROOT.glob('msg/*.msg')), *sorted(ROOT.glob('srv/*.srv')),
    *sorted(ROOT.glob('action/*.action'))]


def short(value):
    """Name a class or a path in the report."""
    return getattr(value, '__name__', None) or getattr(value, 'name', str(value))


def test_error_codes():
    assert {name: getattr(msg.ErrorCode, name) for name in CODES} == CODES


def test_every_engine_error_has_a_code():
    pending, names = [errors.FlashrtError], set()
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        names.add(kind.code)
    assert names <= set(CODES)
    # What only a client or an unforeseen fault sets has no exception of its own.
    assert set(CODES) - names <= {'NONE', 'GOAL_REJECTED', 'SEND_GOAL_FAILURE', 'UNKNOWN'}


@pytest.mark.parametrize('response', RESPONSES, ids=short)
def test_codes_come_first(response):
    fields = list(response.get_fields_and_field_types().items())
    assert fields[:2] == [('error_code', 'uint16'), ('error_msg', 'string')]
    assert (response().error_code, response().error_msg) == (0, '')


@pytest.mark.parametrize('response', RESPONSES, ids=short)
def test_nav2_finds_its_codes(response):
    assert {name: getattr(response, name) for name in FOR_NAV2} == {
        name: CODES[name] for name in FOR_NAV2}


@pytest.mark.parametrize('kind, constants', [
    (msg.Token, {'RUNNING': 0, 'STOP': 1, 'LENGTH': 2, 'CANCELED': 3, 'PREEMPTED': 4,
                 'TIMEOUT': 5, 'ERROR': 6}),
    (msg.CapsuleInfo, {'DEVICE': 1, 'HOST': 2, 'DISK': 4}),
    (srv.RestoreCapsule.Request, {'DEFAULT': 0, 'REJECT': 1, 'WAIT': 2, 'PREEMPT': 3}),
    (srv.Rollback.Request, {'POSITION': 0, 'TOKENS': 1, 'TURNS': 2}),
    (action.Generate.Goal, {'DEFAULT': 0, 'REJECT': 1, 'WAIT': 2, 'PREEMPT': 3,
                            'KEEP': 0, 'ROLLBACK': 1}),
])
def test_constants(kind, constants):
    assert {name: getattr(kind, name) for name in constants} == constants


@pytest.mark.parametrize('kind, defaults', [
    (action.Generate.Goal, {'max_tokens': -1, 'temperature': -1.0, 'top_p': -1.0, 'top_k': -1,
                            'reseed': False, 'seed': 0, 'raw': False, 'on_busy': 0,
                            'on_cancel': 0}),
    (srv.Rollback.Request, {'max_replay': 2**32 - 1, 'expected_epoch': 0}),
    (srv.RestoreCapsule.Request, {'expected_epoch': 0}),
    (srv.PinCapsule.Request, {'pin': True}),
    (srv.SaveCapsule.Request, {'overwrite': False, 'persist': False, 'align': False}),
    (srv.RestoreCapsule.Request, {'reseed': False, 'on_busy': 0}),
])
def test_unset_is_a_default(kind, defaults):
    assert {name: getattr(kind(), name) for name in defaults} == defaults


def test_feedback_is_a_token():
    assert action.Generate.Feedback.get_fields_and_field_types() == {'token': 'flashrt_ros/Token'}


def test_a_token_travels_whole():
    from rclpy.serialization import deserialize_message, serialize_message

    token = msg.Token(session='', epoch=2**64 - 1, seq=2**32 - 1, position=2**63,
                      text='é\U0001f916', token_ids=[0, 1, 2**31 - 1], finish_reason=msg.Token.STOP)
    assert deserialize_message(serialize_message(token), msg.Token) == token


def examples():
    """Yield every example of a call that a definition shows."""
    for path in DEFINITIONS:
        for line in path.read_text().splitlines():
            found = re.match(r'#\s+ros2 (service call|action send_goal)( --feedback)? (\S+) (\S+) '
                             r'"(\{.*\})"$', line)
            if found:
                yield path.name, found[3], found[4], found[5]


@pytest.mark.parametrize('file, name, kind, fields', list(examples()))
def test_examples_fit_the_interfaces(file, name, kind, fields):
    stem = file.rsplit('.', 1)[0]
    if kind.startswith('flashrt_ros/srv/'):
        assert (name, kind) == (f'/flashrt/{SERVICES[stem]}', f'flashrt_ros/srv/{stem}')
        request = getattr(srv, stem).Request()
    else:
        assert (name, kind) == ('/flashrt/generate', 'flashrt_ros/action/Generate')
        request = action.Generate.Goal()
    for field, value in yaml.safe_load(fields).items():
        current = getattr(request, field)  # an unknown field raises
        if isinstance(value, dict):
            for part, number in value.items():
                setattr(current, part, number)
        else:
            setattr(request, field, value)


@pytest.mark.parametrize('path', [p for p in DEFINITIONS if p.suffix != '.msg'], ids=short)
def test_every_call_is_documented(path):
    text = path.read_text()
    assert 'Success (error_code 0' in text
    assert path.name in {file for file, *_ in examples()}
    assert all(len(line) <= 100 or line.startswith('#   ros2 ') for line in text.splitlines())


def test_interfaces_need_no_model():
    modules = ['flashrt_ros', 'flashrt_ros.msg', 'flashrt_ros.srv', 'flashrt_ros.action',
               'flashrt_ros.client']
    code = f"""
import importlib, sys
for name in ('torch', 'cupy', 'transformers', 'tokenizers', 'safetensors'):
    sys.modules[name] = None  # any import of it fails
for name in {modules}:
    importlib.import_module(name)
from flashrt_ros.msg import Token
Token(text='ready')
print('imported')
"""
    done = subprocess.run(
        [sys.executable, '-P', '-c', code] if sys.version_info >= (3, 11)
        else [sys.executable, '-I', '-c', code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == 'imported'
