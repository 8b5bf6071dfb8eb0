"""Runs a module as the controller's child, in such a way that it cannot outlive the controller.

    python -P -m shuffle.run.launch PARENT_PID MODULE [ARGUMENT …]

A controller that is killed with ``kill -9`` cannot stop its children, so each child has the kernel kill it (``prctl``).
The child does that itself, and not between fork and exec, where Python code could deadlock on a lock of another thread.

The working folder is not put on the path (``-P``): it is the user's, and a ``queue.py`` in it would be imported instead
of Python's own. Where the user's modules are found is decided in ``shuffle.user_code.load``.
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
"""The option of Linux's ``prctl`` that sets the signal a process gets when its parent dies."""
_POLL_S = 1.0
"""Seconds between two checks whether the parent lives, where there is no ``prctl``."""


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a child of this process that runs ``module``."""
    return [sys.executable, "-P", "-m", "shuffle.run.launch", str(os.getpid()), module, *arguments]


def environment() -> dict[str, str]:
    """This process's environment, extended so that a child imports this project from the same folder."""
    folders = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).resolve().parents[2])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder)}


def die_with_parent(parent_pid: int) -> None:
    """Arranges for this process to be killed when its parent dies; ends at once if that has happened already."""
    try:
        is_set = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    except (OSError, AttributeError):
        is_set = False
    if not is_set:  # Not Linux: a thread watches the parent.
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
