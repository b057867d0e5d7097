"""What `verify` did not look at is no proof: not applicable is neither passed nor failed."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from flashrt_ros.arena import Buffer, Manifest, Role
from flashrt_ros.cli import checks, exits


def verify(*arguments, as_json=True):
    return subprocess.run(
        [sys.executable, '-m', 'flashrt_ros.cli.main', 'verify', '--model', 'random:tiny',
         '--device', 'cpu', '--quick', '--threads', '1', *(['--json'] if as_json else []),
         *arguments],
        capture_output=True, text=True, timeout=100, env=os.environ, check=False)


def test_nothing_that_ran_is_no_pass():
    process = verify('--only', 'graph_equals_eager')
    found = json.loads(process.stdout)
    check, = found['checks']
    assert process.returncode == exits.FAILED and found['passed'] is False and found['ran'] == 0
    assert found['not_applicable'] == ['graph_equals_eager']
    assert check['passed'] is None and 'on a CPU there are no graphs' in check['detail']
    assert 'graph_equals_eager: not applicable' in process.stderr
    people = verify('--only', 'graph_equals_eager', as_json=False)
    assert people.returncode == exits.FAILED and 'No check ran' in people.stdout
    assert 'passed' not in people.stdout


def test_what_ran_decides_beside_what_does_not_apply():
    process = verify('--only', ' non_lm_program, graph_equals_eager,non_lm_program')
    found = json.loads(process.stdout)
    assert process.returncode == exits.OK and found['passed'] and found['ran'] == 1
    assert [check['passed'] for check in found['checks']] == [True, None]
    assert found['not_applicable'] == ['graph_equals_eager']


@pytest.mark.parametrize('only', ['nonsense', 'byte_exact,nonsense', ',', ' '])
def test_names_of_no_check_are_refused_with_the_list(only):
    process = verify('--only', only)
    assert process.returncode == exits.USAGE
    message = json.loads(process.stdout)['error']['message']
    assert all(name in message for name in checks.ALL)


def test_an_ablation_of_what_a_model_does_not_have():
    manifest = Manifest([Buffer('kv', Role.ROWS, torch.float32, (4,))])
    engine = SimpleNamespace(arena=SimpleNamespace(manifest=manifest))
    check = checks.ALL['ablation_no_conv'](engine, None)
    assert (check.applicable, check.passed, check.verdict) == (False, None, 'not applicable')
    assert check.detail == 'not applicable: this model has no such state.'
