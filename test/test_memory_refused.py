"""Memory that the system refuses, though it seemed free, is a typed refusal."""

import os
import subprocess
import sys

import pytest
import torch

from flashrt_ros.config import allocating
from flashrt_ros.errors import Capacity

LIMITED = """
import resource
from flashrt_ros.engine import Engine, EngineConfig
from flashrt_ros.errors import Capacity
pages = int(open('/proc/self/statm').read().split()[0])
limit = pages * resource.getpagesize() + (200 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for options in ({'pool_bytes': 1 << 30}, {'pool_bytes': 8 << 20, 'host_bytes': 1 << 30}):
    try:
        Engine(EngineConfig(model='random:tiny', device='cpu', context=64, threads=1, **options))
    except Capacity as refusal:
        print(refusal)
"""


def test_a_limit_of_the_process():
    done = subprocess.run([sys.executable, '-c', LIMITED], capture_output=True, text=True,
                          env={**os.environ, 'OMP_NUM_THREADS': '1'}, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and not done.returncode, done.stderr
    assert all('refused' in line and 'bytes for random:tiny' in line for line in lines)


def test_other_faults_pass():
    for error in (torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.'),
                  MemoryError()):
        with pytest.raises(Capacity, match='(2.00 GiB|memory) for all'), allocating('all'):
            raise error
    with pytest.raises(RuntimeError, match='shape'), allocating('all'):
        raise RuntimeError('a shape is wrong')
