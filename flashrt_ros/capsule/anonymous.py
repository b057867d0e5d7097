"""
Files without a name: where a parked session goes that has to leave memory.

A session is of one process, so its file must not be found by another node, nor outlive a crash. The
kernel sees to both: the file has no name (``O_TMPFILE``, or unlinked as soon as it is made), and is
gone when it is closed. Nothing is flushed, since nothing of it is needed after a power cut.
"""

from __future__ import annotations

import os
from pathlib import Path
import tempfile

from flashrt_ros.capsule import faults
from flashrt_ros.capsule.atomic import storage_error


class Anonymous:
    """
    A file without a name in a directory, private to this process.

    :raises Storage: the directory does not take it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.size = directory, 0
        try:
            faults.point('anonymous.create')
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)
        except OSError as error:
            raise storage_error(error, 'Creating a file in', directory) from error
        self.fd = self._file.fileno()
        os.fchmod(self.fd, 0o600)

    def close(self) -> None:
        """Give the space back."""
        self._file.close()
