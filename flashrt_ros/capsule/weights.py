"""
The digest of a model's weights, and its cache.

Hashing gigabytes at every start would cost seconds, hence the digest of the files is kept in a
small JSON file, keyed by what the file system knows of a file's content (path, size, times,
inode, device), never by a name alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
import json
import os
from pathlib import Path
import time
from typing import Any, Protocol

from blake3 import blake3
import torch

from flashrt_ros.capsule.atomic import atomic_file
from flashrt_ros.errors import FlashrtError, Storage
from flashrt_ros.user_cache import user_cache

CACHE_NAME = '.flashrt-weights.json'
CACHE_FROM = 64 << 20  # bytes of files from which a cache is worth its file
CACHE_ENTRIES = 256
_MAX_CACHE = 1 << 20  # bytes
_SETTLED = 2.0  # seconds a file must be old: younger ones may change within one clock tick
_SAMPLE = 64 << 10  # bytes hashed of a seeded tensor


class ModelLike(Protocol):
    """What a fingerprint needs of a model."""

    dtype: torch.dtype

    @property
    def spec(self) -> str:
        """Name it was loaded by."""

    @property
    def weight_files(self) -> Sequence[Path]:
        """Files the weights came from; none for random ones."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over named weights."""

    def architecture(self) -> dict[str, Any]:
        """Return the configuration that settles the arithmetic."""


def weights_digest(model: ModelLike) -> str:
    """
    Return ``files:``, ``seeded:`` or ``tensors:`` with a blake3 of the weights' content.

    * files: of the contents in the order of their names, whatever the names are;
    * ``random:`` specs: of the spec, every name, dtype and shape, and a sample of each tensor,
      which guards against another random generator, not against tampering;
    * otherwise: of all tensors.

    :raises Storage: a weight file cannot be read.
    """
    if model.weight_files:
        return 'files:' + files_digest(model.weight_files)
    seeded = model.spec.startswith('random:')
    digest = blake3(max_threads=1 if seeded else blake3.AUTO)
    digest.update(model.spec.encode() if seeded else b'')
    for name, tensor in model.weights():
        digest.update(f'\n{name} {tensor.dtype} {list(tensor.shape)}\n'.encode())
        flat = tensor.detach().reshape(-1)
        if seeded:
            step = max(1, flat.nbytes // _SAMPLE)
            flat = flat[::step]
        data = flat.contiguous().cpu().view(torch.uint8).numpy().data
        digest.update(data)
    return ('seeded:' if seeded else 'tensors:') + digest.hexdigest()


def files_digest(files: Iterable[Path], cache_dir: Path | None = None) -> str:
    """
    Return the blake3 of the contents of ``files``, from the cache where nothing changed.

    :param cache_dir: a directory for the cache instead of the default ones (beside the first
        file, else the user's cache directory).
    """
    paths = sorted((Path(f) for f in files), key=lambda p: p.name)
    try:
        keys = [_key(p) for p in paths]
        worth = cache_dir is not None or sum(k[1] for k in keys) >= CACHE_FROM
        places = [cache_dir] if cache_dir else [paths[0].absolute().parent]
        if cache_dir is None and (home := user_cache()) is not None:
            places.append(home)
        known: dict[str, str] = {}
        for place in places if worth else ():
            known.update(_load(place / CACHE_NAME))
        digests = []
        fresh: dict[str, str] = {}
        for path, key in zip(paths, keys, strict=True):
            name = json.dumps(key)
            if name not in known:
                known[name] = _hash_file(path)
                settled = time.time() - max(key[2], key[3]) / 1e9 > _SETTLED
                if settled and _key(path) == key:
                    fresh[name] = known[name]
            digests.append(known[name])
    except OSError as error:
        raise Storage(f'A weight file cannot be read: {error}; check the model directory.'
                      ) from error
    if worth and fresh:
        _keep(places, fresh)
    return blake3('\n'.join(digests).encode()).hexdigest()


def _key(path: Path) -> tuple[str, int, int, int, int, int]:
    info = os.stat(path)
    return (str(path.absolute()), info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino,
            info.st_dev)


def _hash_file(path: Path) -> str:
    digest = blake3(max_threads=blake3.AUTO)
    digest.update_mmap(path)
    return digest.hexdigest()


def _load(path: Path) -> dict[str, str]:
    """Read a cache; anything odd about it makes it empty."""
    try:
        with open(path, 'rb') as file:
            raw = file.read(_MAX_CACHE + 1)
        data = json.loads(raw) if len(raw) <= _MAX_CACHE else None
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(data, dict) or data.get('version') != 1:
        return {}
    entries = data.get('digests')
    if not isinstance(entries, dict) or data.get('blake3') != _seal(entries):
        return {}
    return entries


def _seal(entries: dict) -> str:
    return blake3(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _keep(places: list[Path], fresh: dict[str, str]) -> None:
    """Add to the first cache that can be written; a cache that cannot be kept is no fault."""
    for place in places:
        with suppress(FlashrtError, OSError):
            if place == user_cache():
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = place / CACHE_NAME
            entries = {**_load(path), **fresh}
            entries = dict(list(entries.items())[-CACHE_ENTRIES:])
            content = json.dumps({'version': 1, 'blake3': _seal(entries), 'digests': entries})
            with atomic_file(path, overwrite=True) as fd:
                with open(fd, 'w', encoding='ascii', closefd=False) as file:
                    file.write(content)
            return
