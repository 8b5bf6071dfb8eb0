"""What travels between mappers and reducers, and its codec: GetRows, version 2.

GetRows is an Arrow Flight ``DoGet``. The ticket is a JSON object of ``GetRows``. The response is record batches, each
with a ``Tail`` as its ``app_metadata``; all tails but the last say ``more``. A response without rows is one batch
without rows, and it has a tail, too.

A reducer that makes one request after another uses a ``DoExchange`` with the command ``ROWS_EXCHANGE`` instead, which
costs a third of such calls: each request is a ticket in the ``app_metadata`` of a message without rows. The response is
the same batches; or one message without rows, whose ``app_metadata`` is a ``Tail`` (there are no rows), ``STREAM_OVER``
(this is no response: the request has to be made again on another stream), the JSON of a typed error, or ``SharedRows``:
the batches are in memory that both processes see (``shared_memory``), if the request names the machine it comes from.

A message can also have the requests of several reducers, to several mappers of one process: ``messages_many``.
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
"""``TAIL``, ``STREAM_OVER`` and ``SHARED_ROWS`` are the first bytes of the ``app_metadata`` of a response, which say
what it is; a typed error begins with ``{``."""

GENERATION_MAX = 2**31 - 1
"""The highest generation of a processor that a message can name."""

METADATA_FIELDS = (
    pa.field("_shuffle_index", pa.int64(), False),
    pa.field("_ingestion_time", pa.timestamp("us", "UTC"), False),
)
"""The metadata columns that a mapper can add to its rows. The index of a row never changes. The time is when this
instance of the mapper read the row, so a mapper that was restarted and has read the row again gives a later one."""


@dataclass(frozen=True, slots=True)
class GetRows:
    """One reducer's request for its rows of one mapper."""

    mapper_id: Guid
    reducer_index: ReducerIndex
    committed_row_index: ShuffleIndex
    """The shuffle index up to which the reducer has durably committed its rows. The mapper may forget them."""
    from_row_index: ShuffleIndex
    """The cursor: the last shuffle index already fetched. The rows after it are requested."""
    max_rows: int
    """The most rows of the response."""
    max_bytes: int
    """The most bytes of rows in the response; a single row may have more."""
    wait_ms: int = 0
    """The milliseconds for which the mapper waits for rows if there are none."""
    to_row_index: ShuffleIndex | None = None
    """The last shuffle index that is requested, for reading a known range again; None if there is no such bound."""
    with_metadata: bool = False
    """Whether rows come with the columns ``METADATA_FIELDS`` behind their own."""
    machine: str | None = None
    """The id of the machine on which the reducer runs, if it can read rows from shared memory; otherwise None."""
    processor: str = ""
    """The name of the reducer's processor. A mapper refuses requests of another processor; an empty name is not
    checked."""
    generation: int = 0
    """The generation of the processor, as the reducer's row in the store has it. A mapper refuses requests of another
    generation than its own."""
    version: int = VERSION
    """The version of this protocol."""

    def encode(self, **changed: object) -> bytes:
        """The ticket, with these fields ``changed``: a copy of the request for each would take longer."""
        # ``asdict`` copies deeply, which takes longer than all the rest.
        return json.dumps({name: getattr(self, name) for name in self.__slots__} | changed).encode()

    @staticmethod
    def decode(ticket: bytes) -> GetRows:
        if len(ticket) > TICKET_BYTES_MAX:
            raise TooLarge(f"the ticket has {len(ticket)} bytes, more than {TICKET_BYTES_MAX}", limit=TICKET_BYTES_MAX)
        try:
            parsed = parse_json(ticket)
        except ValueError as error:
            raise BadInput(f"not a GetRows ticket: {error}") from None
        return GetRows.of_fields(parsed)

    @staticmethod
    def of_fields(parsed: object) -> GetRows:
        """The request that the JSON of a ticket describes."""
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
        said = "does not say which version" if version is None else f"says version {shown(version)}"
        raise WrongVersion(
            f"GetRows has version {VERSION} here, and the request {said}: reducer and mapper are of different versions "
            "of this project. Install the same one everywhere, and start them again",
            version=VERSION,
        )


_TAIL = struct.Struct("<cBIqqq")
TAIL_BYTES = _TAIL.size
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
    """How far the reducer is after one record batch of a response, or after a response without rows."""

    last_row_index: ShuffleIndex
    """The shuffle index of the last row of the batch; the cursor of the request if there is none."""
    complete_up_to: ShuffleIndex
    """The shuffle index up to which every row of this reducer after the request's cursor is in the response so far. It
    is ahead of the last row where the rows that follow went to other reducers."""
    front: int | None = None
    """The value of the mapper's clock below which no later row of this reducer is. None is no promise: the mapper has
    no clock, or cannot tell here."""
    generation: int = 0
    """The generation of the processor that the rows belong to."""
    more: bool = False
    """Whether another batch of the same response follows."""

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
    known_front = front if flags & _HAS_FRONT else None
    return Tail(ShuffleIndex(last), ShuffleIndex(complete), known_front, generation, bool(flags & _MORE))


@dataclass(frozen=True, slots=True)
class SharedRows:
    """A response whose batches are in shared memory: the handle of the memory, and the tail of each batch."""

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
            raise BadInput(f"not a handle of shared rows: {shown(metadata)}")
        fields = _HANDLE.unpack_from(metadata)[1:]
        check_items("a handle of shared rows", _HANDLE_FIELDS, fields)
        return SharedRows(MemoryHandle(*fields), tuple(map(_tail, _TAIL.iter_unpack(metadata[_HANDLE.size :]))))
