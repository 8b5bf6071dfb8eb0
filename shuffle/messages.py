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
from shuffle.limits import TICKET_BYTES_MAX
from shuffle.shared_memory import Note

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

    def encode(self) -> bytes:
        # ``asdict`` copies deeply, which takes longer than all the rest.
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @staticmethod
    def decode(ticket: bytes) -> GetRows:
        if len(ticket) > TICKET_BYTES_MAX:
            raise TooLarge(f"the ticket has {len(ticket)} bytes, more than {TICKET_BYTES_MAX}", limit=TICKET_BYTES_MAX)
        try:
            parsed = json.loads(ticket)
            request = GetRows(**parsed)
        except (ValueError, TypeError) as error:
            raise BadInput(f"not a GetRows ticket: {error}") from None
        request._check()
        return request

    def _check(self) -> None:
        numbers = {
            "reducer_index": self.reducer_index,
            "committed_row_index": self.committed_row_index,
            "from_row_index": self.from_row_index,
            "max_rows": self.max_rows,
            "max_bytes": self.max_bytes,
            "wait_ms": self.wait_ms,
        }
        for name, value in numbers.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < -1:
                raise BadInput(f"GetRows.{name} must be a whole number, not {value!r}", field=name)
        if not isinstance(self.with_metadata, bool):
            raise BadInput(f"GetRows.with_metadata must be true or false, not {self.with_metadata!r}")
        if not isinstance(self.machine, str | None):
            raise BadInput(f"GetRows.machine must be a text, not {self.machine!r}")
        if self.from_row_index < self.committed_row_index:
            raise BadInput(
                f"the cursor {self.from_row_index} is behind what the reducer committed, {self.committed_row_index}"
            )


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
        return BatchTail(ShuffleIndex(int(metadata[:-1] if more else metadata)), more)


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
            pid, fd, inode, size_bytes, *last = json.loads(metadata[len(SHARED_ROWS) :])
            return SharedRows(Note(int(pid), int(fd), int(inode), int(size_bytes)), tuple(map(ShuffleIndex, last)))
        except (ValueError, TypeError) as error:
            raise BadInput(f"not a note about shared rows: {error}") from None
