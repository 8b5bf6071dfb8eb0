"""Finds the rows for which user code raises, and encodes them as dead letters.

A batch that makes ``map`` or ``reduce`` raise is bisected until single rows are left that fail by themselves. With k
such rows among n this takes O(k log n) attempts. The rest of the batch is then processed as usual, and those rows go to
a dead-letter queue, in the same transaction as the positions that pass over them.

Two kinds of failure are not caused by a row:

- the store could not be reached, or the transaction lost a race (``is_transient``): the same rows are tried again;
- the batch fails as a whole and its parts do not, or nearly every part of a huge batch does: the cause is the code, or
  something it depends on, so the worker stops with an error.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from shuffle.errors import SpecError, UserCodeError
from shuffle.support.retry import trouble_behind

ATTEMPTS_MAX = 10_000
"""The most calls of user code to find the bad rows of one batch: enough for about six hundred bad rows among 65,536.
With more than that, the cause is not a few bad rows."""

REASON_CHARS_MAX = 2_000
"""The most characters of an exception's text that are stored: it may contain the row itself, which is stored anyway."""

DEAD_LETTER_SCHEMA = pa.schema(
    [
        pa.field("processor", pa.string(), nullable=False),
        pa.field("role", pa.string(), nullable=False),
        pa.field("worker", pa.int32(), nullable=False),
        pa.field("mapper", pa.int32(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("row", pa.binary(), nullable=False),
    ]
)
"""``position`` counts in the input numbering of ``mapper`` if the role is "mapper", else in its shuffle numbering.
``row`` is an Arrow IPC stream of the one row, since rows of many schemas share the queue (``decode_row``)."""


class PoisonRow(NamedTuple):
    row: int
    """The offset of the row in the batch that was searched."""
    reason: str


def is_transient(error: BaseException) -> bool:
    """Whether ``error`` was caused by the store or the machine, and neither by a row nor by the user's code."""
    return trouble_behind(error) is not None


def reason_of(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= REASON_CHARS_MAX else text[: REASON_CHARS_MAX - 1] + "…"


def raised_at(error: BaseException, not_in: str = __file__) -> str:
    """The file, line and function in which ``error`` was raised, to be appended to a message; empty if that was in the
    file ``not_in``."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != not_in]
    return f" (at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""


def locate_poison(
    rows: pa.Table, attempt: Callable[[pa.Table], None], *, attempts_max: int = ATTEMPTS_MAX
) -> list[PoisonRow]:
    """The rows of ``rows`` for which ``attempt`` raises when given alone, in their order.

    ``attempt`` must have no side effects: it is called with the same rows many times. Raises what ``attempt`` raised if
    that is transient or a mistake in the spec, and UserCodeError if no set of single rows explains the failure.
    """
    bad_rows: list[PoisonRow] = []
    attempts = 0
    whole: Exception | None = None
    # A stack of ranges still to be tried, the leftmost on top, so that bad rows are found in their order.
    ranges = [(0, rows.num_rows)] if rows.num_rows else []
    while ranges:
        begin, end = ranges.pop()
        if attempts >= attempts_max:
            raise UserCodeError(
                f"{len(bad_rows)} rows of the first {begin} of a batch of {rows.num_rows} failed one by one, and after "
                f"{attempts} attempts there is no end to it: this looks like the code, or something it depends on, and "
                f"not like a few bad rows. {reason_of(whole) if whole else ''}",
                attempts=attempts,
                bad_rows=len(bad_rows),
            ) from whole
        attempts += 1
        try:
            attempt(rows.slice(begin, end - begin))
        except Exception as error:
            if is_transient(error) or isinstance(error, SpecError):
                raise
            whole = whole or error
            if end - begin == 1:
                bad_rows.append(PoisonRow(begin, reason_of(error)))
            else:
                middle = (begin + end) // 2
                ranges.append((middle, end))
                ranges.append((begin, middle))
    if whole is not None and not bad_rows:
        raise UserCodeError(
            f"a batch of {rows.num_rows} rows fails as a whole, but no row of it fails alone: {reason_of(whole)}",
            attempts=attempts,
        ) from whole
    return bad_rows


def split_rows(rows: pa.Table, bad: Sequence[int]) -> tuple[pa.Table, pa.Table]:
    """``rows`` without those at the offsets ``bad``, and only those, both in their order."""
    if not bad:
        return rows, rows.slice(0, 0)
    keep = np.ones(rows.num_rows, dtype=bool)
    keep[list(bad)] = False
    return rows.filter(pa.array(keep)), rows.filter(pa.array(~keep))


def dead_letters(
    *,
    processor: str,
    role: str,
    worker: int,
    mappers: Sequence[int],
    positions: Sequence[int],
    reasons: Sequence[str],
    rows: pa.Table,
) -> pa.Table:
    """``rows`` as rows of a dead-letter queue; the sequences have one entry for each of them."""
    count = rows.num_rows
    if not len(mappers) == len(positions) == len(reasons) == count:
        raise ValueError(f"{count} rows, {len(mappers)} mappers, {len(positions)} positions, {len(reasons)} reasons")
    return pa.table(
        [
            pa.array([processor] * count, pa.string()),
            pa.array([role] * count, pa.string()),
            pa.array([worker] * count, pa.int32()),
            pa.array(list(mappers), pa.int32()),
            pa.array(list(positions), pa.int64()),
            pa.array(list(reasons), pa.string()),
            pa.array(list(_encode_rows(rows)), pa.binary()),
        ],
        schema=DEAD_LETTER_SCHEMA,
    )


def decode_row(row: bytes) -> pa.Table:
    """The one-row table behind a ``row`` cell of a dead-letter queue."""
    with pa.ipc.open_stream(row) as reader:
        return reader.read_all()


def _encode_rows(rows: pa.Table) -> Iterator[bytes]:
    for i in range(rows.num_rows):
        # A slice would carry the whole dictionary and, in some types, the whole buffer: take copies the one row.
        row = rows.take([i])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, row.schema) as writer:
            writer.write_table(row)
        yield sink.getvalue().to_pybytes()
