"""Options of the whole suite."""

import os
import signal

# A shell that runs the tests in the background has all its children ignore interrupts; the
# processes that tests start and interrupt must not inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption('--device', default='cpu', choices=['cpu', 'cuda'],
                     help='device of the engine tests; those that need CUDA are skipped on cpu')


def pytest_configure(config):
    os.environ['FLASHRT_TEST_DEVICE'] = config.getoption('--device')
