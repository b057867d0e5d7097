"""
Publish a file all or nothing: hidden temporary, fsync, rename, fsync of the directory.

A temporary is locked (``flock``) for as long as its writer lives, so that whoever sweeps can tell
a file in work from the debris of a killed process without trusting process ids, which mean
nothing across containers. Its name carries the boot id of the host: a lock held on another host
may be invisible here, hence foreign temporaries are swept by age alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
import ctypes
import errno
import fcntl
import os
from pathlib import Path
import re
import secrets
import stat
import time

from flashrt_ros.capsule import faults
from flashrt_ros.errors import Corrupt, FlashrtError, NameExists, Storage, UnknownCapsule

FOREIGN_AGE = 86400.0  # seconds after which another host's temporary counts as debris
_TEMPORARY = re.compile(r'\.flashrt-([0-9a-f]{8})-\d+-[0-9a-f]{16}\.tmp')
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_FSYNC = {errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS}
_ADVICE = {
    errno.ENOSPC: 'the disk is full; free space or choose another directory',
    errno.EDQUOT: 'the disk quota is used up; free space or choose another directory',
    errno.EFBIG: 'the file is larger than the limit of this process or file system; raise it',
    errno.EROFS: 'the file system is read-only; remount it or choose another directory',
    errno.EACCES: 'permission was denied; check owner and mode of the file and its directories',
    errno.EPERM: 'the operation is not permitted; check owner and attributes of the directory',
    errno.ENOENT: 'the directory does not exist; create it',
    errno.ENOTDIR: 'a part of the path is not a directory; choose another directory',
    errno.EISDIR: 'a directory stands where the file should be; move it away',
    errno.ELOOP: 'it is a symbolic link, which is never followed; put the file itself there',
    errno.EIO: 'the device reported an input/output error; check the disk',
    errno.EMFILE: 'this process has too many open files; close some or raise the limit',
}


def storage_error(error: OSError, doing: str, path: str | os.PathLike) -> Storage:
    """Turn an operating system error into a whole sentence that says what to do."""
    words = _ADVICE.get(error.errno or 0, os.strerror(error.errno) if error.errno else str(error))
    name = errno.errorcode.get(error.errno or 0, 'no errno')
    return Storage(f'{doing} {os.fspath(path)!r} failed: {words} ({name}).')


def _boot_id() -> str:
    try:
        text = Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii')
        return text.replace('-', '')[:8]
    except OSError:
        return '00000000'


def _create(directory: Path) -> tuple[int, Path]:
    """Create and lock a temporary of mode 0600; return its descriptor and path."""
    while True:
        path = directory / f'.flashrt-{_boot_id()}-{os.getpid()}-{secrets.token_hex(8)}.tmp'
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            os.fchmod(fd, 0o600)  # whatever the umask was
            # A sweeper may come between open and lock; then once more.
            if _lock(fd) and os.fstat(fd).st_nlink:
                return fd, path
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                path.unlink()
            raise
        os.close(fd)
        with suppress(OSError):
            path.unlink()


def _lock(fd: int) -> bool:
    """Take the writer's lock; False if somebody else holds it, True where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _rename_noreplace(source: Path, target: Path) -> None:
    """``renameat2(RENAME_NOREPLACE)``, for file systems without hard links (vfat)."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_fdcwd, noreplace = -100, 1
    try:
        call = libc.renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if call(at_fdcwd, os.fsencode(source), at_fdcwd, os.fsencode(target), noreplace):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _publish(temporary: Path, target: Path, overwrite: bool) -> None:
    """Give the finished temporary its name; of several writers without overwrite, one wins."""
    faults.point('atomic.publish')
    if overwrite:
        os.replace(temporary, target)
        return
    try:
        os.link(temporary, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_noreplace(temporary, target)
    else:
        with suppress(OSError):  # published already; a second name is swept later
            temporary.unlink()


def _sync_directory(directory: Path, target: Path) -> None:
    try:
        faults.point('atomic.fsync_directory')
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise Storage(f'The file {os.fspath(target)!r} is written and whole, but its directory '
                          f'could not be flushed ({error.strerror}): it may be missing after a '
                          'power cut; save again.') from error


def exists_error(path: Path) -> NameExists:
    """Return the refusal for a name that is taken."""
    return NameExists(f'The file {os.fspath(path)!r} exists already; drop it, choose another name '
                      'or ask for overwriting.')


@contextmanager
def atomic_file(path: str | os.PathLike, *, overwrite: bool) -> Iterator[int]:
    """
    Yield a descriptor to write; publish the file under ``path`` when the block ends well.

    Whatever is raised inside removes the temporary and leaves a former file under ``path`` whole.

    :raises NameExists: the name is taken and ``overwrite`` is false, also when another process
        took it in the meantime.
    :raises Storage: the file system refused; the message says what to do.
    """
    target = Path(path)
    directory = target.parent
    temporary: Path | None = None
    fd = -1
    try:
        if not overwrite and os.path.lexists(target):
            raise exists_error(target)
        faults.point('atomic.create')
        fd, temporary = _create(directory)
        yield fd
        faults.point('atomic.fsync')
        os.fsync(fd)
        _publish(temporary, target, overwrite)
        temporary = None
        _sync_directory(directory, target)
    except FileExistsError as error:
        raise exists_error(target) from error
    except FlashrtError:
        raise
    except OSError as error:
        raise storage_error(error, 'Writing', target) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        if fd >= 0:
            os.close(fd)  # last: gives up the lock


@contextmanager
def regular_file(path: str | os.PathLike | int) -> Iterator[tuple[int, int]]:
    """
    Yield descriptor and size in bytes of a regular file to read; no link is followed.

    :param path: or the descriptor of a file that is open, to be read from its beginning.

    :raises UnknownCapsule: there is no such file. :raises Corrupt: it is no regular file.
    :raises Storage: for any other OSError, also those raised inside the block.
    """
    shown = f'/proc/self/fd/{path}' if isinstance(path, int) else os.fspath(path)
    fd = -1
    try:
        faults.point('atomic.open')
        if isinstance(path, int):
            fd = os.dup(path)
            os.lseek(fd, 0, os.SEEK_SET)
        else:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            kind = 'a directory' if stat.S_ISDIR(info.st_mode) else 'no regular file'
            raise Corrupt(f'The path {shown!r} is {kind}, hence no capsule; move it '
                          'away.')
        yield fd, info.st_size
    except FileNotFoundError as error:
        raise UnknownCapsule(f'There is no capsule file {shown!r}; list the capsules '
                             'to see which there are.') from error
    except ValueError as error:
        if fd >= 0:
            raise
        raise UnknownCapsule(f'The path {ascii(shown)} can be no file name.') from error
    except OSError as error:
        raise storage_error(error, 'Reading', shown) from error
    finally:
        if fd >= 0:
            os.close(fd)


def is_temporary(name: str) -> bool:
    """Tell whether a directory entry is a temporary of :func:`atomic_file`."""
    return _TEMPORARY.fullmatch(name) is not None


def sweep(directory: str | os.PathLike[str]) -> int:
    """
    Remove the temporaries of dead writers from ``directory``; return how many.

    Never raises: what cannot be removed stays and is ignored by every listing.
    """
    removed = 0
    try:
        with os.scandir(os.fspath(directory)) as entries:
            names = [e.name for e in entries if is_temporary(e.name)]
    except OSError:
        return 0
    for name in names:
        foreign = _TEMPORARY.fullmatch(name)[1] != _boot_id()  # type: ignore[index]
        path = Path(directory) / name
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if foreign and time.time() - os.fstat(fd).st_mtime < FOREIGN_AGE:
                    continue
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
            finally:
                os.close(fd)
    return removed
