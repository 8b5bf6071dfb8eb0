"""The messages of the data plane, which clients and the daemon exchange about rows.

A request and its response are a JSON object, the header, and rows of two binary columns. There are two transports:

    Flight   a client keeps a few ``DoExchange`` streams open and sends one request at a time on each. The rows are a
             record batch, the header is its ``app_metadata``. (A new call for each request would cost a third more
             time alone, and five times more under load.) The records of a queue are the value of a single row.
    lane     small requests over plain sockets, and reads of queues, whose response is bytes of a file: ``lane_frames``

The rows of a commit are divided into sections, which the header lists in their order (or, if they are many, the value
of a first row lists them as JSON):

    ["read", n]                                      keys that were read
    ["range", n]                                     ranges that were read: begin, and end or null
    ["expect", table_id, n]                          keys and the values they must have; null: there must be none
    ["write", table_id, n]                           keys and values; a null value deletes
    ["append", queue, partition, n, producer, seq]   n Arrow IPC messages, in the value column
    ["publish", queue, partition, staged_id], ["trim", queue, partition, index]      no rows
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from shuffle.errors import BadInput, TooLarge
from shuffle.limits import KIB, SECTIONS_BYTES_MAX, TICKET_BYTES_MAX, TRANSACTION_BYTES_MAX
from shuffle.statestore.codec.arrow_bytes import Binary, bytes_of, no_values, nulls_in, to_array, to_list
from shuffle.statestore.key_range import KeyRange
from shuffle.statestore.request import Append, CommitRequest, Precondition, Publish, ReadSet, TableWrite, Trim
from shuffle.statestore.wire.operations import SECTIONS, check_section
from shuffle.support.fields import parse_json, shown

FRAME = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])
EXCHANGE = b"statestore/1"
"""The command of the exchange's descriptor; its number changes when the form of the frames does."""

Header = dict[str, Any]
"""The JSON object of a request or a response."""

Rows = tuple[Binary, Binary]
"""The keys and the values of a message, as many of one as of the other."""

SMALL_PAYLOAD_BYTES_MAX = 64 * KIB
"""The size up to which copying a batch of a queue costs less than making an Arrow array of it."""

SECTIONS_IN_HEADER_MAX = 30
"""The most sections in a header: so many fit it, however long the names in them are."""

_to_json = json.JSONEncoder(separators=(",", ":")).encode
"""Encodes JSON without spaces. It is made once: ``json.dumps`` makes an encoder in each call with other separators."""


def encode_header(header: Header) -> bytes:
    return _to_json(header).encode()


def decode_header(data: bytes | None, bytes_max: int = TICKET_BYTES_MAX) -> Header:
    """The header of a request; for the header of a response, ``bytes_max`` is ``RESPONSE_HEADER_BYTES_MAX``."""
    if data is None:
        raise BadInput("a frame without a header")
    if len(data) > bytes_max:
        raise TooLarge(f"a header of {len(data)} bytes, more than {bytes_max}", limit=bytes_max)
    try:
        header = parse_json(data)
    except ValueError as error:
        raise BadInput(f"a frame whose header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise BadInput("a frame whose header is not a JSON object")
    return header


def frame(keys: Binary | None, values: Binary | None) -> pa.RecordBatch:
    """A record batch of the two columns; one that is None becomes a column of nulls."""
    return pa.RecordBatch.from_arrays([to_array(column) for column in rows_of(keys, values)], schema=FRAME)


def rows_of(keys: Binary | None, values: Binary | None) -> Rows:
    """Both columns; one that is None becomes a column of nulls."""
    if keys is not None:
        return keys, values if values is not None else no_values(keys)
    assert values is not None
    return no_values(values), values


def rows_in(batch: pa.RecordBatch | None) -> Rows | None:
    return None if batch is None else (batch.column(0), batch.column(1))


def check_rows(batch: pa.RecordBatch) -> None:
    """Raise ``BadInput`` unless it is safe to read these rows, which came from another process.

    Arrow uses the buffers of a message as they are. With an offset beyond the end of its buffer, a value would be read
    from other memory, so all offsets are checked before any value is read.
    """
    if not batch.schema.equals(FRAME):
        raise BadInput(f"a frame has a key and a value column of type binary, not {shown(str(batch.schema.names))}")
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise BadInput(f"a frame whose rows are broken: {error}") from None


def check_frame(batch: pa.RecordBatch) -> None:
    """``check_rows`` for the rows of a request, whose size is bounded as well."""
    check_rows(batch)
    size_bytes = bytes_of(batch.column(0)) + bytes_of(batch.column(1))
    if size_bytes > TRANSACTION_BYTES_MAX:
        raise TooLarge(f"a frame of {size_bytes} bytes, more than {TRANSACTION_BYTES_MAX}", bytes=size_bytes)


# --- buffers as binary values ---


def as_value(data: pa.Buffer) -> pa.Array:
    """A binary array of one value, ``data``, which is not copied."""
    return pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(np.array([0, data.size], np.int32)), data])


def as_values(pieces: Sequence[pa.Buffer]) -> pa.Array:
    """A binary array of these buffers, which are copied if there are several.

    It is not made by ``pa.array`` of memoryviews: Arrow never releases those, nor do they release their buffers.
    """
    if not pieces:
        return pa.array([], pa.binary())
    return as_value(pieces[0]) if len(pieces) == 1 else pa.concat_arrays([as_value(piece) for piece in pieces])


def as_buffers(values: Binary) -> list[pa.Buffer]:
    """The values of a binary array as slices of its buffer, without copies."""
    if isinstance(values, list):
        return [pa.py_buffer(value) for value in values]
    if not len(values):
        return []  # An empty array may have no offsets at all.
    _, offsets_buffer, data = values.buffers()
    if data is None:
        return [pa.py_buffer(b"")] * len(values)
    offsets = np.frombuffer(offsets_buffer, np.int32, len(values) + 1, values.offset * 4).tolist()
    return [data.slice(begin, end - begin) for begin, end in pairwise(offsets)]


# --- commits ---


def encode_commit(request: CommitRequest) -> tuple[list[list[Any]], Rows | None]:
    """The sections of a commit, and the rows that they describe."""
    sections: list[list[Any]] = []
    keys: list[Binary] = []
    values: list[Binary] = []

    def add(section: list[Any], key: Binary | None, value: Binary | None) -> None:
        filled_key, filled_value = rows_of(key, value)
        sections.append(section)
        keys.append(filled_key)
        values.append(filled_value)

    if request.reads is not None:
        for read in request.reads.keys:
            add(["read", len(read)], read, None)
        if request.reads.ranges:
            begins = [key_range.begin for key_range in request.reads.ranges]
            add(["range", len(begins)], begins, [key_range.end for key_range in request.reads.ranges])
    for expect in request.preconditions:
        add(["expect", expect.table_id, len(expect.keys)], expect.keys, expect.values)
    for write in request.writes:
        add(["write", write.table_id, len(write.keys)], write.keys, write.values)
    for append in request.appends:
        target = [append.queue_id, append.partition]
        if isinstance(append, Publish):
            sections.append(["publish", *target, append.staged_id])
            continue
        sections.append(["append", *target, len(append.payloads), append.producer, append.sequence])
        for payload in append.payloads:
            small = payload.size <= SMALL_PAYLOAD_BYTES_MAX
            keys.append([None])
            values.append([payload.to_pybytes()] if small else as_value(payload))
    sections.extend(["trim", trim.queue_id, trim.partition, trim.index] for trim in request.trims)
    if not keys:
        return sections, None
    return sections, (_joined(keys), _joined(values))


def pack_sections(sections: list[list[Any]], rows: Rows | None) -> tuple[list[list[Any]] | None, Rows | None]:
    """The sections for the header, and the rows. Too many sections go before the rows; the header then has None."""
    if len(sections) <= SECTIONS_IN_HEADER_MAX:
        return sections, rows
    keys, values = rows or ([], [])
    return None, (_joined([[None], keys]), _joined([[_to_json(sections).encode()], values]))


def unpack_sections(sections: list[Any] | None, rows: Rows | None) -> tuple[Any, Rows | None]:
    """The inverse of ``pack_sections``; the sections are not checked yet."""
    if sections is not None:
        return sections, rows
    if rows is None or not len(rows[0]):
        raise BadInput("a commit without sections")
    keys, values = rows
    [packed] = to_list(values[:1])
    if packed is None or len(packed) > SECTIONS_BYTES_MAX:
        raise TooLarge(f"the sections of a commit have 1 to {SECTIONS_BYTES_MAX} bytes", limit=SECTIONS_BYTES_MAX)
    try:
        return parse_json(packed), (keys[1:], values[1:])
    except ValueError as error:
        raise BadInput(f"a commit whose sections are not JSON: {error}") from None


def _joined(parts: list[Binary]) -> Binary:
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, list) for part in parts):
        return [value for part in parts for value in part]
    return pa.concat_arrays([to_array(part) for part in parts])


def decode_commit(version: int | None, sections: Any, rows: Rows | None) -> CommitRequest:
    """The commit that these sections and rows describe; ``sections`` is JSON that is not checked yet."""
    request = CommitRequest(reads=None if version is None else ReadSet(version))
    if type(sections) is not list:
        raise BadInput("a commit whose sections are not a list")
    taken = 0
    for section in sections:
        taken += _decode_section(request, section, rows, taken)
    if taken != (len(rows[0]) if rows is not None else 0):
        raise BadInput("a commit with more rows than its sections say")
    return request


def _decode_section(request: CommitRequest, section: Any, rows: Rows | None, at: int) -> int:
    """Add a section to the request. Returns the number of rows, from ``at`` on, that belong to it."""
    if type(section) is not list or not section or type(section[0]) is not str or section[0] not in SECTIONS:
        raise BadInput("a commit with an unknown section: client and store are of different versions")
    kind, *rest = section
    check_section(kind, *rest)
    if kind == "trim":
        request.trims.append(Trim(*rest))
        return 0
    if kind == "publish":
        request.appends.append(Publish(*rest))
        return 0
    count: int = rest[2] if kind == "append" else rest[-1]
    keys, values = rows or ([], [])
    if at + count > len(keys):
        raise BadInput("a commit with fewer rows than its sections say")
    keys, values = keys[at : at + count], values[at : at + count]
    if nulls_in(values if kind == "append" else keys):
        raise BadInput(f"a null in the section {kind!r} of a commit")
    if kind == "read":
        _reads(request).keys.append(keys)
    elif kind == "range":
        pairs = zip(to_list(keys), to_list(values), strict=True)
        _reads(request).ranges.extend(KeyRange(begin, end) for begin, end in pairs)
    elif kind == "append":
        queue_id, partition, _, producer, sequence = rest
        request.appends.append(Append(queue_id, partition, as_buffers(values), producer, sequence))
    elif kind == "expect":
        request.preconditions.append(Precondition(rest[0], keys, values))
    else:
        request.writes.append(TableWrite(rest[0], keys, values))
    return count


def _reads(request: CommitRequest) -> ReadSet:
    if request.reads is None:
        raise BadInput("a commit that names reads but not the version they were made at")
    return request.reads
