"""Promise 1 across processes: a new Python loads the file and goes on with the same bytes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from flashrt_ros.cli.checks import state
from flashrt_ros.cli.checks.base import Check, Sizes

if TYPE_CHECKING:
    from flashrt_ros.engine import Engine

STEPS = 16


def new_process_restore(engine: Engine, sizes: Sizes) -> Check:
    """Save to a file, restore it in a new process, compare digests of state and logits."""
    import torch
    state.begin(engine, sizes, salt=22)
    engine.save(name='traveller', persist=True)
    engine.flush()
    want = account(engine)
    command = [sys.executable, '-m', 'flashrt_ros.cli.checks.process', '--model', sizes.model,
               '--dtype', sizes.dtype, '--device', engine.arena.device.type, '--context',
               str(sizes.context), '--directory', str(sizes.directory), '--capsule', 'traveller',
               '--threads', str(torch.get_num_threads())]
    child = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False,
                           env=child_environment(), cwd=sizes.directory)
    try:
        found = json.loads(child.stdout)
    except ValueError:
        return Check('new_process_restore', False, None, '', f'the new process ended with exit '
                     f'code {child.returncode} and said: {child.stderr.strip()[-400:]}')
    pid = found.pop('pid')
    different = [key for key in want if found.get(key) != want[key]]
    detail = (f'process {pid} restored {want["position"]} rows from a file and has '
              f'{"the same" if not different else "other"} live bytes, host part, tokens '
              f'and logits bytes over {STEPS} steps as process {os.getpid()} that saved them.')
    if different:
        detail += f' Different: {", ".join(different)}.'
    return Check('new_process_restore', not different and len(want['tokens']) == STEPS
                 and pid != os.getpid(), len(different), 'accounts that differ', detail)


def child_environment() -> dict[str, str]:
    """Return an environment in which a child process imports this very package."""
    import flashrt_ros
    root = os.path.dirname(os.path.dirname(os.path.abspath(flashrt_ros.__file__)))
    path = os.environ.get('PYTHONPATH', '')
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, [root, path]))}


def account(engine: Engine) -> dict:
    """Digest the live state, then run some steps and digest their logits."""
    position, live = engine.arena.position, state.digest(engine.arena.live_bytes())
    host = json.dumps(engine.session().host.to_json(), sort_keys=True)
    trace = state.steps(engine, STEPS)
    return {'position': position, 'live': live, 'host': host, 'tokens': trace.tokens,
            'end': trace.end,
            'logits': state.digest([logits.view(-1).contiguous() for logits in trace.logits])}


def main() -> int:
    """Be the new process: restore a capsule and print the account as JSON."""
    from flashrt_ros.cli import opening, output
    parser = argparse.ArgumentParser()
    for option in ('--model', '--dtype', '--device', '--directory', '--capsule'):
        parser.add_argument(option, required=True)
    for option in ('--context', '--threads'):
        parser.add_argument(option, type=int, required=True)
    wanted = parser.parse_args()
    with output.stdout_for_json(True):
        engine = opening.open_engine(
            wanted.model, dtype=wanted.dtype, device=wanted.device, context=wanted.context,
            directory=wanted.directory, threads=wanted.threads,
            pool_bytes=opening.pool_bytes(wanted.model, wanted.dtype, wanted.device,
                                          wanted.context, rows=wanted.context, blocks=8))
        engine.restore(capsule=wanted.capsule)
        output.emit({**account(engine), 'pid': os.getpid()})
        engine.close()
    return 0


if __name__ == '__main__':
    sys.exit(main())
