"""Nobody sits before a silent screen: what is waited for is told before anyone gives up.

On stderr, which Spark hands on from all of its Python processes: those of the driver to the driver's, those of tasks to
the executor's log.
"""

from __future__ import annotations

import sys
import time

REPORT_AFTER_S = 1.0
"""Everything waits a moment now and then; nobody needs to hear of that."""


def say(line: str) -> None:
    print(f"shuffle: {line}", file=sys.stderr, flush=True)


class Waiting:
    """One wait for up to ``timeout_s``; told once, as soon as it is one."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.restart()

    def restart(self) -> None:
        """What was waited for is there."""
        self._began_s = time.monotonic()
        self._told = False

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def is_over(self) -> bool:
        return self.waited_s > self._timeout_s

    def tell(self, what: str) -> None:
        """``what`` is a sentence that says what is missing."""
        if not self._told and REPORT_AFTER_S < self.waited_s < self._timeout_s:
            self._told = True
            end = "" if what.endswith((".", "?")) else "."
            say(f"waiting: {what}{end} This gives up after {self._timeout_s:g} s (option 'timeout')")
