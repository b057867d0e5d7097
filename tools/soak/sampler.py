"""Samples the node from outside: its process, its pool, its diagnostics."""

from __future__ import annotations

import statistics
import time
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
import psutil

_WARM = 0.25   # share of the run after which memory should stay level


class Sampler:
    """
    One row a second.

    :param node: of this process, spun by somebody else.
    :param pid: of the process that is watched.
    """

    def __init__(self, node: Any, pid: int) -> None:
        self.process = psutil.Process(pid)
        self.rows: list[dict[str, float]] = []
        self.begun = time.monotonic()
        self.values: dict[str, dict[str, str]] = {}
        self.alarms: dict[str, int] = {}
        node.create_subscription(DiagnosticArray, '/diagnostics', self._take, 10)

    def _take(self, message: DiagnosticArray) -> None:
        for status in message.status:
            kind = status.name.rpartition(': ')[2]
            self.values[kind] = {pair.key: pair.value for pair in status.values}
            if status.level >= DiagnosticStatus.ERROR:
                words = f'{kind}: {status.message}'
                self.alarms[words] = self.alarms.get(words, 0) + 1

    def sample(self) -> None:
        with self.process.oneshot():
            row = {'at': round(time.monotonic() - self.begun, 1),
                   'resident': self.process.memory_info().rss,
                   'threads': self.process.num_threads(), 'files': self.process.num_fds()}
        for kind, key, name in (('memory', 'pool_used_bytes', 'pool_used'),
                                ('requests', 'open goals', 'open_goals'),
                                ('requests', 'stream overruns', 'overruns')):
            value = self.values.get(kind, {}).get(key)
            if value is not None:
                row[name] = int(value)
        self.rows.append(row)

    def document(self) -> dict[str, Any]:
        """Return the figures of the whole run; bytes, seconds, counts."""
        rows = self.rows
        late = [row for row in rows if row['at'] >= _WARM * rows[-1]['at']]
        third = max(1, len(late) // 3)
        first = statistics.median(row['resident'] for row in late[:third])
        last = statistics.median(row['resident'] for row in late[-third:])
        hours = max(1e-9, (late[-1]['at'] - late[0]['at']) * 2 / 3 / 3600)
        pool = [row['pool_used'] for row in rows if 'pool_used' in row]
        every = max(1, len(rows) // 60)
        return {
            'samples': len(rows), 'resident_begin': rows[0]['resident'],
            'resident_end': rows[-1]['resident'],
            'resident_peak': max(row['resident'] for row in rows),
            'growth_after_warm_up': int(last - first),
            'growth_bytes_an_hour': int((last - first) / hours),
            'threads_begin': rows[0]['threads'], 'threads_end': rows[-1]['threads'],
            'files_begin': rows[0]['files'], 'files_end': rows[-1]['files'],
            'pool_begin': pool[0] if pool else 0, 'pool_end': pool[-1] if pool else 0,
            'pool_peak': max(pool, default=0),
            'stream_overruns': int(rows[-1].get('overruns', 0)),
            'diagnostics_errors': self.alarms, 'curve': rows[::every]}
