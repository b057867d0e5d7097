"""
The checks of `flashrt-ros verify`, in the order in which they run.

Each takes an engine and sizes and returns a :class:`~flashrt_ros.cli.checks.base.Check`; none
relies on what another left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import time
import traceback
from typing import TYPE_CHECKING

from flashrt_ros.cli.checks.ablation import (
    ablation_kv_only,
    ablation_no_boundary,
    ablation_no_conv,
    ablation_no_recurrent,
)
from flashrt_ros.cli.checks.base import Check, InjectedError, not_applicable, Sizes
from flashrt_ros.cli.checks.closed import closed_manifest, dead_rows
from flashrt_ros.cli.checks.device import (
    capture_side_effect_free,
    graph_equals_eager,
    stable_addresses,
    stream_ordered_save,
)
from flashrt_ros.cli.checks.ends import abort_untouched, failed_restore_untouched
from flashrt_ros.cli.checks.exact import byte_exact, cold_exact_aligned, sampled_exact, token_exact
from flashrt_ros.cli.checks.families import fork_divergent, immutable, lineage, rollback
from flashrt_ros.cli.checks.process import new_process_restore
from flashrt_ros.cli.checks.program import non_lm_program
from flashrt_ros.cli.checks.steady import steady_memory

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine

__all__ = ['ALL', 'CHECKS', 'CUDA_CHECKS', 'Check', 'InjectedError', 'Sizes', 'names_for', 'run',
           'run_one']

CHECKS: dict[str, Callable[[Engine, Sizes], Check]] = {check.__name__: check for check in (
    byte_exact, token_exact, sampled_exact, cold_exact_aligned, closed_manifest, dead_rows,
    immutable, fork_divergent, rollback, lineage, new_process_restore, failed_restore_untouched,
    abort_untouched, ablation_kv_only, ablation_no_recurrent, ablation_no_conv,
    ablation_no_boundary, steady_memory, non_lm_program)}

#: of the device alone: graphs, addresses, the stream
CUDA_CHECKS: dict[str, Callable[[Engine, Sizes], Check]] = {check.__name__: check for check in (
    graph_equals_eager, capture_side_effect_free, stable_addresses, stream_ordered_save)}
ALL = {**CHECKS, **CUDA_CHECKS}


def names_for(device: str) -> list[str]:
    """Return the checks that run on a kind of device when none is named."""
    return list(ALL if device == 'cuda' else CHECKS)


def run_one(name: str, engine: Engine, sizes: Sizes) -> Check:
    """Run one check on an emptied engine; an exception in it is a failure that says which."""
    begun = time.monotonic()
    if name in CUDA_CHECKS and engine.arena.device.type != 'cuda':
        return not_applicable(name, 'on a CPU there are no graphs, no stream, and no addresses '
                              'that are baked in.')
    try:
        for info in engine.list():
            engine.drop(info.name or info.id)
        for session in engine.sessions():
            if session.name != 'default':
                engine.close_session(session.name)
        engine.reset()
        check = ALL[name](engine, sizes)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        check = Check(name, False, None, '', f'{type(error).__name__} in {where.name}: {error}')
    check.seconds = round(time.monotonic() - begun, 3)
    return check


def run(engine: Engine, sizes: Sizes, names: list[str]) -> Iterator[Check]:
    """Run checks one after another."""
    for name in names:
        yield run_one(name, engine, sizes)
