"""`flashrt-ros bench`: what it measures and says; how fast it is, no test decides."""

import json
import subprocess
import sys

import pytest

from flashrt_ros.cli.benchmarks.timing import Samples


def bench(*arguments, model='random:tiny'):
    """Run a benchmark with --json; return the document."""
    process = subprocess.run(
        [sys.executable, '-m', 'flashrt_ros.cli.main', 'bench', *arguments, '--model', model,
         '--pool-mib', '32', '--threads', '1', '--json'],
        capture_output=True, text=True, timeout=200, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def conditions_are_stated(found):
    """Assert that a document says what its figures depend on."""
    assert {'model', 'cpu', 'threads', 'device', 'prompt', 'versions'} <= found.keys()
    assert found['model']['dtype'] == 'float32' and found['versions']['torch']


def test_ttft_rows():
    found = bench('ttft', '--prefix', '70,150', '--suffix', '8', '--repeats', '2',
                  '--no-transformers')
    conditions_are_stated(found)
    assert [row['prefix'] for row in found['rows']] == [70, 150]
    for row in found['rows']:
        assert row['suffix'] == 8 and row['cold_ms'] > 0 and row['capsule_ms'] > 0
        assert row['speedup'] == pytest.approx(row['cold_ms'] / row['capsule_ms'], rel=0.01)
        assert row['suffix_0_ms'] > 0 and row['restore_ms'] > 0 and row['bytes'] > 0
        assert row['capsule_repeats'] == 10 and row['cold_repeats'] == 2
        assert row['capsule_p99_ms'] >= row['capsule_ms'] and row['same_first_token']
        assert row['transformers_ms'] is None
    assert found['transformers'].startswith('not compared')


def test_ttft_and_decode_compare_with_transformers():
    pytest.importorskip('transformers')
    row = bench('ttft', '--prefix', '40', '--suffix', '8', '--repeats', '1')['rows'][0]
    assert row['transformers_ms'] > 0 and row['same_first_token_as_transformers']
    assert row['cold_over_transformers'] == pytest.approx(
        row['cold_ms'] / row['transformers_ms'], rel=0.01)
    found = bench('decode', '--position', '40', '--tokens', '6', '--repeats', '1')
    conditions_are_stated(found)
    row = found['rows'][0]
    assert row['position'] == 40 and row['same_tokens_as_transformers']
    assert row['ratio'] == pytest.approx(
        row['tokens_per_second'] / row['transformers_tokens_per_second'], rel=0.01)


def test_capsule_rows():
    found = bench('capsule', '--position', '100,200', '--repeats', '3')
    conditions_are_stated(found)
    small, large = found['rows']
    assert (small['position'], large['position']) == (100, 200)
    names = ('save', 'restore_full', 'restore_lineage', 'fork', 'rollback', 'memcpy')
    for row in (small, large):
        assert all(row[f'{name}_ms'] > 0 and row[f'{name}_p99_ms'] > 0 for name in names)
        assert row['full_over_memcpy'] == pytest.approx(
            row['restore_full_ms'] / row['memcpy_ms'], rel=0.01)
        assert row['bytes_copied']['restore_full'] == row['bytes_copied']['save'] == row['bytes']
        assert row['bytes_copied']['replayed'] == 0 == row['bytes_copied']['fork']
    # What a family shares is not copied, however long it is.
    assert large['bytes_copied']['restore_lineage'] < large['bytes']
    assert large['bytes_copied']['rollback'] == small['bytes_copied']['rollback']


def test_a_table_for_people_fits_its_columns():
    process = subprocess.run(
        [sys.executable, '-m', 'flashrt_ros.cli.main', 'bench', 'capsule', '--model',
         'random:tiny', '--position', '100', '--repeats', '2', '--pool-mib', '32'],
        capture_output=True, text=True, timeout=100, check=True)
    assert 'memcpy' in process.stdout
    assert max(map(len, process.stdout.splitlines())) <= 100


def test_statistics_are_the_plain_ones():
    samples = Samples()
    for value in range(1, 201):
        samples.add(value / 1e3)
    assert samples.median == pytest.approx(100.5)
    assert samples.p99 == pytest.approx(198.0)
    assert samples.document('x')['x_repeats'] == 200
    one = Samples()
    one.add(0.002)
    assert one.median == one.p99 == pytest.approx(2.0) and one.spread == 0.0
