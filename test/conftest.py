"""Options of the whole suite, shared fixtures, and what each of several processes runs."""

import os
import signal
import socket
import sys

import pytest

# A shell that runs the tests in the background has all its children ignore interrupts; the
# processes that tests start and interrupt must not inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


DOMAIN = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption('--device', default='cpu', choices=['cpu', 'cuda'],
                     help='device of the engine tests; those that need CUDA are skipped on cpu')


def pytest_configure(config):
    os.environ['FLASHRT_TEST_DEVICE'] = config.getoption('--device')

    if sys.platform == 'linux':
        wanted = int(os.environ.get('ROS_DOMAIN_ID', os.getpid() % 50 + 1))
        config.stash[DOMAIN], os.environ['ROS_DOMAIN_ID'] = claim(wanted)


def claim(wanted):
    """
    Return a ROS domain that no other test process of this machine has, and what holds it.

    The nodes of each hear and see those of no other: neither of the processes that run tests side
    by side, nor of somebody else's run. Demos and benchmarks take one of the upper half. The name
    of a socket is held until a process ends, however.
    """
    for domain in (wanted, *((wanted + n) % 50 + 1 for n in range(50))):
        held = socket.socket(socket.AF_UNIX)
        try:
            held.bind(f'\0flashrt_ros.test.domain.{domain}')
        except OSError:
            held.close()
        else:
            return held, str(domain)
    raise pytest.UsageError('tests run in every ROS domain of this machine already')


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from side_by_side import NodesApart
    return NodesApart(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    return plain((yield))


def plain(value):
    """Return a report with text that UTF-8 can carry: tests log paths that are no text."""
    if isinstance(value, str):
        return value.encode(errors='backslashreplace').decode()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return value


@pytest.fixture
def make(tmp_path):
    """Return what starts small engines on one directory; at the end they are closed."""
    from engine_cases import build  # it reads the device
    engines = []

    def start(**options):
        options.setdefault('directory', str(tmp_path / 'capsules'))
        engines.append(build(**{'context': 700, 'pool_bytes': 2 << 20, 'host_bytes': 1 << 20,
                                **options}))
        return engines[-1]
    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def worker(engine):
    """Return the worker of the engine of a module."""
    from flashrt_ros.worker import Worker
    worker = Worker(engine)
    worker.start()
    yield worker
    assert worker.stop(60.0)
