"""For tests that start threads which must not die: what such a thread does when it dies all the same."""

from __future__ import annotations

from shuffle.errors import ThreadDied


def unexpected(died: ThreadDied) -> None:
    """Raised in the thread that died, so that the test run tells of it."""
    raise died
