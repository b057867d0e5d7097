"""thread_priority and cpu_affinity, as the system sees the threads of a real node."""

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus  # noqa: E402
from node_cases import NodeProcess, Peer, running, start_long, until  # noqa: E402
from rcl_interfaces.msg import ParameterType  # noqa: E402
from rcl_interfaces.srv import GetParameters, SetParameters  # noqa: E402
from rclpy.parameter import Parameter  # noqa: E402

from flashrt_ros.node.parameters import PARAMETERS  # noqa: E402
from flashrt_ros.node.scheduling import available_cores, granted_priority  # noqa: E402

CORES = sorted(available_cores())
SPECS = {spec.name: spec for spec in PARAMETERS}
needs_priority = pytest.mark.skipif(
    granted_priority() < 21, reason='this machine grants no priority: see `flashrt-ros doctor`')
# Takes away what grants a priority, in the process of the node, before it starts a thread.
FORBID = """
import ctypes, resource, struct
resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
libc, header = ctypes.CDLL(None), struct.pack('Ii', 0x20080522, 0)
room = ctypes.create_string_buffer(24)
assert libc.capget(header, room) == 0
words = [word & ~(1 << 23) for word in struct.unpack('6I', room.raw)[:3]]
assert libc.capset(header, struct.pack('6I', *words, *struct.unpack('6I', room.raw)[3:])) == 0
"""


def threads(node):
    """Return for each thread: policy, priority, nice and cores, as the system tells them."""
    found = {}
    for task in Path(f'/proc/{node.process.pid}/task').iterdir():
        try:
            fields = (task / 'stat').read_text().rpartition(')')[2].split()
            found[int(task.name)] = (int(fields[38]), int(fields[37]), int(fields[16]),
                                     frozenset(os.sched_getaffinity(int(task.name))))
        except (OSError, ProcessLookupError):
            pass  # it has ended
    return found


def spent(node):
    """Return the ticks of the clock that each thread has computed."""
    found = {}
    for task in Path(f'/proc/{node.process.pid}/task').iterdir():
        try:
            fields = (task / 'stat').read_text().rpartition(')')[2].split()
            found[int(task.name)] = int(fields[11]) + int(fields[12])
        except OSError:
            pass  # it has ended
    return found


def runtime_status(messages):
    """Return the newest status of that name."""
    del messages[:]
    array = until(lambda: messages[-1] if messages else None)
    return next(status for status in array.status if status.name.endswith(': runtime'))


def assign(peer, name, value):
    client = peer.service(SetParameters, 'set_parameters')
    future = client.call_async(SetParameters.Request(
        parameters=[Parameter(name, value=value).to_parameter_msg()]))
    until(future.done)
    return future.result().results[0]


@needs_priority
def test_every_thread_has_what_was_asked_for_until_cleanup(tmp_path):
    with running(tmp_path, thread_priority=20, cpu_affinity=f'[{CORES[0]}]') as (node, peer):
        heard = peer.collect(DiagnosticArray, '/diagnostics')
        stream = start_long(peer.client)
        seen = threads(node)
        assert {of[0] for of in seen.values()} == {os.SCHED_FIFO}
        assert [of[1] for of in seen.values()].count(20) == 1
        assert {of[1] for of in seen.values()} == {20, 21}
        assert {of[3] for of in seen.values()} == {frozenset(CORES[:1])}
        # The one below the others is the one that computes: while it speaks it computes most.
        before = spent(node)
        until(lambda: sum(spent(node).values()) > sum(before.values()) + 30)
        after = spent(node)
        computing = max(after, key=lambda thread: after[thread] - before.get(thread, 0))
        assert seen[computing][1] == 20
        values = {pair.key: pair.value for pair in runtime_status(heard).values}
        assert values['thread that computes'] == f'SCHED_FIFO 20, cores {CORES[0]}'
        assert values['other threads'] == f'SCHED_FIFO 21, cores {CORES[0]}'
        told = assign(peer, 'thread_priority', 0)
        assert not told.successful and 'cleanup' in told.reason
        stream.cancel()
        until(stream.done.done)
        assert peer.client.change_state('deactivate') and peer.client.change_state('cleanup')
        for policy, priority, nice, cores in threads(node).values():
            assert (policy, priority, nice) == (os.SCHED_OTHER, 0, 0)
            assert cores == os.sched_getaffinity(0)
        assert assign(peer, 'thread_priority', 5).successful
        assert assign(peer, 'cpu_affinity', CORES).successful
        assert peer.client.change_state('configure') and peer.client.change_state('activate')
        peer.client.generate('go', max_tokens=4).result(30.0)
        seen = threads(node)
        assert {of[:2] for of in seen.values()} == {(os.SCHED_FIFO, 5), (os.SCHED_FIFO, 6)}
        assert {of[3] for of in seen.values()} == {frozenset(CORES)}


@needs_priority
@pytest.mark.skipif(len(CORES) < 2, reason='one core')
def test_threads_of_torch_are_those_that_compute(tmp_path):
    with running(tmp_path, thread_priority=20, model__threads=2) as (node, peer):
        peer.client.generate('a long prompt ' * 100, max_tokens=1).result(60.0)
        seen = threads(node)
        assert {of[1] for of in seen.values()} == {20, 21}
        assert [of[1] for of in seen.values()].count(20) >= 2


def test_what_the_system_does_not_grant_is_told_and_gone_on_without(tmp_path):
    with running(tmp_path, fault=FORBID, thread_priority=20) as (node, peer):
        heard = peer.collect(DiagnosticArray, '/diagnostics')
        assert peer.client.generate('go', max_tokens=4).result(30.0).completion_tokens
        assert {of[:3] for of in threads(node).values()} == {(os.SCHED_OTHER, 0, 0)}
        status = runtime_status(heard)
        assert status.level == DiagnosticStatus.WARN
        for word in ('thread_priority 20', 'limits.conf', 'LimitRTPRIO', 'SYS_NICE', 'doctor'):
            assert word in status.message
            until(lambda word=word: word in node.log)
        assert node.log.count('was not granted') == 1


def test_cores_need_no_privilege(tmp_path):
    with running(tmp_path, fault=FORBID, cpu_affinity=CORES[-1]) as (node, _):
        assert {of[3] for of in threads(node).values()} == {frozenset(CORES[-1:])}
        assert {of[:3] for of in threads(node).values()} == {(os.SCHED_OTHER, 0, 0)}


@pytest.mark.parametrize('asked', [1023, '[0, 1022]'])
def test_a_core_that_is_not_there_fails_configure_before_the_load(tmp_path, asked):
    node = NodeProcess(tmp_path, autostart=False, cpu_affinity=asked)
    peer = Peer()
    try:
        peer.client.lifecycle(timeout=60.0)
        before = threads(node)
        assert not peer.client.change_state('configure')
        assert peer.client.lifecycle() == 'unconfigured'
        until(lambda: 'INVALID_ARGUMENT: cpu_affinity names core 102' in node.log)
        assert f'name some of {", ".join(map(str, CORES))}, or -1' in node.log
        assert 'fingerprint' not in node.log  # nothing was loaded for it
        assert set(threads(node).values()) == set(before.values())
        assert assign(peer, 'cpu_affinity', -1).successful
        assert peer.client.change_state('configure')
    finally:
        peer.close()
        node.close()


def test_by_default_all_stays_as_whoever_starts_it_says(tmp_path):
    mask = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CORES[0]})
    try:
        node = NodeProcess(tmp_path)
    finally:
        os.sched_setaffinity(0, mask)
    peer = Peer()
    try:
        peer.client.wait_until_active(60.0)
        assert set(threads(node).values()) == {
            (os.SCHED_OTHER, 0, 0, frozenset(CORES[:1]))}
    finally:
        peer.close()
        node.close()


def test_an_empty_list_in_a_file_means_all(tmp_path):
    file = tmp_path / 'parameters.yaml'
    file.write_text('/**:\n  ros__parameters:\n    cpu_affinity: []\n')
    code = ('import sys; from flashrt_ros.node.node import CapsuleNode; import rclpy; '
            'rclpy.init(args=sys.argv); node = CapsuleNode(); '
            'print(node.parameters["cpu_affinity"], node.parameters.scheduling()._cores); '
            'node.finish(); node.destroy_node(); rclpy.shutdown()')
    done = subprocess.run([sys.executable, '-c', code, '--ros-args', '--params-file', str(file)],
                          capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 0 and 'frozenset()' in done.stdout, done.stderr


@pytest.mark.parametrize('name, fits, wrong', [
    ('thread_priority', (0, 1, 98), (-1, 99, 10.0, True, '10')),
    ('cpu_affinity', (-1, 0, 3, [], [0], [0, 3], None), (-2, 1024, '0', [0.5], [-2], True,
                                                         [True], 'all'))])
def test_values(name, fits, wrong):
    for value in fits:
        assert SPECS[name].refusal(value) == ''
    for value in wrong:
        assert SPECS[name].refusal(value).startswith(f'{name} must be an integer'), value


def test_a_start_value_that_is_not_allowed_is_told_in_its_words(tmp_path):
    node = NodeProcess(tmp_path, cpu_affinity='[0.5]')
    assert node.wait() == 2
    assert 'cpu_affinity must be an integer, -1 to 1023, or a list of them' in node.log


def test_one_core_is_read_back_as_it_was_given(tmp_path):
    with running(tmp_path, cpu_affinity=CORES[0]) as (_, peer):
        client = peer.service(GetParameters, 'get_parameters')
        future = client.call_async(GetParameters.Request(names=['cpu_affinity']))
        until(future.done)
        value = future.result().values[0]
        assert (value.type, value.integer_value) == (ParameterType.PARAMETER_INTEGER, CORES[0])


@pytest.mark.parametrize('forbid', ['', FORBID], ids=['as it is', 'nothing granted'])
def test_doctor_tells_what_the_machine_grants(forbid, tmp_path):
    code = forbid + ('import sys; from flashrt_ros.cli.main import main; '
                     'sys.exit(main(["doctor", "--json", "--model", "random:tiny"]))')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True,
                          timeout=60, check=False, cwd=tmp_path)
    found = {finding['name']: finding for finding in json.loads(done.stdout)['findings']}
    granted = 0 if forbid else max(0, granted_priority() - 1)
    assert f'thread_priority up to {granted}, ' in found['scheduling']['found']
    assert f'cpu_affinity of {", ".join(map(str, CORES))}' in found['scheduling']['found']
    assert ('LimitRTPRIO' in found['scheduling']['remedy']) == (granted == 0)
    assert found['scheduling']['status'] == 'ok'
