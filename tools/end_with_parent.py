"""Runs a command that ends when the process that started it ends, however that one ends.

    python end_with_parent.py PARENT_PID COMMAND [ARGUMENT …]

A test run that is killed with ``kill -9`` stops nothing that it has started. So the command has the kernel kill it
then: ``prctl`` sets that for this process, and it stays set when the process becomes the command. The kernel goes by
the thread that started this process, so that has to be one that lasts: the main thread.

It is run as a file, and imports little: it starts before every broker. Without ``prctl``, on other systems than Linux,
the command is run all the same, and outlives a parent that is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
"""The option of ``prctl`` that sets the signal which a process gets when its parent dies."""


def command(*arguments: str) -> list[str]:
    """The command line for a child of this process that runs ``arguments``."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *arguments]


def main(arguments: Sequence[str]) -> None:
    parent_pid, what = int(arguments[0]), list(arguments[1:])
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # It has died before the kernel was told.
        raise SystemExit(1)
    os.execvp(what[0], what)


if __name__ == "__main__":
    main(sys.argv[1:])
