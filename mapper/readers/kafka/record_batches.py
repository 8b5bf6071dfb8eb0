"""Record batches of Kafka's format 2 into columns, many records at a time, and without touching any of them in Python.

A record is numbers as zigzag varints and bytes behind their length, as Avro has them too. Behind the header of an Avro
file, the records of a batch are a block of that file, and polars reads all blocks into columns. Nothing that it returns
is believed without a check:

- the batch's own checksum (CRC32C) is compared before anything is read from it;
- of each record the length is computed again from its columns, and must be the one that it says; all of them together
  must be the whole batch, and as many as the batch says;
- offsets rise, and none is behind the last one of the batch.

A batch that does not fit this form (keys in some records only, headers, values that are null) is read record by record,
and so are batches of few records: to call polars costs as much as a hundred records do.

Records of aborted transactions are left out, and so are control records, as the plain client does.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from shuffle.formats.avro_types import varint_lengths
from shuffle.formats.framing import varint

HEADER = struct.Struct(">qiibIhiqqqhii")
CRC_FROM = 21
"""The checksum is over everything from the attributes on."""
SYNC = b"kafka.record.bat"
BATCH_BYTES_MAX = 128 * 1024 * 1024
"""The most bytes of a batch once it is not compressed any more."""

FEW_RECORDS = 64
"""Up to so many records are read one by one: half a millisecond less for each response of a topic with little in it."""

_CODECS = {1: "gzip", 3: "lz4", 4: "zstd"}
"""Snappy is left to the plain client: Kafka frames it in a way of its own."""

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Unfit(Exception):
    """Something that the fast path does not read, or that cannot be right; the plain client is to read it."""


class Batch(NamedTuple):
    """A record batch: what its header says, and the bytes of its records, not compressed."""

    base_offset: int
    last_offset: int
    leader_epoch: int
    base_timestamp_ms: int
    log_append_time: bool
    max_timestamp_ms: int
    record_count: int
    records: bytes | memoryview


class Columns(NamedTuple):
    """Records as columns."""

    offset: Numbers
    timestamp_ms: Numbers
    key: pa.Array
    value: pa.Array
    headers: list[list[tuple[str, bytes | None]] | None] | None
    """None if no record has any."""


def committed_batches(data: memoryview, aborted: Sequence[tuple[int, int]]) -> tuple[list[Batch], int]:
    """The batches of a response that hold rows, and the offset behind the last whole batch of it; -1 if there is none.

    ``aborted`` are producers with the first offset of a transaction of theirs that was aborted: from there on their
    records are left out, until the marker that ends the transaction.
    """
    waiting = sorted(aborted, key=lambda one: one[1])
    skipped: set[int] = set()
    found: list[Batch] = []
    after = -1
    for header, body in _whole_batches(data):
        base, attributes, last_delta, producer = header[0], header[5], header[6], header[9]
        after = base + last_delta + 1
        while waiting and waiting[0][1] < after:
            skipped.add(waiting.pop(0)[0])
        if attributes & 0x20:  # A control batch: one marker.
            if _is_abort(_plain(attributes, body)):
                skipped.discard(producer)
            continue
        if attributes & 0x10 and producer in skipped:
            continue
        found.append(
            Batch(
                base,
                base + last_delta,
                header[2],
                header[7],
                bool(attributes & 0x08),
                header[8],
                header[12],
                _plain(attributes, body),
            )
        )
    return found, after


def _whole_batches(data: memoryview) -> Iterator[tuple[tuple[Any, ...], memoryview]]:
    at = 0
    while at + HEADER.size <= len(data):
        header = HEADER.unpack_from(data, at)
        length, magic, checksum, count = header[1], header[3], header[4], header[12]
        end = at + 12 + length
        if magic != 2 or length < HEADER.size - 12 or count < 0:
            raise Unfit("a batch of another format")
        if end > len(data):
            return  # The rest of it did not fit into the response.
        if google_crc32c.value(bytes(data[at + CRC_FROM : end])) != checksum:
            raise Unfit("a batch whose checksum does not match")
        yield header, data[at + HEADER.size : end]
        at = end


def _plain(attributes: int, body: memoryview) -> bytes | memoryview:
    kind = attributes & 7
    if kind == 0:
        return body
    if kind not in _CODECS:
        raise Unfit(f"records compressed in way {kind}")
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), _CODECS[kind]) as stream:
            plain: bytes = stream.read(BATCH_BYTES_MAX + 1)
    except (OSError, pa.ArrowException) as error:
        raise Unfit(f"records that cannot be decompressed: {error}") from None
    if len(plain) > BATCH_BYTES_MAX:
        raise Unfit("a batch that is too large")
    return plain


def _is_abort(records: bytes | memoryview) -> bool:
    [(_, _, key, _, _)] = list(_each(memoryview(records), 1))
    if key is None or len(key) < 4:
        raise Unfit("a marker without a type")
    return bool(struct.unpack_from(">hh", key)[1] == 0)


# Many at a time ------------------------------------------------------------------------------------------------------


def _schema(with_key: bool) -> bytes:
    key = {"name": "key", "type": "bytes" if with_key else "long"}
    names = ["length", "attributes", "timestamp", "offset", "key", "value", "headers"]
    kinds: dict[str, Any] = dict.fromkeys(names, "long")
    kinds |= {"attributes": {"type": "fixed", "name": "one", "size": 1}, "key": key["type"], "value": "bytes"}
    schema = {"type": "record", "name": "r", "fields": [{"name": name, "type": kinds[name]} for name in names]}
    return json.dumps(schema).encode()


def _header(schema: bytes) -> bytes:
    metadata = {b"avro.schema": schema, b"avro.codec": b"null"}
    parts = [b"Obj\x01", varint(len(metadata))]
    for name, value in metadata.items():
        parts += [varint(len(name)), name, varint(len(value)), value]
    return b"".join([*parts, b"\0", SYNC])


_HEADERS = {with_key: _header(_schema(with_key)) for with_key in (False, True)}


def columns_of(batches: Sequence[Batch]) -> Columns:
    """The records of all batches, in their order."""
    parts = []
    few = sum(batch.record_count for batch in batches) <= FEW_RECORDS
    for with_key, run in _runs(batches):
        if few:
            parts += [_one_by_one(batch) for batch in run]
            continue
        try:
            parts.append(_many(run, with_key))
        except Unfit:
            parts += [_one_by_one(batch) for batch in run]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        nothing = np.empty(0, dtype=np.int64)
        return Columns(nothing, nothing, pa.array([], pa.binary()), pa.array([], pa.binary()), None)
    headers = None
    if any(part.headers is not None for part in parts):
        headers = [one for part in parts for one in (part.headers or [None] * len(part.offset))]
    return Columns(
        np.concatenate([part.offset for part in parts]),
        np.concatenate([part.timestamp_ms for part in parts]),
        pa.concat_arrays([part.key for part in parts]),
        pa.concat_arrays([part.value for part in parts]),
        headers,
    )


def _runs(batches: Sequence[Batch]) -> Iterator[tuple[bool, list[Batch]]]:
    """Batches in a row whose first records both have a key, or both have none."""
    run: list[Batch] = []
    with_key = False
    for batch in batches:
        if not batch.record_count:
            continue
        here = _first_has_key(batch)
        if run and here != with_key:
            yield with_key, run
            run = []
        with_key = here
        run.append(batch)
    if run:
        yield with_key, run


def _first_has_key(batch: Batch) -> bool:
    numbers = _Varints(memoryview(batch.records))
    numbers.next()
    numbers.at += 1
    numbers.next()
    numbers.next()
    return numbers.next() >= 0


def _many(batches: Sequence[Batch], with_key: bool) -> Columns:
    parts: list[bytes | memoryview] = [_HEADERS[with_key]]
    for batch in batches:
        parts += [varint(batch.record_count), varint(len(batch.records)), batch.records, SYNC]
    try:
        frame = pl.read_avro(io.BytesIO(b"".join(parts)))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # polars panics at bytes that it cannot read; a panic is no Exception.
        raise Unfit(f"no records: {type(error).__name__}") from None
    rows = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    counts = np.array([batch.record_count for batch in batches], dtype=np.int64)
    if rows.num_rows != counts.sum():
        raise Unfit("another number of records")
    offset, timestamp = _checked(rows, batches, counts, with_key)
    value = _binary(rows["value"])
    key = _binary(rows["key"]) if with_key else pa.nulls(len(value), pa.binary())
    return Columns(offset, timestamp, key, value, None)


def _checked(rows: pa.Table, batches: Sequence[Batch], counts: Numbers, with_key: bool) -> tuple[Numbers, Numbers]:
    """Offsets and times of the records, once everything else about them is right."""
    delta, time = _numbers(rows["offset"]), _numbers(rows["timestamp"])
    length, headers = _numbers(rows["length"]), _numbers(rows["headers"])
    value_bytes = _sizes(rows["value"])
    key = _numbers(rows["key"]) if not with_key else _sizes(rows["key"])
    inside = 1 + varint_lengths(time) + varint_lengths(delta) + varint_lengths(key) + 1
    inside += varint_lengths(value_bytes) + value_bytes + (key if with_key else 0)
    ends = np.cumsum(counts)
    taken = np.add.reduceat(length + varint_lengths(length), ends - counts)
    right = not headers.any() and (with_key or bool((key == -1).all())) and np.array_equal(inside, length)
    if not right or not np.array_equal(taken, [len(batch.records) for batch in batches]):
        raise Unfit("records of another form")
    rises = np.diff(delta) > 0
    rises[ends[:-1] - 1] = True  # From one batch to the next they begin anew.
    last = np.array([batch.last_offset - batch.base_offset for batch in batches], dtype=np.int64)
    if not rises.all() or (delta[ends - counts] < 0).any() or (delta[ends - 1] > last).any():
        raise Unfit("offsets that do not rise")
    offset = delta + np.repeat(np.array([batch.base_offset for batch in batches], dtype=np.int64), counts)
    times = time + np.repeat(np.array([batch.base_timestamp_ms for batch in batches], dtype=np.int64), counts)
    if any(batch.log_append_time for batch in batches):
        fixed = np.repeat(np.array([batch.max_timestamp_ms for batch in batches], dtype=np.int64), counts)
        times = np.where(np.repeat([batch.log_append_time for batch in batches], counts), fixed, times)
    return offset, times


def _numbers(column: pa.ChunkedArray) -> Numbers:
    found: Numbers = column.to_numpy()
    return found


def _sizes(column: pa.ChunkedArray) -> Numbers:
    return _numbers(pc.binary_length(column).cast(pa.int64()))


def _binary(column: pa.ChunkedArray) -> pa.Array:
    column = column.cast(pa.binary())
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


# One by one ----------------------------------------------------------------------------------------------------------


class _Varints:
    """Reads zigzag varints of some bytes."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def next(self) -> int:
        number = shift = 0
        while True:
            if self.at >= len(self.data) or shift > 63:
                raise Unfit("a number that does not end")
            byte = self.data[self.at]
            self.at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return (number >> 1) ^ -(number & 1)

    def bytes(self) -> bytes | None:
        size = self.next()
        if size < 0:
            return None
        if size > len(self.data) - self.at:
            raise Unfit("more bytes than there are")
        self.at += size
        return bytes(self.data[self.at - size : self.at])


def _each(data: memoryview, count: int) -> Iterator[tuple[int, int, bytes | None, bytes | None, Any]]:
    """(offset delta, time delta, key, value, headers) of each record."""
    reader = _Varints(data)
    for _ in range(count):
        length = reader.next()
        end = reader.at + length
        reader.at += 1
        time, offset = reader.next(), reader.next()
        key, value = reader.bytes(), reader.bytes()
        headers = [((reader.bytes() or b"").decode(errors="replace"), reader.bytes()) for _ in range(reader.next())]
        if reader.at != end:
            raise Unfit("a record of another length than it says")
        yield offset, time, key, value, headers or None
    if reader.at != len(data):
        raise Unfit("bytes behind the last record")


def _one_by_one(batch: Batch) -> Columns:
    found = list(_each(memoryview(batch.records), batch.record_count))
    times = [batch.max_timestamp_ms if batch.log_append_time else batch.base_timestamp_ms + one[1] for one in found]
    return Columns(
        np.array([batch.base_offset + one[0] for one in found], dtype=np.int64),
        np.array(times, dtype=np.int64),
        pa.array([one[2] for one in found], pa.binary()),
        pa.array([one[3] for one in found], pa.binary()),
        [one[4] for one in found] if any(one[4] for one in found) else None,
    )
