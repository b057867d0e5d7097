"""
The node of `bench ros`, with a probe where its worker hands tokens over.

Besides the moments it notes what the thread that computes did with its time: computed, waited for
a core that others had, or waited for the interpreter that other threads of the node had. These
tell on a busy machine too what a clock cannot. On a CUDA device it notes how far apart the steps
end on the clock of the device, from an event behind each of them.
"""

from __future__ import annotations

import json
import resource
import threading
import time
from typing import Any


def node(wanted: Any) -> int:
    """Be the node, and write down when its worker handed over each token (steady clock, ns)."""
    from flashrt_ros.node import main, publishers
    notes: dict[int, list[tuple[int, int, int]]] = {}
    begun: dict[int, tuple[int, dict[str, int]]] = {}
    put_piece, put_end = publishers.Outbox.put_piece, publishers.Outbox.put_end
    steps = _mark_steps()

    def noted_piece(self: Any, goal: Any, piece: Any) -> None:
        now = time.monotonic_ns()
        if id(goal) not in notes:
            begun[id(goal)] = threading.get_ident(), _counters()
            del steps[:-1]  # this token's own
        notes.setdefault(id(goal), []).append((now, piece.index, len(piece.token_ids)))
        put_piece(self, goal, piece)

    def noted_end(self: Any, goal: Any, then: Any) -> None:
        thread, before = begun.pop(id(goal), (0, {}))
        spent = {}
        if thread == threading.get_ident():  # else somebody else ended it
            after = _counters()
            spent = {name: after[name] - before[name] for name in before if name in after}
        put_end(self, goal, then)
        pieces = notes.pop(id(goal), [])
        line = {'goal': bytes(goal.id.uuid).hex(), 'pieces': pieces, 'spent': spent,
                'steps': _apart(steps) if pieces else []}  # else they are another goal's
        with open(wanted.probe, 'a', encoding='ascii') as file:
            file.write(json.dumps(line) + '\n')

    publishers.Outbox.put_piece = noted_piece  # type: ignore[method-assign]
    publishers.Outbox.put_end = noted_end  # type: ignore[method-assign]
    return main.main()


def _mark_steps() -> list[Any]:
    """Let a CUDA plan put an event behind every step; return where they are collected."""
    import torch

    from flashrt_ros.cuda.mail import Mail
    marks: list[Any] = []
    expect = Mail.expect

    def marked(self: Any, launch: Any) -> None:
        expect(self, launch)
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        marks.append(mark)

    Mail.expect = marked  # type: ignore[method-assign]
    return marks


def _apart(marks: list[Any]) -> list[int]:
    """Return the nanoseconds between neighbouring events, once all have passed; forget them."""
    if not marks:
        return []
    marks[-1].synchronize()
    apart = [round(a.elapsed_time(b) * 1e6) for a, b in zip(marks, marks[1:])]
    marks.clear()
    return apart


def _counters() -> dict[str, int]:
    """Return clock, time on a core and time of waiting for one (ns), and how often it lost one."""
    try:
        with open('/proc/thread-self/schedstat', encoding='ascii') as file:
            computed, waited = map(int, file.read().split()[:2])
    except (OSError, ValueError):  # a kernel that does not count
        return {}
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return {'clock': time.monotonic_ns(), 'computed': computed, 'core': waited,
            'preempted': used.ru_nivcsw, 'gave_way': used.ru_nvcsw}


def worker(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return, for a token, what the thread that computes did; of whole goals."""
    counted = [line for line in lines if line.get('spent') and len(line['pieces']) > 1]
    tokens = sum(count for line in counted for _, _, count in line['pieces'][1:])
    if not tokens:
        return {}
    total = {name: sum(line['spent'][name] for line in counted) / tokens
             for name in counted[0]['spent']}
    return {'computes_ms': round(total['computed'] / 1e6, 4),
            'waits_for_core_ms': round(total['core'] / 1e6, 4),
            # What it neither computed nor was ready to: it slept until another let go.
            'waits_for_interpreter_ms': round(max(
                0.0, total['clock'] - total['computed'] - total['core']) / 1e6, 4),
            'preempted': round(total['preempted'], 4), 'gave_way': round(total['gave_way'], 4),
            'tokens': tokens}
