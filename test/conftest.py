"""Options of the whole suite."""

import os


def pytest_addoption(parser):
    parser.addoption('--device', default='cpu', choices=['cpu', 'cuda'],
                     help='device of the engine tests; those that need CUDA are skipped on cpu')


def pytest_configure(config):
    os.environ['FLASHRT_TEST_DEVICE'] = config.getoption('--device')
