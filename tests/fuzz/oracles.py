"""What must hold for every response, and the resources that a process uses."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from shuffle.errors import ShuffleError
from shuffle.statestore.codec.segment import decode_batch, file_header_bytes, split_records
from shuffle.statestore.wire.messages import Header
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


# --- records of queues ---

_QUEUE_OF_FILE = re.compile(r"(?:q|staged-)(\d+)-")
_SCHEMA_AT = 16
"""Where the schema begins in a segment file."""


def has_records(told: Header) -> bool:
    """Whether records of a queue follow this header of a response."""
    return told.get("file") is not None and "bytes" in told


def records_problems(told: Header, data: bytes, asked: Any) -> list[Problem]:
    """Of the records of a queue that came back: anything in ``data`` that is not a whole record of the right queue.

    ``told`` is the header of the response, and ``asked`` that of the request, or None where it is not known.
    """
    return [Problem("leak", f"{why}; the store says {told}") for why in _wrong_records(told, data, asked)]


def _wrong_records(told: Header, data: bytes, asked: Any) -> Iterator[str]:
    file, offset = told["file"], told["offset"]
    if len(data) != told["bytes"]:
        yield f"{len(data)} bytes of records, not {told['bytes']}"
        return
    schema = pa.schema([])  # Any batch can be read with it. The file may be gone by now, if its rows were trimmed.
    try:
        with open(file, "rb") as segment:
            header = segment.read(file_header_bytes(memoryview(segment.read(_SCHEMA_AT)), file) - _SCHEMA_AT)
            schema = pa.ipc.read_schema(pa.py_buffer(header))
            segment.seek(offset)
            if segment.read(len(data)) != data:
                yield "other bytes than the file has there"
    except FileNotFoundError:
        pass
    ends: list[int] = []
    rows: list[tuple[int, int]] = []
    try:
        for record in split_records(pa.py_buffer(data), file, offset):
            head, batch = decode_batch(record, schema, file, offset)
            batch.validate(full=True)
            first = told["segment"] + head.first_row
            rows.append((first, first + head.rows))
            ends.append(record.size + (ends[-1] if ends else 0))
    except (ShuffleError, pa.ArrowException) as error:
        yield f"no whole and valid records: {error}"
        return
    positions = [position for both in rows for position in both]
    if not rows or positions[1:-1:2] != positions[2::2] or positions[-1] != told["end"]:
        yield f"records of the rows {rows[:20]}"
    elif isinstance(asked, dict) and all(type(asked.get(name)) is int for name in ("queue", "begin", "rows", "bytes")):
        yield from _not_asked_for(asked, file, rows, ends)


def _not_asked_for(asked: Header, file: str, rows: list[tuple[int, int]], ends: list[int]) -> Iterator[str]:
    begin = asked["begin"]
    found = _QUEUE_OF_FILE.match(Path(file).name)
    if found is None or int(found.group(1)) != asked["queue"]:
        yield f"records of another queue than {asked['queue']}"
    if not rows[0][0] <= begin < rows[0][1]:
        yield f"records from row {rows[0][0]} on, not from that of row {begin}"
    if rows[-1][0] >= begin + asked["rows"]:
        yield f"records up to row {rows[-1][1]}, and {asked['rows']} rows from {begin} on were asked for"
    if len(ends) > 1 and ends[-1] > asked["bytes"]:
        yield f"{len(ends)} records of {ends[-1]} bytes, and {asked['bytes']} were asked for"


# --- resources ---


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds."""

    resident_bytes: int
    threads: int
    descriptors: int


def usage_of(pid: int) -> Usage | None:
    """None when it is gone.

    Pages of mapped files are not counted: code, and segments while they are sent. They are the system's cache, which
    it takes back when it needs them, and how many of them a process has touched says nothing about what it holds.
    """
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        resident = sum(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
        return Usage(resident, len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd")))
    except (OSError, KeyError):  # What has ended and was not waited for has no memory.
        return None


def file_count(folder: Path) -> int:
    return sum(1 for path in folder.rglob("*") if path.is_file())


MIB = 1024 * 1024

GROWTH_BYTES_MAX = 48 * MIB
"""Of one process between the end of the warm-up and the end, without what RocksDB says that it holds: the allocators of
Arrow and Python keep what the largest input made them take. That is up to 25 MB of the store, and levels off."""

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
