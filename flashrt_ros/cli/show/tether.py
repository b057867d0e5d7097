"""
Runs `capsule_node` as long as the process that started it lives.

    python -m flashrt_ros.cli.show.tether PARENT --ros-args ...

A process that is killed ends none of its children. So the kernel is asked to tell this one, which
then ends as on any SIGTERM. Linux alone has that; elsewhere the node stays.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tie(parent: int) -> bool:
    """
    Have SIGTERM sent to this process when its parent ends; return whether the parent is there.

    More precisely, when the thread ends that started this process: it should be the main one.
    """
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    except (AttributeError, OSError, TypeError):
        return True
    return os.getppid() == parent  # it may have ended before


def main() -> int:
    """Be the node, on a tether."""
    if not tie(int(sys.argv.pop(1))):
        return 0
    from flashrt_ros.node.main import main as node
    return node()


if __name__ == '__main__':
    sys.exit(main())
