"""What must hold for every response, and the resources that a process uses."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.findings import Problem

_TRACEBACK = b"Traceback (most recent"
_PATH = re.compile(rb"[\w/.-]{0,80}\w\.py\b")
"""What an answer must not have: a traceback, or where the code is."""

SECRET = b"TOP-SECRET-"
"""Rows of a table that no fuzzed question is about begin with this."""


def answer_problems(answer: bytes) -> list[Problem]:
    """Of the bytes that came back, however they were wrapped."""
    problems = []
    at = answer.find(_TRACEBACK)
    if at < 0 and b".py" in answer:  # Rows are long, and a search for paths in them is not quick.
        found = _PATH.search(answer)
        at = -1 if found is None else found.start()
    if at >= 0:
        problems.append(Problem("traceback", repr(answer[max(at - 60, 0) : at + 200])))
    if SECRET in answer:
        problems.append(Problem("leak", "an answer has rows of a table that it was not asked for"))
    return problems


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds."""

    resident_bytes: int
    threads: int
    descriptors: int


def usage_of(pid: int) -> Usage | None:
    """None when it is gone."""
    try:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Usage(resident, len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd")))
    except OSError:
        return None


def file_count(folder: Path) -> int:
    return sum(1 for path in folder.rglob("*") if path.is_file())


MIB = 1024 * 1024

GROWTH_BYTES_MAX = 64 * MIB
"""Of one process between the end of the warm-up and the end, without what RocksDB says that it holds: the allocators of
Arrow and Python keep what the largest input made them take."""

GROWTH_THREADS_MAX = 24
"""The pools of gRPC and Flight have as many threads as there were ever calls at once, and do not shrink. A ``Watch``
whose caller has left holds one until its time is over."""

GROWTH_DESCRIPTORS_MAX = 16
"""Segments that are being appended to, and connections of the job's clients that were made since."""

GROWTH_FILES_MAX = 24
"""Files of RocksDB, which come and go with flushes, and the last segment of each partition."""


def growth_problems(name: str, before: Usage, after: Usage) -> list[Problem]:
    """A process that holds more than it did when the warm-up was over."""
    grown = (
        ("bytes resident", after.resident_bytes - before.resident_bytes, GROWTH_BYTES_MAX),
        ("threads", after.threads - before.threads, GROWTH_THREADS_MAX),
        ("open files", after.descriptors - before.descriptors, GROWTH_DESCRIPTORS_MAX),
    )
    return [
        Problem("growth", f"{name} has {more} more {what} than at the beginning, and {most} are allowed")
        for what, more, most in grown
        if more > most
    ]
