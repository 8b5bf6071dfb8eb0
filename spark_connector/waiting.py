"""Reports on stderr what a query waits for, long before the wait times out.

Spark passes on the stderr of all its Python processes: that of the driver's processes to the driver's own stderr, that
of tasks to the log of the executor.
"""

from __future__ import annotations

import sys
import time

REPORT_AFTER_S = 1.0
"""The time in seconds after which a wait is reported. Shorter waits are normal and are not reported."""


def say(line: str) -> None:
    print(f"shuffle: {line}", file=sys.stderr, flush=True)


class Waiting:
    """One wait of at most ``timeout_s``. It is reported once, when it has lasted ``REPORT_AFTER_S``."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.restart()

    def restart(self) -> None:
        """What was waited for has come: the next wait begins now."""
        self._began_s = time.monotonic()
        self._reported = False

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def is_over(self) -> bool:
        return self.waited_s > self._timeout_s

    def report(self, what: str) -> None:
        """Report ``what``, a sentence that says what is missing, if the wait is long enough and was not reported."""
        if not self._reported and REPORT_AFTER_S < self.waited_s < self._timeout_s:
            self._reported = True
            end = "" if what.endswith((".", "?")) else "."
            say(f"waiting: {what}{end} This gives up after {self._timeout_s:g} s (option 'timeout')")
