"""
Tiers below the pool: where frozen boundaries live as files.

:class:`Tier` is the seam that any other place (a remote URL, another host) fits into; today there
is the local directory and, in ``remote``, whatever fsspec opens. A tier refuses what is over its
budget; who leaves to make room is the store's decision (``files``), which knows pins and use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
import fcntl
import os
from pathlib import Path
import stat
import threading
import time
from typing import Protocol

import torch

from flashrt_ros.arena import Manifest
from flashrt_ros.capsule import codec, faults
from flashrt_ros.capsule.anonymous import Anonymous
from flashrt_ros.capsule.atomic import is_temporary, storage_error, sweep
from flashrt_ros.capsule.codec import Header, Image
from flashrt_ros.capsule.fingerprint import Fingerprint
from flashrt_ros.capsule.names import check_name, is_name, RULE, SUFFIX
from flashrt_ros.errors import Capacity, FlashrtError, Storage, UnknownCapsule

_SETTLED = 100_000_000  # ns a file must be old for its times to tell it from its successor
_TRIES = 100  # to lock a file, a millisecond apart


class Tier(Protocol):
    """What the store needs of a place for frozen boundaries."""

    budget_bytes: int
    parks: bool  # whether parked sessions may go there

    def anonymous(self) -> Anonymous:
        """Return a new file without a name, for a parked session."""

    def hold(self, name: str) -> None:
        """Let other nodes know that ``name`` is pinned here."""

    def let_go(self, name: str = '') -> None:
        """Undo :meth:`hold`, of all names if none is given."""

    def held(self, name: str) -> bool:
        """Tell whether another node holds ``name``."""

    def put(self, image: Image, manifest: Manifest, overwrite: bool = False) -> int:
        """Keep ``image`` under its name; return the bytes it takes."""

    def get(self, name_or_id: str, manifest: Manifest,
            fingerprint: Fingerprint | None = None, *, capacity: int | None = None,
            allocate: Callable[[int], torch.Tensor] | None = None,
            into: Callable[[Header], codec.Pieces] | None = None,
            ready: Callable[[str, list[torch.Tensor]], None] | None = None) -> Image:
        """Return a checked image; the rest as for :func:`codec.read`."""

    def headers(self) -> list[tuple[Header, int]]:
        """List what is there, with sizes in bytes."""

    def problems(self) -> list[tuple[Path, str]]:
        """Return what the last :meth:`headers` could not list, with the reasons."""

    def header(self, name: str) -> Header:
        """Return the header of what has this name now."""

    def remove(self, name: str) -> int:
        """Forget ``name``; return the bytes that became free."""

    def usage(self) -> dict[str, int]:
        """Bytes of each capsule there, by name, readable or not."""

    def stamp(self) -> object:
        """Return a value that is another one after the listing changed, None if unknown."""

    def holds(self, name: str) -> bool:
        """Tell whether something has this name, readable or not."""


class DiskTier:
    """
    Capsules as files ``<name>.capsule`` in one local directory.

    The name of a capsule is that of its file, so a file may be copied or renamed; several nodes
    may share one directory. All methods may be called from any thread.

    :param directory: created with mode 0700 when first needed.
    :param budget_bytes: sum of file sizes that :meth:`put` keeps within; 0 for no limit.
    """

    parks = True

    def __init__(self, directory: str | os.PathLike, budget_bytes: int = 0) -> None:
        try:
            self.directory = Path(directory).expanduser().absolute()
        except RuntimeError as error:
            raise Storage(f'{os.fspath(directory)!r} names the home of a user who has none; give '
                          'an absolute path for the capsule directory.') from error
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # admission and write are one step
        self._cache: dict[str, tuple[tuple[int, int, int], Header | FlashrtError]] = {}
        self._problems: list[tuple[Path, str]] = []
        self._holds: dict[str, int] = {}  # name -> descriptor with a shared lock
        sweep(self.directory)

    def path(self, name: str) -> Path:
        """
        Return the file of a capsule, which need not exist.

        :raises InvalidName: the name breaks the rule; a good one cannot leave the directory.
        """
        return self.directory / (check_name(name) + SUFFIX)

    def put(self, image: Image, manifest: Manifest, overwrite: bool = False) -> int:
        """
        Write ``image`` under ``image.header.name``; return the size of the file in bytes.

        :raises Capacity: over budget; refused before anything is written.
        :raises NameExists: the name is taken and ``overwrite`` is false.
        :raises Storage: the file system refused; nothing is left behind.
        """
        path = self.path(image.header.name)
        self._make_directory()
        sweep(self.directory)
        with self._writing:
            self._admit(codec.file_bytes(image, manifest), path)
            return codec.write(image, path, manifest, overwrite=overwrite)

    def anonymous(self) -> Anonymous:
        """
        Return a new file without a name, gone with this process at the latest.

        :raises Storage: the file system refused.
        """
        self._make_directory()
        return Anonymous(self.directory)

    def hold(self, name: str) -> None:
        """
        Keep a shared lock on a capsule's file: its pin, for other nodes to see.

        The kernel gives it up when this process ends, however it ends. Where the file system has
        no locks, nobody sees it.
        """
        self.let_go(name)
        with suppress(OSError):
            fd = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            self._holds[name] = fd
            for _ in range(_TRIES):
                with suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return
                time.sleep(0.001)  # another node looks, for a moment, whether it is held

    def let_go(self, name: str = '') -> None:
        """Give the lock on one file back, or on all."""
        for each in [name] if name else list(self._holds):
            fd = self._holds.pop(each, -1)
            if fd >= 0:
                with suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child has the descriptor too
                os.close(fd)

    def held(self, name: str) -> bool:
        """Tell whether another node has pinned a capsule."""
        if name in self._holds:
            return False
        try:
            fd = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(fd)

    def _make_directory(self) -> None:
        try:
            faults.point('tier.make_directory')
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self.directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise storage_error(error, 'Creating the capsule directory', self.directory) from error

    def _admit(self, size: int, path: Path) -> None:
        if not self.budget_bytes:
            return
        if size > self.budget_bytes:
            raise Capacity(f'A capsule of {size} bytes is larger than the whole disk budget of '
                           f'{self.budget_bytes} bytes; raise the budget.')
        used = sum(s for p, s in self._sizes().items() if p != path)
        if used + size > self.budget_bytes:
            raise Capacity(f'A capsule of {size} bytes does not fit: {used} of {self.budget_bytes} '
                           'bytes of the disk budget are used; drop capsules or raise the budget.')

    def _sizes(self) -> dict[Path, int]:
        return {self.directory / name: info.st_size for name, info in self._entries()
                if stat.S_ISREG(info.st_mode)}

    def usage(self) -> dict[str, int]:
        """Return the file sizes in bytes by capsule name, readable or not."""
        return {path.name.removesuffix(SUFFIX): size for path, size in self._sizes().items()}

    def stamp(self) -> object:
        """Which directory it is, and when files came or went last; one that is missing is new."""
        try:
            seen = os.stat(self.directory)
        except OSError:
            return object()
        return seen.st_dev, seen.st_ino, seen.st_mtime_ns

    def holds(self, name: str) -> bool:
        """Tell whether a file has this name."""
        return os.path.lexists(self.path(name))

    def _entries(self) -> list[tuple[str, os.stat_result]]:
        """List the files with our suffix, sorted by name; a missing directory is empty."""
        found = []
        try:
            faults.point('tier.list')
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    if entry.name.endswith(SUFFIX) and not is_temporary(entry.name):
                        try:
                            found.append((entry.name, entry.stat(follow_symlinks=False)))
                        except FileNotFoundError:  # dropped while listing
                            continue
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error(error, 'Listing the capsule directory', self.directory) from error
        return sorted(found, key=lambda item: item[0])

    def get(self, name_or_id: str, manifest: Manifest, fingerprint: Fingerprint | None = None, *,
            capacity: int | None = None,
            allocate: Callable[[int], torch.Tensor] | None = None,
            into: Callable[[Header], codec.Pieces] | None = None,
            ready: Callable[[str, list[torch.Tensor]], None] | None = None) -> Image:
        """
        Read and check a capsule by name or, where no file has that name, by id.

        :raises UnknownCapsule: there is none. Otherwise as :func:`codec.read`.
        """
        name = self.find(name_or_id)
        image = codec.read(self.path(name), manifest, fingerprint, capacity=capacity,
                           allocate=allocate, into=into, ready=ready)
        image.header = replace(image.header, name=name)
        return image

    def find(self, name_or_id: str) -> str:
        """
        Return the name of the capsule that has this name or id.

        :raises UnknownCapsule: there is none.
        """
        if is_name(name_or_id) and os.path.lexists(self.path(name_or_id)):
            return name_or_id
        for header, _ in self.headers():
            if header.id == name_or_id:
                return header.name
        raise UnknownCapsule(f'No capsule in {os.fspath(self.directory)!r} has the name or id '
                             f'{ascii(name_or_id)[:140]}; list the capsules to see which '
                             'there are.')

    def headers(self) -> list[tuple[Header, int]]:
        """
        List readable capsules with their file sizes, sorted by name.

        Headers are cached by modification time, size and inode. What cannot be read is left out
        and stands in :meth:`problems` afterwards.
        """
        good: list[tuple[Header, int]] = []
        bad: list[tuple[Path, str]] = []
        fresh: dict[str, tuple[tuple[int, int, int], Header | FlashrtError]] = {}
        for entry, info in self._entries():
            name, path = entry.removesuffix(SUFFIX), self.directory / entry
            if not is_name(name):
                bad.append((path, f'The file name is no capsule name: a name is {RULE}.'))
                continue
            key = (info.st_mtime_ns, info.st_size, info.st_ino)
            known = self._cache.get(entry)
            if known is None or known[0] != key or isinstance(known[1], Storage):
                result: Header | FlashrtError
                try:
                    result = replace(codec.read_header(path), name=name)
                except UnknownCapsule:
                    continue
                except FlashrtError as error:
                    result = error
                known = (key, result)
            if time.time_ns() - info.st_mtime_ns > _SETTLED:
                fresh[entry] = known
            if isinstance(known[1], FlashrtError):
                bad.append((path, str(known[1])))
            else:
                good.append((known[1], info.st_size))
        with self._lock:
            self._cache, self._problems = fresh, bad
        return good

    def header(self, name: str) -> Header:
        """
        Return the header of the file that has this name now.

        :raises UnknownCapsule, Corrupt, Incompatible, Storage: by what is wrong.
        """
        return codec.read_header(self.path(name))

    def problems(self) -> list[tuple[Path, str]]:
        """Return the files that the last :meth:`headers` could not list, with the reasons."""
        with self._lock:
            return list(self._problems)

    def remove(self, name: str) -> int:
        """
        Delete a capsule's file; return its size in bytes.

        :raises UnknownCapsule: there is no such file. :raises Storage: it cannot be deleted.
        """
        path = self.path(name)
        try:
            faults.point('tier.remove')
            size = os.lstat(path).st_size
            os.unlink(path)
            return size
        except FileNotFoundError as error:
            raise UnknownCapsule(f'No capsule is named {name!r} in '
                                 f'{os.fspath(self.directory)!r}.') from error
        except OSError as error:
            raise storage_error(error, 'Removing', path) from error
