"""The benchmark of the tiers runs and says what it must; its figures are no test."""

import json

import pytest

from flashrt_ros.cli.main import main


@pytest.mark.parametrize('position', [70])
def test_every_tier_stands_beside_its_raw_medium(capfd, position, tmp_path):
    assert main(['bench', 'store', '--model', 'random:tiny', '--threads', '1', '--position',
                 str(position), '--repeats', '1', '--pool-mib', '4', '--directory', str(tmp_path),
                 '--json']) == 0
    (row,) = json.loads(capfd.readouterr().out)['rows']
    for name in ('save_device', 'restore_device', 'down_host', 'restore_host', 'down_disk',
                 'restore_disk', 'restore_disk_cold'):
        assert row[f'{name}_ms'] > 0
        assert row[f'{name}_over_raw'] > 0
    for name in ('memcpy', 'host_copy', 'plain_write', 'plain_read', 'plain_read_cold'):
        assert row[f'{name}_ms'] > 0
    assert list(tmp_path.iterdir()) == []
