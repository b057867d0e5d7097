"""`flashrt-ros verify` as a command, and the small tools that its checks stand on."""

import json
import os
import subprocess
import sys

import pytest
import torch

from flashrt_ros.arena import Arena, Buffer, Manifest, Role
from flashrt_ros.cli import checks, exits
from flashrt_ros.cli.checks import guard, segments, state

REQUIRED = {
    'byte_exact', 'token_exact', 'sampled_exact', 'cold_exact_aligned', 'closed_manifest',
    'dead_rows', 'immutable', 'fork_divergent', 'rollback', 'new_process_restore',
    'failed_restore_untouched', 'abort_untouched', 'ablation_kv_only', 'ablation_no_recurrent',
    'ablation_no_conv', 'ablation_no_boundary', 'steady_memory', 'non_lm_program'}


def verify(*arguments):
    """Run the command; return exit code, document and stderr."""
    process = subprocess.run(
        [sys.executable, '-m', 'flashrt_ros.cli.main', 'verify', '--model', 'random:tiny',
         '--quick', '--threads', '1', '--json', *arguments],
        capture_output=True, text=True, timeout=300, env=os.environ, check=False)
    return process.returncode, json.loads(process.stdout), process.stderr


def test_the_contract_holds_on_a_tiny_model():
    status, found, log = verify('--cycles', '50')
    failed = [check for check in found['checks'] if not check['passed']]
    assert status == exits.OK and found['passed'], failed
    assert {check['name'] for check in found['checks']} == set(checks.CHECKS) >= REQUIRED
    for check in found['checks']:
        assert {'name', 'passed', 'figure', 'detail', 'unit', 'applicable'} <= check.keys()
        assert check['figure'] is not None and len(check['detail']) > 40
        assert check['name'] in log
    assert found['model']['model'] == 'random:tiny' and found['model']['fixed_bytes'] > 0


def test_only_runs_what_it_names_and_people_get_lines_that_fit():
    status, found, _ = verify('--only', 'non_lm_program,dead_rows')
    assert status == exits.OK
    assert [check['name'] for check in found['checks']] == ['non_lm_program', 'dead_rows']
    process = subprocess.run(
        [sys.executable, '-m', 'flashrt_ros.cli.main', 'verify', '--model', 'random:tiny',
         '--quick', '--only', 'non_lm_program'], capture_output=True, text=True, timeout=100,
        check=True)
    assert 'All checks passed' in process.stdout
    assert max(map(len, process.stdout.splitlines())) <= 100


def test_what_needs_a_device_is_not_run_on_a_cpu_and_says_so():
    assert checks.names_for('cpu') == list(checks.CHECKS) and len(checks.CHECKS) == 19
    assert set(checks.names_for('cuda')) == set(checks.ALL)
    assert set(checks.CUDA_CHECKS) == {'graph_equals_eager', 'capture_side_effect_free',
                                       'stable_addresses', 'stream_ordered_save'}
    status, found, _ = verify('--device', 'cpu', '--only', 'stable_addresses')
    check, = found['checks']
    assert status == exits.FAILED and not check['applicable'] and check['figure'] is None
    assert 'not applicable' in check['detail']


def test_ranges_without_those_that_may_change():
    assert segments.without((0, 100), []) == [(0, 100)]
    assert segments.without((0, 100), [(90, 120), (10, 20), (15, 30)]) == [
        (0, 10), (30, 90)]
    assert segments.without((0, 100), [(0, 100)]) == []
    assert segments.without((10, 20), [(0, 12), (30, 40)]) == [(12, 20)]


def test_a_check_that_fails_is_exit_code_1():
    status, found, _ = verify('--only', 'steady_memory', '--seconds', '10', '--cycles', '1')
    assert status == exits.OK and '1 cycles' in found['checks'][0]['detail']
    code = ('import sys; from flashrt_ros.cli import checks, main; from flashrt_ros.arena import '
            'Arena; Arena.will_write = lambda self, row: None; '
            'sys.exit(main.main(["verify", "--model", "random:tiny", "--quick", "--json", '
            '"--only", "byte_exact"]))')
    process = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True,
                             timeout=100, check=False)
    found = json.loads(process.stdout)
    assert process.returncode == exits.FAILED and not found['passed']
    assert found['checks'][0]['figure'] > 0


def test_an_exception_in_a_check_is_a_failure_that_says_which(monkeypatch):
    class Engine:
        def list(self):
            return []

        sessions = list

        def reset(self):
            raise LookupError('lost')
    check = checks.run_one('byte_exact', Engine(), None)
    assert not check.passed and check.figure is None
    assert 'LookupError' in check.detail and 'lost' in check.detail


# -- the tools ---------------------------------------------------------------------------------

def small_arena():
    """Return an arena with one buffer of each kind and three live rows."""
    arena = Arena(Manifest([
        Buffer('kv', Role.ROWS, torch.float32, (4,)),
        Buffer('hidden', Role.RECURRENT, torch.float32, (3,)),
        Buffer('work', Role.SCRATCH, torch.float32, (2,))]), 8)
    arena.reset()
    arena.set_position(3)
    return arena


def test_differing_counts_bytes_of_live_state_only():
    arena = small_arena()
    before = state.snapshot(arena)
    assert state.differing(before, state.snapshot(arena)) == 0
    arena['kv'][5] = 1.0
    assert state.differing(before, state.snapshot(arena)) == 0
    arena['kv'][2, 0] = -0.0  # equal as a float, not as bytes
    assert state.differing(before, state.snapshot(arena)) == 1
    arena.set_position(4)
    assert state.differing(before, state.snapshot(arena)) > 16


@pytest.mark.parametrize('pattern', ['nan', 'random'])
def test_poison_reaches_every_byte_and_announces_itself(pattern):
    arena = small_arena()
    arena.clean = 3
    state.poison(arena, pattern)
    assert arena.clean == 0
    if pattern == 'nan':
        assert bool(torch.isnan(arena['kv']).all()) and bool(torch.isnan(arena['work']).all())
        assert bool((arena.storage == 0xFF).all())
    else:
        assert arena.storage.unique().numel() > 50


def test_poison_of_dead_rows_leaves_live_ones():
    arena = small_arena()
    before = state.snapshot(arena)
    assert state.poison_dead(arena, 'nan') == 5 * 16 + arena.scratch.numel()
    assert state.differing(before, state.snapshot(arena)) == 0
    assert bool(torch.isnan(arena['kv'][3:]).all()) and not bool(arena['kv'][:3].isnan().any())


def test_the_guard_tells_every_kind_of_write():
    weight, allowed = torch.randn(8, 8), torch.zeros(8)
    older, holder = torch.zeros(4), {}

    def good():
        fresh = torch.tensor([1.0, 2.0])
        fresh.add_(1)
        out = torch.empty(8)
        torch.mv(weight, allowed, out=out)
        allowed.copy_(out)
        allowed.view(2, 4)[0].mul_(2)

    def verdict(fault):
        def replay():
            good()
            fault()
        return guard.watch(replay, [allowed])

    assert verdict(lambda: None).total == 0
    assert verdict(lambda: older.add_(1)).offences
    assert verdict(lambda: torch.mv(weight, allowed, out=weight[0])).offences
    assert verdict(lambda: older.numpy().fill(7)).changed
    assert verdict(lambda: holder.update(state=allowed + 1)).survivors
