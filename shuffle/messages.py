"""What travels between mappers and reducers, and its codec.

GetRows is an Arrow Flight ``DoGet``. The ticket is a JSON object of ``GetRows``; the answer is record batches, each
with ``BatchTail`` as its ``app_metadata``. "No rows" is the schema and no batch.

A reducer that goes on asking uses a ``DoExchange`` with the command ``ROWS_EXCHANGE`` instead, which costs a third of
such calls: each question is a ticket in the ``app_metadata`` of a message without rows. The answer is the same batches,
each but the last with ``more`` in its tail; or one message without rows, whose ``app_metadata`` is ``NO_ROWS``,
``STREAM_OVER`` (no rows, and the next question needs another stream), the JSON of a typed error, or ``SharedRows``: the
batches are in memory that both processes see (``shared_memory``), if the question says on which machine it was asked.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass

import pyarrow as pa

from shuffle.errors import BadInput, TooLarge
from shuffle.ids import Guid, ReducerIndex, ShuffleIndex
from shuffle.limits import TICKET_BYTES_MAX, WAIT_MS_MAX
from shuffle.support.fields import (
    UINT32_MAX,
    UINT64_MAX,
    check_fields,
    check_items,
    fits,
    flag,
    number,
    parse_json,
    shown,
    text,
)
from shuffle.support.shared_memory import Note

ROWS_EXCHANGE = b"getrows/1"
NO_ROWS = b"."
STREAM_OVER = b"!"
SHARED_ROWS = b"@"

METADATA_FIELDS = (
    pa.field("_shuffle_index", pa.int64(), False),
    pa.field("_ingestion_time", pa.timestamp("us", "UTC"), False),
)
"""What a mapper knows of its rows beside their columns. The index is the same for ever; the time is when this instance
took the row in, so a mapper that was restarted and has read the row again says a later one."""


@dataclass(frozen=True, slots=True)
class GetRows:
    """One reducer's request for its rows of one mapper."""

    mapper_id: Guid
    reducer_index: ReducerIndex
    committed_row_index: ShuffleIndex
    """Everything up to here is durable at the reducer; the mapper may forget it."""
    from_row_index: ShuffleIndex
    """The cursor: the last shuffle index already fetched. Rows after it are wanted."""
    max_rows: int
    max_bytes: int
    wait_ms: int = 0
    to_row_index: ShuffleIndex | None = None
    """If set, rows after this index are not wanted (a repeated read of a known range)."""
    with_metadata: bool = False
    """Whether rows come with the columns ``METADATA_FIELDS`` behind their own."""
    machine: str | None = None
    """Where the reducer runs, if it can take rows from shared memory."""
    processor: str = ""
    """Whose reducer asks. A mapper refuses those of another processor; empty: it is not said."""

    def encode(self) -> bytes:
        # ``asdict`` copies deeply, which takes longer than all the rest.
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @staticmethod
    def decode(ticket: bytes) -> GetRows:
        if len(ticket) > TICKET_BYTES_MAX:
            raise TooLarge(f"the ticket has {len(ticket)} bytes, more than {TICKET_BYTES_MAX}", limit=TICKET_BYTES_MAX)
        try:
            parsed = parse_json(ticket)
        except ValueError as error:
            raise BadInput(f"not a GetRows ticket: {error}") from None
        if not isinstance(parsed, dict) or not parsed.keys() <= set(GetRows.__slots__):
            raise BadInput("not a GetRows ticket: reducer and mapper are of different versions")
        check_fields("GetRows", _GET_ROWS, parsed)
        request = GetRows(**{name: value for name, value in parsed.items() if value is not None})
        if request.from_row_index < request.committed_row_index:
            raise BadInput(
                f"the cursor {request.from_row_index} is behind what the reducer committed, "
                f"{request.committed_row_index}"
            )
        return request


_GET_ROWS = (
    text("mapper_id"),
    number("reducer_index", UINT32_MAX),
    number("committed_row_index", low=-1),
    number("from_row_index", low=-1),
    number("max_rows", low=1),
    number("max_bytes", low=1),
    number("wait_ms", WAIT_MS_MAX, optional=True),
    number("to_row_index", low=-1, optional=True),
    flag("with_metadata"),
    text("machine", optional=True),
    text("processor", low=0, optional=True),
)
"""The fields of a ticket."""

_INDEX = number("last row index")
_NOTE = (number("pid", UINT32_MAX), number("fd", UINT32_MAX), number("inode", UINT64_MAX), number("bytes"))


@dataclass(frozen=True, slots=True)
class BatchTail:
    """Behind each record batch of an answer: where it ends in the shuffle numbering."""

    last_row_index: ShuffleIndex
    more: bool = False
    """Another batch of the same answer follows (on an exchange)."""

    def encode(self) -> bytes:
        return b"%d+" % self.last_row_index if self.more else b"%d" % self.last_row_index

    @staticmethod
    def decode(metadata: bytes) -> BatchTail:
        more = metadata.endswith(b"+")
        digits = metadata[:-1] if more else metadata
        # A number of 64 bits has at most 19 digits.
        if not digits.isdigit() or len(digits) > 19 or not fits(_INDEX, int(digits)):
            raise BadInput(f"not the shuffle index of a batch's last row: {shown(metadata)}")
        return BatchTail(ShuffleIndex(int(digits)), more)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """An answer whose batches are in shared memory: where, and the shuffle index of the last row of each."""

    note: Note
    last_row_indexes: tuple[ShuffleIndex, ...]

    def encode(self) -> bytes:
        return SHARED_ROWS + json.dumps([*astuple(self.note), *self.last_row_indexes]).encode()

    @staticmethod
    def decode(metadata: bytes) -> SharedRows:
        try:
            told = parse_json(metadata[len(SHARED_ROWS) :])
        except ValueError as error:
            raise BadInput(f"not a note about shared rows: {error}") from None
        if not isinstance(told, list):
            raise BadInput("not a note about shared rows")
        place, last = told[: len(_NOTE)], told[len(_NOTE) :]
        check_items("a note about shared rows", _NOTE, place)
        check_items("a note about shared rows", [_INDEX] * len(last), last)
        return SharedRows(Note(*place), tuple(last))
