"""A user without a home, as containers have: everything loads but what needs the home, typed."""

from pathlib import Path
import pwd

from engine_cases import build
import pytest

from flashrt_ros.capsule.weights import CACHE_NAME, files_digest
from flashrt_ros.errors import Storage
from flashrt_ros.models.locate import locate


@pytest.fixture(autouse=True)
def homeless(monkeypatch, tmp_path):
    for name in ('HOME', 'XDG_CACHE_HOME', 'HF_HOME', 'HF_HUB_CACHE'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, 'getpwuid', {}.__getitem__)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError):
        Path.home()


def test_weights_are_hashed_without_a_cache_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr('flashrt_ros.capsule.weights.CACHE_FROM', 0)
    monkeypatch.setattr('flashrt_ros.capsule.weights._SETTLED', -1)
    file = tmp_path / 'model.safetensors'
    file.write_bytes(b'weights')
    assert files_digest([file]) == files_digest([file])
    assert sorted(path.name for path in tmp_path.iterdir()) == [CACHE_NAME, file.name]


def test_a_hub_id_is_refused_with_the_reason():
    with pytest.raises(Storage, match='cache'):
        locate('owner/name')


@pytest.mark.parametrize('directory', ['~/capsules', '~nobody-here/capsules'])
def test_a_capsule_directory_in_no_home(directory, tmp_path):
    with pytest.raises(Storage, match='absolute path'):
        build(directory=directory)
    assert not list(tmp_path.iterdir())
