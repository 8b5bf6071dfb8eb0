"""Named points in the code at which a process can be made to die, so that tests can kill every role in every phase.

In normal use ``reach`` does nothing. With ``SHUFFLE_CRASH_AT=NAME`` in the environment the process kills itself with
SIGKILL when it reaches that point, with ``NAME:N`` when it reaches it for the Nth time: no handler runs and nothing is
flushed, exactly as with ``kill -9`` from outside.
"""

from __future__ import annotations

import os
import signal

ENVIRONMENT = "SHUFFLE_CRASH_AT"
"""The environment variable that names the crash point."""

POINTS: dict[str, str] = {
    "mapper.after_first_state": "the origin of its numbering is durable, nothing else is known",
    "mapper.after_registering": "others can find it, and it has nothing to give",
    "mapper.after_read": "rows are read and not mapped",
    "mapper.after_map": "rows are mapped, the persisted state was not looked at",
    "mapper.after_state_check": "the persisted state was fetched, the entry is not in the window",
    "mapper.after_push": "the entry is in the window, and may have been served",
    "mapper.before_answer": "a request was taken in, with what it says is committed, and no response is sent",
    "mapper.before_trim_commit": "the new state is about to be committed",
    "mapper.after_trim_commit": "the new state is durable, the input is not trimmed",
    "mapper.after_input_trim": "the input is trimmed, no other process knows it",
    "reducer.after_state_read": "its row was read, nothing is fetched",
    "reducer.after_fetch": "rows are fetched and not queued",
    "reducer.before_reduce": "rows are about to go to user code",
    "reducer.after_reduce": "user code has made its transaction",
    "reducer.before_commit": "everything is in the transaction, the commit is not sent",
    "reducer.after_commit": "the commit is durable, and this instance does not know what that means",
    "reducer.after_commit_known": "the pipeline has moved on, no mapper knows of the commit",
    "exporter.after_claim": "the partition of the outbox is ours, the sink was not asked",
    "exporter.after_open": "the sink has told its position, nothing is published",
    "exporter.after_intent": "the rows that are published next are noted, none of them is",
    "exporter.before_publish": "rows are about to go to the sink",
    "exporter.after_publish": "the sink has acknowledged rows, the store does not know it",
    "exporter.after_trim": "the store knows what is published, and the outbox is trimmed",
    "store.before_segment_write": "a group is validated, nothing of it is written",
    "store.after_segment_write": "rows of a queue are written to a segment and not synced",
    "store.after_segment_sync": "the segment is synced, no position points to it",
    "store.before_log_write": "nothing of the group is in RocksDB's log",
    "store.after_log_write": "the group is in RocksDB's log, not synced",
    "store.after_log_sync": "the group is durable and not yet visible",
    "store.before_answer": "the group is durable and visible, no response is sent",
    "store.before_segment_remove": "trimmed segments are forgotten and their files still there",
}
"""Every crash point, and what has happened when it is reached. The tests kill a process at each of them."""


def _parse(text: str | None) -> tuple[str | None, int]:
    if not text:
        return None, 0
    name, _, nth = text.partition(":")
    if name not in POINTS or not (nth or "1").isdecimal():
        raise SystemExit(f"{ENVIRONMENT}={text}: not NAME or NAME:N with one of {', '.join(sorted(POINTS))}")
    return name, int(nth or "1")


_armed, _left = _parse(os.environ.get(ENVIRONMENT))


def reach(name: str) -> None:
    """Kills this process if the environment names the crash point ``name``; otherwise does nothing."""
    if _armed is not None:
        _reached(name)


def _reached(name: str) -> None:
    global _left
    if name == _armed:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
