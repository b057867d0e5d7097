"""Saving and restoring through each tier, beside what the medium itself does with as many bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch

from flashrt_ros.cli import output
from flashrt_ros.cli.benchmarks.timing import random_ids, Samples

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine

WARM = 2  # rounds that are not counted
BLOCK = 4 << 20  # bytes read or written at a time by the plain file


def row(engine: Engine, directory: Path, position: int, repeats: int,
        seed: int) -> dict[str, Any]:
    """
    Measure one position; every way once a round, each next to its raw medium.

    *save* and *restore* move all rows (the arena says that row 0 was written). *down* and *up* are
    what a capsule needs to leave the device and to come back; restores include the copy into the
    arena. Files are read from the page cache, and once more after it was told to forget them.
    """
    engine.reset()
    output.log(f'position {position}: prefill')
    engine.append(token_ids=random_ids(engine.model.config.vocab_size, position, seed))
    size = engine.save(name='base', overwrite=True).info.bytes
    plain = _Plain(directory / 'plain.bin', size, engine.arena.device)
    names = ('save_device', 'restore_device', 'memcpy', 'down_host', 'restore_host', 'host_copy',
             'down_disk', 'restore_disk', 'restore_disk_cold', 'plain_write', 'plain_read',
             'plain_read_cold')
    samples = {name: Samples() for name in names}
    for index in range(repeats + WARM):
        def measure(name: str, work: Any, counted: bool = index >= WARM) -> None:
            _waited(engine, _nothing)  # copies of what went before may be under way
            (samples[name] if counted else Samples()).time(lambda: _waited(engine, work))
        measure('save_device', lambda: _full(engine).save(name='other', overwrite=True))
        measure('memcpy', plain.copy)
        measure('restore_device', lambda: _full(engine).restore(capsule='other'))
        measure('memcpy', plain.copy)
        engine.drop('other')
        _lone(engine, 'base')
        if engine.store.host is not None:
            measure('down_host', lambda: engine.demote('base'))
            measure('host_copy', plain.down)
            _scramble(engine)
            measure('restore_host', lambda: engine.restore(capsule='base'))
            measure('host_copy', plain.up)
            _lone(engine, 'base')
        _to_disk(engine, 'base', lambda: measure('plain_write', plain.write), measure)
        path = directory / 'base.capsule'
        for suffix in ('', '_cold'):
            _scramble(engine)
            _prepare(path, bool(suffix))
            measure(f'restore_disk{suffix}', lambda: engine.restore(capsule='base'))
            _prepare(plain.path, bool(suffix))
            measure(f'plain_read{suffix}', plain.read)
            _lone(engine, 'base')
            _leave(engine, 'base')
        engine.restore(capsule='base')
    engine.drop('base')
    plain.path.unlink()
    return _document(position, size, samples)


def _waited(engine: Engine, work: Any) -> None:
    work()
    if engine.arena.device.type == 'cuda':
        torch.cuda.synchronize(engine.arena.device)


def _nothing() -> None:
    """Do nothing."""


def _full(engine: Engine) -> Engine:
    engine.arena.will_write(0)
    return engine


def _lone(engine: Engine, name: str) -> None:
    """Leave the capsule to itself, so that its going frees and its coming copies everything."""
    engine.reset()
    engine.lineage.forget()


def _scramble(engine: Engine) -> None:
    engine.arena.will_write(0)


def _leave(engine: Engine, name: str) -> None:
    """Leave memory for the file that is there."""
    while engine.info(name).tiers[0] != 'disk':
        engine.demote(name)


def _to_disk(engine: Engine, name: str, write: Any, measure: Any) -> None:
    """Write the file anew: once measured, next to the plain one."""
    capsule = engine.store.find(name)
    if engine.store.files is None:
        return
    engine.store.files.remove(capsule)
    frozen = engine.store.promote(capsule)
    files = engine.store.files
    measure('down_disk', lambda: files.write(capsule, engine.lineage.pool, frozen))
    write()
    _leave(engine, name)


def _prepare(path: Path, cold: bool) -> None:
    """Bring a file into the page cache, or ask the kernel to drop it (it may decline)."""
    if not cold:
        path.read_bytes()
        return
    with open(path, 'rb') as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class _Plain:
    """The raw media: a copy in memory, a copy to and from the host, a file."""

    def __init__(self, path: Path, size: int, device: torch.device) -> None:
        self.path = path
        self.source = torch.ones(size, dtype=torch.uint8, device=device)
        self.target = torch.zeros_like(self.source)
        self.host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == 'cuda')
        self.block = memoryview(bytearray(size))

    def copy(self) -> None:
        self.target.copy_(self.source)

    def down(self) -> None:
        self.host.copy_(self.source, non_blocking=True)

    def up(self) -> None:
        self.target.copy_(self.host, non_blocking=True)

    def write(self) -> None:
        """Write a new file and fsync it, as a save must."""
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            view = self.block
            while view:
                view = view[os.write(fd, view[:BLOCK]):]
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self) -> None:
        """Read the file into memory that was used before."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            view = self.block
            while view:
                count = os.readv(fd, [view[:BLOCK]])
                if not count:
                    break
                view = view[count:]
        finally:
            os.close(fd)


#: what is compared with which raw medium
RATIOS = {'save_device': 'memcpy', 'restore_device': 'memcpy', 'down_host': 'host_copy',
          'restore_host': 'host_copy', 'down_disk': 'plain_write', 'restore_disk': 'plain_read',
          'restore_disk_cold': 'plain_read_cold'}


def _document(position: int, size: int, samples: dict[str, Samples]) -> dict[str, Any]:
    document: dict[str, Any] = {'position': position, 'bytes': size}
    for name, values in samples.items():
        if values.seconds:
            document.update(values.document(name))
    for name, raw in RATIOS.items():
        if samples[name].seconds:
            document[f'{name}_over_raw'] = round(samples[name].median / samples[raw].median, 3)
    return document
