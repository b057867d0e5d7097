"""Faults planted in a real node: device error, hang, overrun (acceptance 34, 36)."""

from pathlib import Path
import re
import shutil
import sys

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from diagnostic_msgs.msg import DiagnosticArray  # noqa: E402
from node_cases import code_of, last, LATCHED, running, start_long, until, WAIT  # noqa: E402
from rcl_interfaces.srv import GetParameters  # noqa: E402

from flashrt_ros.msg import CapsuleList, Token  # noqa: E402

# A file in the working folder switches a fault on; another one tells that it is felt.
STEP = """
import pathlib, time
from flashrt_ros import plan
step = plan.EagerPlan.step
def faulty(self, *arguments, **named):
    if pathlib.Path('break').exists():
        pathlib.Path('break').unlink()
        raise RuntimeError('the device fell off the bus')
    while pathlib.Path('hang').exists():
        pathlib.Path('hangs').touch()
        time.sleep(0.01)
    return step(self, *arguments, **named)
plan.EagerPlan.step = faulty
from flashrt_ros import assembly
load = assembly.load_model
def slow(*arguments, **named):
    while pathlib.Path('slow').exists():
        pathlib.Path('loads').touch()
        time.sleep(0.01)
    return load(*arguments, **named)
assembly.load_model = slow
"""


@pytest.fixture(scope='module')
def system(tmp_path_factory):
    folder = tmp_path_factory.mktemp('node')
    with running(folder, fault=STEP, timeouts__stall=1.0, timeouts__cancel=1.0,
                 stream__depth=4, stream__max_rate_hz=0.5) as (process, peer):
        yield folder, process, peer


@pytest.fixture
def hang(system):
    """Return a function that lets the device hang, and returns once it does."""
    folder, _, _ = system

    def begin():
        (folder / 'hangs').unlink(missing_ok=True)
        (folder / 'hang').touch()
        until((folder / 'hangs').exists)
    yield begin
    (folder / 'hang').unlink(missing_ok=True)


def test_a_device_error_ends_the_goal_with_its_code(system):
    folder, process, peer = system
    client = peer.client
    base = client.generate('hello', max_tokens=2).result(WAIT)
    client.save('before', overwrite=True)
    stream = start_long(client, tokens=1)
    (folder / 'break').touch()
    result = stream.result(WAIT, check=False)
    assert result.error_code == 42016 and stream.status == 6
    assert last(stream.tokens).finish_reason == Token.ERROR
    until(lambda: 'fell off the bus' in process.log)
    assert client.lifecycle() == 'active'
    assert client.restore('before').tokens_reused == base.position
    assert client.generate('x', max_tokens=2).result(WAIT).error_code == 0


def test_a_hang_fails_the_goal_and_is_reported(system, hang):
    folder, _, peer = system
    client = peer.client
    arrays = peer.collect(DiagnosticArray, '/diagnostics', 10, first=True)
    stream = start_long(client, session='a', tokens=1)
    waiting = client.generate('x', session='b', max_tokens=2)
    until(lambda: waiting.handle)
    hang()
    result = stream.result(WAIT, check=False)
    assert result.error_code == 42016 and 'timeouts.stall' in result.error_msg
    # By the clock of the node: nothing says how late the answer gets here.
    assert 1.0 <= float(re.search(r'came for ([\d.]+) s', result.error_msg)[1]) < 5.0
    until(lambda: any(status.name == '/flashrt: stall' and status.level == b'\x02'
                      for status in arrays[-1].status))
    assert code_of(lambda: client.call('list_capsules', _list(), timeout=WAIT)) == 'TIMEOUT'
    (folder / 'hang').unlink()  # the device comes back
    assert waiting.result(WAIT).error_code == 0
    assert client.generate('x', session='a', max_tokens=2).result(WAIT).error_code == 0


def _list():
    from flashrt_ros.srv import ListCapsules
    return ListCapsules.Request()


def test_overruns_show_as_gaps_and_the_result_is_whole(system):
    _, _, peer = system
    stream = peer.client.generate('tell me', session='c', max_tokens=40, temperature=20.0, seed=3)
    result = stream.result(WAIT)
    last(stream.tokens)
    ids = [i for token in stream.tokens for i in token.token_ids]
    assert len(ids) < result.completion_tokens == len(result.token_ids)
    seqs = [token.seq for token in stream.tokens]
    assert seqs == sorted(set(seqs)) and seqs[-1] >= len(seqs)
    for token in stream.tokens:
        assert list(result.token_ids[token.index:token.index + len(token.token_ids)]) == list(
            token.token_ids)


def test_a_disk_that_refuses_is_told(system):
    folder, process, peer = system
    lists = peer.collect(CapsuleList, '/flashrt/capsules', LATCHED)
    capsules = folder / 'capsules'
    for file in capsules.iterdir():
        file.unlink()
    capsules.rmdir()
    capsules.write_text('a file in the way')
    saved = peer.client.save('lost', persist=True, overwrite=True)
    assert saved.error_code == 0  # in memory it is
    until(lambda: 'a capsule was not written to disk, STORAGE' in process.log)
    until(lambda: 'lost' in [info.name for info in lists[-1].capsules])
    assert peer.client.restore('lost').error_code == 0
    capsules.unlink()
    capsules.mkdir()
    peer.client.save('lost', persist=True, overwrite=True)
    until(lambda: any(info.name == 'lost' and info.tiers & 4 for info in lists[-1].capsules))


def test_a_disk_that_vanished_is_an_error_and_everything_else_goes_on(system):
    folder, process, peer = system
    arrays = peer.collect(DiagnosticArray, '/diagnostics', 10)
    capsules = folder / 'capsules'

    def memory():
        return next((s for s in arrays[-1].status if s.name == '/flashrt: memory'), None) \
            if arrays else None

    peer.client.save('kept', overwrite=True)
    shutil.rmtree(capsules)
    for obstacle in (False, True):
        if obstacle:
            capsules.write_text('a file in the way')
        arrays.clear()
        status = until(lambda: memory() and memory().level == b'\x02' and memory())
        assert str(capsules) in status.message and 'mount or make' in status.message
        assert int({v.key: v.value for v in status.values}['pool_used_bytes']) > 0
        assert peer.client.restore('kept').error_code == 0
        assert 'kept' in [info.name for info in peer.client.list()]
        assert peer.client.generate('go', max_tokens=2).result(WAIT).error_code == 0
    capsules.unlink()
    peer.client.save('kept', persist=True, overwrite=True)
    until(lambda: memory() and memory().level == b'\x00')


def test_deactivate_under_a_hang_recovers_to_unconfigured(system, hang):
    folder, _, peer = system
    client = peer.client
    stream = start_long(client, session='a', tokens=1)
    hang()
    deactivating = client.call_async('change_state', _transition('deactivate'))
    until(deactivating.done)
    assert code_of(lambda: stream.result(WAIT)) in ('NOT_ACTIVE', 'DEVICE')
    (folder / 'hang').unlink()
    state = client.lifecycle()
    assert state in ('inactive', 'unconfigured')
    if state == 'unconfigured':
        assert client.change_state('configure')
    assert client.change_state('activate')
    assert client.generate('x', session='b', max_tokens=2).result(WAIT).error_code == 0


def test_everything_answers_while_configure_loads(system):
    folder, _, peer = system
    client = peer.client
    for transition in {'active': ('deactivate', 'cleanup'), 'inactive': ('cleanup',)}.get(
            client.lifecycle(), ()):
        assert client.change_state(transition)
    getter = peer.service(GetParameters, 'get_parameters')
    (folder / 'slow').touch()
    try:
        loading = client.call_async('change_state', _transition('configure'))
        until((folder / 'loads').exists)
        for _ in range(5):
            future = getter.call_async(GetParameters.Request(names=['device']))
            until(future.done)
            assert code_of(client.list) == 'NOT_ACTIVE'
            assert not client.change_state('activate')  # one transition at a time
        assert not loading.done()
    finally:
        (folder / 'slow').unlink()  # it loads until then
    until(loading.done)
    assert loading.result().success
    assert client.lifecycle() == 'inactive'
    assert client.change_state('activate')


def _transition(name):
    from lifecycle_msgs.msg import Transition
    from lifecycle_msgs.srv import ChangeState
    return ChangeState.Request(transition=Transition(
        id=getattr(Transition, f'TRANSITION_{name.upper()}')))
