"""`flashrt-ros bench ros`: what it measures and says; how fast it is, no test decides."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip('rclpy')


@pytest.mark.timeout(280)
def test_everything_is_measured_beside_a_bare_peer(tmp_path):
    done = subprocess.run(
        [sys.executable, '-m', 'flashrt_ros.cli.main', 'bench', 'ros', '--quick', '--model',
         'random:tiny', '--threads', '1', '-p', 'stream.depth:=200', '--json'],
        capture_output=True, text=True, cwd=tmp_path, timeout=270, check=False,
        env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row['when'] for row in found['rows']] == ['idle', 'streaming', 'eight']
    for row in found['rows']:
        for key in ('list', 'save', 'restore', 'trigger'):
            assert 0 < row[f'{key}_ms'] <= row[f'{key}_p99_ms'] and row[f'{key}_repeats'] >= 8
    for row in found['rows'][:2]:  # what a response says of itself is a part of the round trip
        assert 0 < row['restore_inside_ms'] < row['restore_ms']
    assert 0 < found['node_ms_a_call'] < 1000
    tokens = found['tokens']
    for name in ('token_latency', 'feedback_latency', 'string_latency', 'token_latency_eight',
                 'feedback_latency_eight', 'string_latency_eight', 'token_latency_only'):
        assert tokens[f'{name}_ms'] > 0 and tokens[f'{name}_repeats'] > 8
    # A wrong pairing of notes and arrivals would show as seconds, or below zero; a bare String
    # carries its time along, and is as late where the machine has no time for eight clients.
    for when, bare in (('_only', 0), ('', tokens['string_latency_ms']),
                       ('_eight', tokens['string_latency_eight_ms'])):
        assert tokens[f'token_latency{when}_ms'] < 1000 + bare
    decode = found['decode']
    for name in ('bare', 'alone', 'heard', 'each'):
        assert decode[f'{name}_tokens_per_second'] > 0 and decode[f'token_{name}_ms'] > 0
    for name in ('alone', 'heard', 'each', 'eight'):  # what the thread that computes did
        spent = found['worker'][name]
        assert spent['computes_ms'] > 0 and spent['tokens'] > 8
        assert spent['waits_for_core_ms'] >= 0 and spent['waits_for_interpreter_ms'] >= 0
    assert found['parameters'] == ['stream.depth:=200']
    assert found['restore_own_ms'] > 0 and len(found['targets']) == 5
    assert all({'found', 'at_most', 'met'} <= target.keys() for target in found['targets'].values())
    assert found['clients'] == 8 and found['cores'] and found['model']['model'] == 'random:tiny'
