"""The client: codes become typed errors, and it needs neither torch nor a model."""

from pathlib import Path
import subprocess
import sys

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from node_cases import code_of, Peer  # noqa: E402
from std_srvs.srv import Trigger  # noqa: E402

from flashrt_ros import errors, srv  # noqa: E402
from flashrt_ros.client import error_of, FlashrtClient, to_duration  # noqa: E402
from flashrt_ros.msg import ErrorCode  # noqa: E402


def test_import_needs_no_torch(tmp_path):
    code = ('import sys; import flashrt_ros.client, flashrt_ros.msg, flashrt_ros.srv, '
            "flashrt_ros.action; sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, '-c', code], cwd=tmp_path).returncode == 0


def test_the_node_module_starts_without_torch(tmp_path):
    # Torch is imported by configure: the node answers and can be stopped before it is there.
    code = ('import sys; import flashrt_ros.node.main, flashrt_ros.node.node; '
            "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, '-c', code], cwd=tmp_path).returncode == 0


@pytest.mark.parametrize('name', sorted(errors.BY_CODE))
def test_codes_become_errors(name):
    response = srv.SaveCapsule.Response(
        error_code=getattr(ErrorCode, name), error_msg='Do this.')
    error = error_of(response)
    assert type(error).code == name and str(error) == 'Do this.' and error.response is response
    trigger = Trigger.Response(success=False, message=f'{name}: Do: this.')
    assert error_of(trigger).code == name and str(error_of(trigger)) == 'Do: this.'
    assert error_of(srv.SaveCapsule.Response()) is None


def test_durations():
    assert to_duration(1.5).sec == 1 and to_duration(1.5).nanosec == 500_000_000


def test_without_a_node_calls_end_in_time():
    peer = Peer('/nobody')
    try:
        peer.client.timeout = 0.3
        assert code_of(lambda: peer.client.save('x')) == 'TIMEOUT'
        assert code_of(lambda: peer.client.generate('x')) == 'TIMEOUT'
        assert code_of(lambda: peer.client.wait_until_active(0.3)) in ('TIMEOUT', 'NOT_ACTIVE')
    finally:
        peer.close()


def test_rollback_takes_one_target():
    with pytest.raises(TypeError):
        FlashrtClient.rollback(None, position=1, tokens=1)


def test_a_burst_of_calls_and_goals_loses_none(tmp_path):
    """More at once than the usual depth of a service queue, which is ten."""
    pytest.importorskip('rclpy')
    sys.path.insert(0, str(Path(__file__).parent))
    from node_cases import running, until, WAIT
    with running(tmp_path) as (_, peer):
        request = srv.ListCapsules.Request()
        calls = [peer.client.call_async('list_capsules', request) for _ in range(100)]
        until(lambda: all(call.done() for call in calls))
        streams = [peer.client.generate('hello', max_tokens=1) for _ in range(40)]
        for stream in streams:
            assert stream.result(WAIT).error_code == 0
