"""
Capsules at any URL that fsspec opens, and copies of capsule files between machines.

A file travels whole: written, checked and read as a local one in a spool directory, moved under
its name at the other end only when all of it is there. ``file://`` and plain paths stay local
directories, which are faster and safer (locks, links, fsync).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
import os
from pathlib import Path
import re
import secrets
import tempfile
import threading
from typing import Any

import torch

from flashrt_ros.arena import Manifest
from flashrt_ros.capsule import codec, faults
from flashrt_ros.capsule.anonymous import Anonymous
from flashrt_ros.capsule.atomic import atomic_file, storage_error
from flashrt_ros.capsule.codec import Header, Image
from flashrt_ros.capsule.fingerprint import Fingerprint
from flashrt_ros.capsule.names import check_name, is_name, SUFFIX
from flashrt_ros.capsule.tiers import DiskTier, Tier
from flashrt_ros.capsule.wire import decode
from flashrt_ros.errors import Capacity, Corrupt, FlashrtError, NameExists, Storage, UnknownCapsule

_URL = re.compile(r'[A-Za-z][A-Za-z0-9+.-]*(::|://)')
_HEAD = 256 << 10  # bytes fetched for a header at first; larger ones take a second turn
_PART = '.part-'  # marks an upload in work; such files are never listed


def is_url(place: str) -> bool:
    """Tell a URL from a path."""
    return _URL.match(place) is not None


def open_tier(place: str | os.PathLike, budget_bytes: int = 0) -> Tier:
    """
    Open a directory or URL as a tier.

    :raises Storage: no file system is known for the URL, or its package is missing.
    """
    text = os.fspath(place)
    if text.startswith('file://'):
        text = text.removeprefix('file://')
    return UrlTier(text, budget_bytes) if is_url(text) else DiskTier(text, budget_bytes)


@contextmanager
def _typed(doing: str, what: str) -> Iterator[None]:
    """Turn whatever a file system raises into our errors."""
    try:
        yield
    except FlashrtError:
        raise
    except FileNotFoundError as error:
        raise UnknownCapsule(f'{doing} {what!r} failed: it does not exist; list the capsules to '
                             'see which there are.') from error
    except OSError as error:
        raise storage_error(error, doing, what) from error
    except Exception as error:  # each file system has errors of its own
        raise Storage(f'{doing} {what!r} failed ({type(error).__name__}: {error}); check the URL '
                      'and its credentials.') from error


class UrlTier:
    """
    Capsules ``<name>.capsule`` under a URL; the methods are those of :class:`DiskTier`.

    :param budget_bytes: sum of file sizes that :meth:`put` keeps within; 0 for no limit.
    """

    parks = False  # a session is of this process: nothing of it travels

    def __init__(self, url: str, budget_bytes: int = 0) -> None:
        import fsspec
        self.url = url.rstrip('/')
        self.budget_bytes = budget_bytes
        with _typed('Opening', url):
            self._fs, root = fsspec.core.url_to_fs(self.url)
        self._root = root.rstrip('/')
        self._lock = threading.Lock()
        self._cache: dict[str, tuple[object, Header | FlashrtError]] = {}
        self._problems: list[tuple[Path, str]] = []

    def _path(self, name: str) -> str:
        return f'{self._root}/{check_name(name)}{SUFFIX}'

    def put(self, image: Image, manifest: Manifest, overwrite: bool = False) -> int:
        """Write ``image`` under its name; see :meth:`DiskTier.put`."""
        name = image.header.name
        size = codec.file_bytes(image, manifest)
        usage = self.usage()
        if self.budget_bytes and size + sum(
                s for n, s in usage.items() if n != name) > self.budget_bytes:
            raise Capacity(f'A capsule of {size} bytes does not fit in the budget of '
                           f'{self.budget_bytes} bytes; drop capsules or raise the budget.')
        if name in usage and not overwrite:
            raise NameExists(f'The capsule {self.url}/{name}{SUFFIX} exists already; drop it, '
                             'choose another name or ask for overwriting.')
        with _spool() as file:
            codec.write(image, file, manifest, overwrite=True)
            self.send(file, name)
        return size

    def anonymous(self) -> Anonymous:
        """Refuse: see :attr:`parks`."""
        raise Capacity(f'a parked session cannot go to {self.url}; configure a local directory.')

    def hold(self, name: str) -> None:
        """Do nothing: a URL has no locks, so other nodes do not learn of pins."""

    def let_go(self, name: str = '') -> None:
        """Do nothing; see :meth:`hold`."""

    def held(self, name: str) -> bool:
        """Return False; see :meth:`hold`."""
        return False

    def send(self, file: Path, name: str) -> None:
        """Copy a local capsule file to its name here; it appears whole or not at all."""
        target = self._path(name)
        part = f'{self._root}/{_PART}{secrets.token_hex(8)}'
        with _typed('Writing', target):
            try:
                self._fs.makedirs(self._root, exist_ok=True)
                faults.point('remote.upload')
                self._fs.put_file(os.fspath(file), part)
                faults.point('remote.publish')
                self._fs.mv(part, target)
            except BaseException:
                with suppress(Exception):
                    self._fs.rm_file(part)
                raise

    def get(self, name_or_id: str, manifest: Manifest, fingerprint: Fingerprint | None = None, *,
            capacity: int | None = None,
            allocate: Callable[[int], torch.Tensor] | None = None,
            into: Callable[[Header], codec.Pieces] | None = None,
            ready: Callable[[str, list[torch.Tensor]], None] | None = None) -> Image:
        """Read and check a capsule; see :meth:`DiskTier.get`."""
        name = self.find(name_or_id)
        with _spool() as file:
            self.receive(name, file)
            image = codec.read(file, manifest, fingerprint, capacity=capacity,
                               allocate=allocate, into=into, ready=ready)
            image.header = replace(image.header, name=name)
            return image

    def receive(self, name: str, file: Path) -> None:
        """Copy a capsule to a local file, unchecked."""
        with _typed('Reading', self._path(name)):
            faults.point('remote.download')
            self._fs.get_file(self._path(name), os.fspath(file))

    def find(self, name_or_id: str) -> str:
        """Return the name of the capsule that has this name or id."""
        if is_name(name_or_id) and self.holds(name_or_id):
            return name_or_id
        for header, _ in self.headers():
            if header.id == name_or_id:
                return header.name
        raise UnknownCapsule(f'No capsule in {self.url!r} has the name or id '
                             f'{ascii(name_or_id)[:140]}; list the capsules to see which '
                             'there are.')

    def headers(self) -> list[tuple[Header, int]]:
        """List readable capsules with sizes; only the first bytes of each are fetched."""
        good, bad, fresh = [], [], {}
        for name, info in self._entries().items():
            key = tuple(str(info.get(k)) for k in ('size', 'mtime', 'LastModified', 'created',
                                                   'ETag', 'etag', 'updated'))
            known = self._cache.get(name)
            if known is None or known[0] != key:
                try:
                    known = (key, replace(self._header(name, info['size']), name=name))
                except UnknownCapsule:
                    continue
                except FlashrtError as error:
                    known = (key, error)
            fresh[name] = known
            if isinstance(known[1], FlashrtError):
                bad.append((Path(name + SUFFIX), str(known[1])))
            else:
                good.append((known[1], info['size']))
        with self._lock:
            self._cache, self._problems = fresh, bad
        return good

    def header(self, name: str) -> Header:
        """Return the header of what has this name now; only its first bytes are fetched."""
        with _typed('Reading', self._path(name)):
            self._fs.invalidate_cache()
            size = self._fs.info(self._path(name))['size']
        return self._header(name, size)

    def _header(self, name: str, size: int) -> Header:
        path = self._path(name)
        with _typed('Reading', path):
            head = self._fs.cat_file(path, 0, min(size, _HEAD))
            length = 8 + int.from_bytes(head[:8], 'little')
            if len(head) < length <= size and length <= 16 << 20:
                head = self._fs.cat_file(path, 0, length)
            with tempfile.TemporaryFile() as file:
                file.write(head)
                file.seek(0)
                file.flush()
                return decode(file.fileno(), size)[0]

    def problems(self) -> list[tuple[Path, str]]:
        """Return what the last :meth:`headers` could not list, with the reasons."""
        with self._lock:
            return list(self._problems)

    def remove(self, name: str) -> int:
        """Delete a capsule; return its size in bytes."""
        with _typed('Removing', self._path(name)):
            faults.point('tier.remove')
            size = self._fs.info(self._path(name))['size']
            self._fs.rm_file(self._path(name))
            return size

    def _entries(self) -> dict[str, dict[str, Any]]:
        with _typed('Listing', self.url):
            try:
                self._fs.invalidate_cache()
                found = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return {}
        entries = {info['name'].rstrip('/').rpartition('/')[2]: info for info in found
                   if info.get('type') != 'directory'}
        return {name.removesuffix(SUFFIX): entries[name] for name in sorted(entries)
                if name.endswith(SUFFIX) and is_name(name.removesuffix(SUFFIX))}

    def usage(self) -> dict[str, int]:
        """Return the sizes in bytes by name."""
        return {name: info['size'] for name, info in self._entries().items()}

    def stamp(self) -> object:
        """Return None: asking costs as much as listing, so only a look-up by name lists again."""
        return None

    def holds(self, name: str) -> bool:
        """Tell whether something has this name."""
        with _typed('Reading', self._path(name)):
            return bool(self._fs.exists(self._path(name)))


@contextmanager
def _spool() -> Iterator[Path]:
    """Yield the path of a private file that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix='flashrt-') as directory:
        yield Path(directory) / f'spool{SUFFIX}'


def export_file(tier: DiskTier, name: str, url: str, *, overwrite: bool = False) -> str:
    """
    Copy a capsule of a directory, checked, to a directory or URL; return where it is.

    :param url: ends in ``.capsule`` for a file, else it is a directory.
    :raises UnknownCapsule, Corrupt, NameExists, Storage: nothing has appeared then.
    """
    name = tier.find(name)
    codec.verify(tier.path(name))
    place, target = _split(url, name)
    other = open_tier(place)
    if other.holds(target) and not overwrite:
        raise NameExists(f'{place}/{target}{SUFFIX} exists already; ask for overwriting.')
    if isinstance(other, UrlTier):
        other.send(tier.path(name), target)
    else:
        assert isinstance(other, DiskTier)
        _copy(tier.path(name), other, target, overwrite)
    return f'{place}/{target}{SUFFIX}'


def import_file(tier: DiskTier, url: str, *, name: str = '', overwrite: bool = False) -> Header:
    """
    Fetch a capsule file into a directory, checked before it gets its name; return its header.

    :param name: another name than that of the file.
    :raises UnknownCapsule, Corrupt, NameExists, Storage: nothing has appeared then.
    """
    if not url.rstrip('/').endswith(SUFFIX):
        local = url.removeprefix('file://')
        if not is_url(local) and os.path.exists(local) and not os.path.isdir(local):
            raise Corrupt(f'{url!r} is no capsule file: those end in {SUFFIX}. Name one, such as '
                          '`flashrt-ros capsule export` writes.')
        raise UnknownCapsule(f'{url!r} does not end in {SUFFIX}, as capsule files do; name the '
                             'file, not the directory that it is in.')
    place, found = _split(url, '')
    name = check_name(name or found)
    other = open_tier(place)
    with _spool() as file:
        if isinstance(other, UrlTier):
            other.receive(found, file)
        else:
            assert isinstance(other, DiskTier)
            file = other.path(found)
        try:
            header = codec.verify(file)
        except Corrupt as error:
            raise Corrupt(f'{url!r} cannot be imported, and nothing was. {error}') from error
        _copy(file, tier, name, overwrite)
    return replace(header, name=name)


def _split(url: str, name: str) -> tuple[str, str]:
    """Return directory and capsule name that a URL or path means."""
    head, slash, last = url.rstrip('/').rpartition('/')
    if last.endswith(SUFFIX):
        return head if slash else '.', check_name(last.removesuffix(SUFFIX))
    return url.rstrip('/'), name


def _copy(source: Path, tier: DiskTier, name: str, overwrite: bool) -> None:
    target = tier.path(name)
    try:
        tier.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(error, 'Creating the capsule directory', tier.directory) from error
    with atomic_file(target, overwrite=overwrite) as fd, open(source, 'rb') as file:
        while block := file.read(4 << 20):
            view = memoryview(block)
            while view:
                view = view[os.write(fd, view):]
