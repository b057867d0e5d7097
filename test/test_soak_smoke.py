"""Twenty seconds of the soak, with a client killed on the way; and that it sees what is wrong."""

import json
import os
from pathlib import Path
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip('rclpy')
ROOT = Path(__file__).resolve().parent.parent
SOAK = ROOT / 'tools' / 'soak'
sys.path.insert(0, str(SOAK))

from checked import CheckedClient  # noqa: E402
from ledger import collect, Ledger  # noqa: E402
from reference import Answer, Reference  # noqa: E402


@pytest.mark.timeout(280)
def test_twenty_seconds(tmp_path):
    out = tmp_path / 'soak.json'
    done = subprocess.run(
        [sys.executable, '-P', str(SOAK / 'soak.py'), '--minutes', '0.34', '--clients', '3',
         '--kill-every', '6', '--out', str(out)], capture_output=True, text=True, cwd=tmp_path,
        timeout=270, check=False, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    report = json.loads(out.read_text())
    assert report['passed'] and report['violations'] == [] and report['killed_clients'] >= 1
    counts = report['counts']
    assert counts['checks'] > 50 and counts['tokens'] > 100 and counts['answer'] > 0
    node = report['node']
    assert node['pool_end'] <= node['pool_begin'] < node['pool_peak']
    assert node['samples'] > 5 and node['curve']


@pytest.fixture
def actor(tmp_path):
    reference = Reference({'positions': {}, 'short': {}, 'long': {}})
    return CheckedClient(SimpleNamespace(), 0, reference, Ledger(tmp_path, 'test'),
                         random.Random(1))


def found(tmp_path):
    return [violation['what'] for violation in collect(tmp_path)[1]]


def test_a_wrong_token_is_seen(actor, tmp_path):
    answer = Answer([1, 2, 3], 'abc', 5, 8)
    right = SimpleNamespace(token_ids=[1, 2, 3], text='abc', prompt_tokens=5, position=8)
    actor.check_answer(right, answer)
    assert found(tmp_path) == []
    for change in ({'token_ids': [1, 2, 4]}, {'text': 'abd'}, {'position': 9},
                   {'prompt_tokens': 4}):
        actor.check_answer(SimpleNamespace(**{**vars(right), **change}), answer)
    assert found(tmp_path) == ['wrong answer'] * 4
    actor.check_part(SimpleNamespace(token_ids=[1, 2]), answer)
    actor.check_part(SimpleNamespace(token_ids=[2]), answer)
    assert found(tmp_path)[4:] == ['wrong part']


def test_an_epoch_that_repeats_is_seen(actor, tmp_path):
    actor.check_epoch(7, new=True)
    actor.check_epoch(7, new=False)
    assert found(tmp_path) == []
    actor.check_epoch(7, new=True)
    actor.check_epoch(8, new=False)
    assert found(tmp_path) == ['epoch'] * 2


class Finished(list):
    """A stream that has ended."""

    def __init__(self, tokens):
        super().__init__(tokens)
        self.tokens = tokens
        self.made_up = False


def test_a_stream_with_a_gap_or_of_two_epochs_is_seen(actor, tmp_path):
    def token(seq, ids, epoch=1, finish=0):
        return SimpleNamespace(seq=seq, token_ids=ids, text='', epoch=epoch, finish_reason=finish)

    result = SimpleNamespace(token_ids=[1, 2, 3], text='', finish_reason=2)
    actor.check_stream(Finished([token(0, [1, 2]), token(1, [3], finish=2)]), result)
    assert found(tmp_path) == []
    actor.check_stream(Finished([token(0, [1, 2]), token(2, [3], finish=2)]), result)
    assert found(tmp_path) == ['seq']
    actor.check_stream(Finished([token(0, [1, 2]), token(1, [], 2, 2)]), result)
    assert found(tmp_path)[1:] == ['stream is not the result', 'epochs within a goal']
