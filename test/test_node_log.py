"""What the log of the node says of an error: a sentence, and a trace only where it helps."""

from pathlib import Path
import sys

import pytest

pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from node_cases import NodeProcess, until  # noqa: E402
import torch  # noqa: E402

from flashrt_ros.errors import Capacity, DeviceFault, Internal  # noqa: E402
from flashrt_ros.node.jobs import report  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason='needs a machine without CUDA')
def test_a_device_that_is_not_there_is_one_sentence(tmp_path):
    process = NodeProcess(tmp_path, device='cuda')
    try:
        until(lambda: 'configure failed' in process.log)
    finally:
        process.close()
    line = next(line for line in process.log.splitlines() if 'configure failed' in line)
    assert 'DEVICE: device cuda cannot be used' in line and 'Configure device cpu' in line
    assert 'Traceback' not in process.log


@pytest.mark.parametrize('error', [Capacity('No room.'), DeviceFault('No device.'),
                                   Internal('The books are wrong.')])
def test_typed_errors_are_their_sentence(error):
    assert report(error) == f'{error.code}: {error}'


def test_what_nobody_expected_tells_where():
    def raised(error, cause=None):
        try:
            raise error from cause
        except Exception as caught:
            return caught
    assert 'Traceback' in report(raised(KeyError('x')))
    # The sentence of a wrapper does not tell where its cause came from.
    bus = raised(RuntimeError('the device fell off the bus'))
    wrapped = report(raised(DeviceFault('A step failed.'), bus))
    assert wrapped.startswith('DEVICE: A step failed.\n') and 'fell off the bus' in wrapped
    # A refusal that was made of an exception was expected.
    assert report(raised(Capacity('No room.'), bus)) == 'CAPACITY: No room.'
