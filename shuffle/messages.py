"""What travels between mappers and reducers, and its codec: GetRows, version 2.

GetRows is an Arrow Flight ``DoGet``. The ticket is a JSON object of ``GetRows``. The response is record batches, each
with a ``Tail`` as its ``app_metadata``; all tails but the last say ``more``. A response without rows is one batch
without rows, and it has a tail, too.

A reducer that goes on asking uses a ``DoExchange`` with the command ``ROWS_EXCHANGE`` instead, which costs a third of
such calls: each request is a ticket in the ``app_metadata`` of a message without rows. The response is the same
batches; or one message without rows, whose ``app_metadata`` is a ``Tail`` (there are none), ``STREAM_OVER`` (this is no
response: the request has to be made again on another stream), the JSON of a typed error, or ``SharedRows``: the batches
are in memory that both processes see (``shared_memory``), if the request says on which machine it was made.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from shuffle.errors import BadInput, TooLarge, WrongVersion
from shuffle.ids import Guid, ReducerIndex, ShuffleIndex
from shuffle.limits import TICKET_BYTES_MAX, WAIT_MS_MAX
from shuffle.support.fields import (
    INT64_MAX,
    INT64_MIN,
    UINT32_MAX,
    UINT64_MAX,
    check_fields,
    check_items,
    flag,
    number,
    parse_json,
    shown,
    text,
)
from shuffle.support.shared_memory import MemoryHandle

VERSION = 2
ROWS_EXCHANGE = b"getrows/%d" % VERSION
TAIL = b"#"
STREAM_OVER = b"!"
SHARED_ROWS = b"@"
"""The first byte of what a response says about itself tells what it is; a typed error begins with ``{``."""

GENERATION_MAX = 2**31 - 1

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
    generation: int = 0
    """Of the processor, as the reducer's row has it. A mapper refuses requests of another one than its own."""
    version: int = VERSION
    """Of this protocol."""

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
        if not isinstance(parsed, dict):
            raise BadInput("not a GetRows ticket: it is no JSON object")
        check_version(parsed.get("version"))
        if not parsed.keys() <= _TICKET_NAMES:
            raise BadInput(f"not a GetRows ticket of version {VERSION}: it has fields that there are none of")
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
    number("generation", GENERATION_MAX),
    number("version", VERSION, low=VERSION),
)
"""The fields of a ticket."""

_TICKET_NAMES = frozenset(GetRows.__slots__)


def check_version(version: object) -> None:
    """Raises ``WrongVersion`` unless a ticket, or the command of an exchange, is of this version."""
    if version != VERSION:
        told = "does not say which version" if version is None else f"says version {shown(version)}"
        raise WrongVersion(
            f"GetRows has version {VERSION} here, and the request {told}: reducer and mapper are of different versions "
            "of this project. Install the same one everywhere, and start them again",
            version=VERSION,
        )


_TAIL = struct.Struct("<cBIqqq")
_MORE, _HAS_FRONT = 1, 2
_TAIL_FIELDS = (
    number("flags", _MORE | _HAS_FRONT),
    number("generation", GENERATION_MAX),
    number("last_row_index", low=-1),
    number("complete_up_to", low=-1),
    number("front", INT64_MAX, INT64_MIN),
)
_HANDLE = struct.Struct("<cIIQQ")
_HANDLE_FIELDS = (number("pid", UINT32_MAX), number("fd", UINT32_MAX), number("inode", UINT64_MAX), number("bytes"))


class Tail(NamedTuple):
    """Behind each record batch of a response, and behind none: where the reducer stands after it."""

    last_row_index: ShuffleIndex
    """Of the last row of the batch; the cursor of the request if there is none."""
    complete_up_to: ShuffleIndex
    """Every row of this reducer after the request's cursor and up to this shuffle index is in the response so far. It
    is ahead of the last row where the rows that follow went to other reducers."""
    front: int | None = None
    """Every row of this reducer that comes after this is at this value of the mapper's clock or above it. None is no
    promise: the mapper has no clock, or cannot tell here."""
    generation: int = 0
    """Of the processor that the rows belong to."""
    more: bool = False
    """Another batch of the same response follows."""

    def encode(self) -> bytes:
        last, complete, front, generation, more = self
        flags = (_MORE if more else 0) | (_HAS_FRONT if front is not None else 0)
        return _TAIL.pack(TAIL, flags, generation, last, complete, front or 0)

    @staticmethod
    def decode(metadata: bytes) -> Tail:
        if len(metadata) != _TAIL.size or not metadata.startswith(TAIL):
            raise BadInput(f"not the tail of a response of GetRows: {shown(metadata)}")
        return _tail(_TAIL.unpack(metadata))


def _tail(unpacked: tuple[bytes, int, int, int, int, int]) -> Tail:
    tag, flags, generation, last, complete, front = unpacked
    check_items("a tail", _TAIL_FIELDS, (flags, generation, last, complete, front))
    if tag != TAIL or complete < last or (front and not flags & _HAS_FRONT):
        raise BadInput(f"not the tail of a response of GetRows: rows up to {last}, complete up to {complete}")
    told_front = front if flags & _HAS_FRONT else None
    return Tail(ShuffleIndex(last), ShuffleIndex(complete), told_front, generation, bool(flags & _MORE))


@dataclass(frozen=True, slots=True)
class SharedRows:
    """A response whose batches are in shared memory: where, and the tail of each."""

    handle: MemoryHandle
    tails: tuple[Tail, ...]

    def encode(self) -> bytes:
        handle = self.handle
        encoded = _HANDLE.pack(SHARED_ROWS, handle.pid, handle.fd, handle.inode, handle.size_bytes)
        return encoded + b"".join(tail.encode() for tail in self.tails)

    @staticmethod
    def decode(metadata: bytes) -> SharedRows:
        tails_bytes = len(metadata) - _HANDLE.size
        if tails_bytes < 0 or tails_bytes % _TAIL.size or not metadata.startswith(SHARED_ROWS):
            raise BadInput(f"not a note about shared rows: {shown(metadata)}")
        fields = _HANDLE.unpack_from(metadata)[1:]
        check_items("a note about shared rows", _HANDLE_FIELDS, fields)
        return SharedRows(MemoryHandle(*fields), tuple(map(_tail, _TAIL.iter_unpack(metadata[_HANDLE.size :]))))
