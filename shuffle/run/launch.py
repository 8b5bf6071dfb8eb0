"""Runs a module as the controller's child, in such a way that it cannot outlive the controller.

    python -P -m shuffle.run.launch PARENT_PID MODULE [ARGUMENT …]

A controller that is killed with ``kill -9`` cannot tell its children to stop, so the kernel is asked to. Asking is done
in the child itself and not between fork and exec, where Python code could deadlock on a lock of some other thread.

The working folder is not put on the path (``-P``): it is the user's, and a ``queue.py`` in it would be taken for
Python's own. Where the user's modules are found is decided in one place, when the spec's classes are loaded.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a child of this process that runs ``module``."""
    return [sys.executable, "-P", "-m", "shuffle.run.launch", str(os.getpid()), module, *arguments]


def environment() -> dict[str, str]:
    """This process's environment, in which a child finds this project where this process found it."""
    places = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).resolve().parents[2])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in places if place)}


def die_with_parent(parent_pid: int) -> None:
    """Arranges for this process to be killed when its parent dies; ends at once if that has happened already."""
    try:
        asked = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    except (OSError, AttributeError):
        asked = False
    if not asked:  # Not Linux: look for ourselves.
        from shuffle.support.vital_threads import end_process, start_vital

        start_vital(lambda: _watch_parent(parent_pid), "watch-parent", end_process)
    if os.getppid() != parent_pid:
        os._exit(1)


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    os._exit(1)


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    module = sys.argv[2]
    sys.argv[:] = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
