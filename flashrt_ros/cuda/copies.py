"""
Save and restore on the device: fixed block and rows in one launch on the current stream.

The table of pages travels as a kernel parameter, so nothing is allocated, nothing has to outlive
the call, and the host does not wait. ``PAGES`` pages go into a launch; longer boundaries take more.
"""

from __future__ import annotations

from collections.abc import Sequence
import ctypes

import numpy as np
import torch

from flashrt_ros.arena import Arena
from flashrt_ros.capsule.pool import PAGE, Pool
from flashrt_ros.cuda.driver import Launch, Toolbox
from flashrt_ros.errors import Internal

PAGES, PLANES = 960, 4  # as in copy.cu; the table stays within 4 KiB of kernel parameters


class _Plane(ctypes.Structure):
    _fields_ = [('live', ctypes.c_void_p), ('pool', ctypes.c_void_p),
                ('live_pitch', ctypes.c_int64), ('pool_pitch', ctypes.c_int64),
                ('fields', ctypes.c_int), ('row_bytes', ctypes.c_int)]


class _Table(ctypes.Structure):
    _fields_ = [('planes', _Plane * PLANES), ('fixed_to', ctypes.c_void_p),
                ('fixed_from', ctypes.c_void_p), ('fixed_bytes', ctypes.c_int64),
                ('begin', ctypes.c_int64), ('end', ctypes.c_int64), ('first', ctypes.c_int64),
                ('plane_count', ctypes.c_int), ('restore', ctypes.c_int),
                ('pages', ctypes.c_int * PAGES)]


class Mover:
    """Moves boundaries between an arena and its pool; see ``capsule/lineage.py`` for the rule."""

    def __init__(self, arena: Arena, pool: Pool) -> None:
        if len(arena.rows.planes) > PLANES:
            raise Internal(f'rows of {len(arena.rows.planes)} sizes are more than the copy '
                           f'kernel takes ({PLANES})')
        self._table = table = _Table(plane_count=len(arena.rows.planes))
        for plane, live, kept in zip(table.planes, arena.rows.planes, pool.rows.planes,
                                     strict=False):
            if live.shape[2] % 4:
                raise Internal(f'rows of {live.shape[2]} bytes are no multiple of 4')
            plane.live, plane.pool = live.data_ptr(), kept.data_ptr()
            plane.live_pitch, plane.pool_pitch = live.stride(0), kept.stride(0)
            plane.fields, plane.row_bytes = live.shape[0], live.shape[2]
        self._pages = np.ctypeslib.as_array(table.pages)
        self._kept = arena, pool  # whose addresses these are
        self._row_bytes = arena.manifest.row_bytes
        self._live, self._fixed_bytes = arena.fixed.data_ptr(), arena.fixed.numel()
        self._blocks, self._pitch = pool.blocks.data_ptr(), pool.blocks.stride(0)
        tools = Toolbox(arena.device, torch.bfloat16)
        grid = (tools.multiprocessors * 4,)
        self._launch = Launch(tools.kernel('copy.cu', 'move_boundary'), grid, 512, (table,),
                              chained=False)
        # A launch without the table takes less: usually there are no rows to move.
        self._to, self._from = ctypes.c_void_p(), ctypes.c_void_p()
        self._launch_fixed = Launch(
            tools.kernel('copy.cu', 'move_fixed'), grid, 512,
            (self._to, self._from, ctypes.c_int64(self._fixed_bytes)), chained=False)
        tools.finish()

    def move(self, block: int, pages: Sequence[int] | np.ndarray, first: int, begin: int, end: int,
             restore: bool) -> int:
        """
        Queue the copy of a pool block and of rows ``[begin, end)``; return the bytes.

        :param pages: pool pages of rows from ``first * PAGE`` on.
        :param restore: from the pool to the live state, else the other way.
        """
        live, kept = self._live, self._blocks + block * self._pitch
        if begin >= end:
            self._to.value, self._from.value = (live, kept) if restore else (kept, live)
            self._launch_fixed()
            return self._fixed_bytes
        table = self._table
        copied = self._fixed_bytes + (end - begin) * self._row_bytes
        table.fixed_to, table.fixed_from = (live, kept) if restore else (kept, live)
        table.fixed_bytes = self._fixed_bytes
        table.restore = restore
        while True:
            stop = min(end, (begin // PAGE + PAGES) * PAGE)
            low, high = begin // PAGE, -(-stop // PAGE)
            table.begin, table.end, table.first = begin, stop, low
            self._pages[:high - low] = pages[low - first:high - first]
            self._launch()
            table.fixed_bytes, begin = 0, stop
            if begin >= end:
                break
        return copied
