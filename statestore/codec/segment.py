"""The format of segment files: where the rows of ordered tables are stored, once.

A segment is a header and a run of records, written front to back and never changed:

    header   8 B magic · 4 B format · 4 B length of the schema · the Arrow schema · padding to 8
    record   4 B magic · 4 B payload length · 8 B first row, counted from the segment's start · 4 B rows ·
             4 B zero · 8 B checksum · the payload: one Arrow IPC record-batch message, a multiple of 8 (in the
             changelog of a table: one block, see ``row_block``)

The checksum (xxh3, 64 bits) covers the numbers before it and the payload. A reader on another machine gets records
exactly as they are in the file, so it checks the same bytes that the writer wrote.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import xxhash

from shuffle.errors import BadInput, CorruptData, FormatTooNew, SchemaMismatch, TooLarge
from shuffle.limits import BATCH_BYTES_MAX, BATCH_ROWS_MAX

FORMAT = 1
_FILE_MAGIC = b"SHUFSEG\x01"
_FILE_HEAD = struct.Struct("<8sII")
_RECORD_MAGIC = b"REC1"
_RECORD_HEAD = struct.Struct("<4sIQII")
RECORD_HEAD_BYTES = _RECORD_HEAD.size + 8

_MESSAGE_HEAD_BYTES = 8
"""The bytes in front of the metadata of an Arrow IPC message: FFFFFFFF, and the length of the metadata."""
_HEADER_OF_MESSAGE, _COMPRESSION = 2, 3
"""The numbers of these fields in the tables ``Message`` and ``RecordBatch`` of Arrow's ``Message.fbs``."""
_U16, _U32, _I32 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<i")


def _pad_to_8(size: int) -> int:
    return (size + 7) & ~7


def encode_file_header(schema: pa.Schema) -> bytes:
    text: bytes = schema.serialize().to_pybytes()
    head = _FILE_HEAD.pack(_FILE_MAGIC, FORMAT, len(text))
    return (head + text).ljust(_pad_to_8(len(head) + len(text)), b"\0")


def file_header_bytes(data: memoryview, file: str) -> int:
    """The length of the header at the front of ``data``."""
    if len(data) < _FILE_HEAD.size:
        raise CorruptData(f"{file}: cut off inside its header", file=file, offset=len(data))
    magic, version, schema_bytes = _FILE_HEAD.unpack_from(data)
    if magic != _FILE_MAGIC:
        raise CorruptData(f"{file}: not a segment file", file=file, offset=0)
    if version > FORMAT:
        raise FormatTooNew(f"{file}: segment format {version}, this version reads up to {FORMAT}", file=file)
    return _pad_to_8(_FILE_HEAD.size + schema_bytes)


def encode_record(first_row: int, rows: int, payload: pa.Buffer) -> list[bytes | memoryview]:
    """The parts of one record, in the order in which they are written."""
    head = _RECORD_HEAD.pack(_RECORD_MAGIC, payload.size, first_row, rows, 0)
    view = memoryview(payload)
    digest = xxhash.xxh3_64(head)
    digest.update(view)
    return [head, digest.intdigest().to_bytes(8, "little"), view]


def record_bytes(payload_bytes: int) -> int:
    return RECORD_HEAD_BYTES + payload_bytes


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The numbers at the front of a record."""

    payload_bytes: int
    first_row: int
    rows: int
    checksum: int

    @property
    def size_bytes(self) -> int:
        return RECORD_HEAD_BYTES + self.payload_bytes


def decode_head(data: memoryview, offset: int, file: str) -> RecordHead:
    if offset + RECORD_HEAD_BYTES > len(data):
        raise CorruptData(f"{file}: cut off inside a record at offset {offset}", file=file, offset=offset)
    magic, payload_bytes, first_row, rows, _ = _RECORD_HEAD.unpack_from(data, offset)
    if magic != _RECORD_MAGIC or offset + RECORD_HEAD_BYTES + payload_bytes > len(data):
        raise CorruptData(f"{file}: no whole record at offset {offset}", file=file, offset=offset)
    checksum = int.from_bytes(data[offset + _RECORD_HEAD.size : offset + RECORD_HEAD_BYTES], "little")
    return RecordHead(payload_bytes, first_row, rows, checksum)


def split_records(data: pa.Buffer, file: str, offset: int) -> list[pa.Buffer]:
    """The records that lie in ``data`` side by side; ``offset`` is where they begin in the file."""
    view, records, at = memoryview(data), [], 0
    while at < len(view):
        try:
            size_bytes = decode_head(view, at, file).size_bytes
        except CorruptData:
            raise CorruptData(
                f"{file}: no whole record at offset {offset + at}", file=file, offset=offset + at
            ) from None
        records.append(data.slice(at, size_bytes))
        at += size_bytes
    return records


def decode_record(record: pa.Buffer, file: str, offset: int) -> tuple[RecordHead, pa.Buffer]:
    """The head and the payload of one record, its checksum verified; ``file`` and ``offset`` are for errors."""
    data = memoryview(record)
    try:
        head = decode_head(data, 0, file)
    except CorruptData:
        raise CorruptData(f"{file}: no whole record at offset {offset}", file=file, offset=offset) from None
    digest = xxhash.xxh3_64(data[: _RECORD_HEAD.size])
    digest.update(data[RECORD_HEAD_BYTES : head.size_bytes])
    if digest.intdigest() != head.checksum:
        raise CorruptData(
            f"{file}: the checksum of the record at offset {offset} does not match: the file was damaged",
            file=file,
            offset=offset,
        )
    return head, record.slice(RECORD_HEAD_BYTES, head.payload_bytes)


def decode_batch(record: pa.Buffer, schema: pa.Schema, file: str, offset: int) -> tuple[RecordHead, pa.RecordBatch]:
    """The rows of one record, without a copy, its checksum verified; ``file`` and ``offset`` are for errors."""
    head, payload = decode_record(record, file, offset)
    return head, decode_payload(payload, schema)


def decode_records(
    records: Sequence[pa.Buffer], schema: pa.Schema, file: str, offset: int, segment_begin: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of neighbouring records, each record with the position of its first row.

    Each is checked and decoded when the iterator reaches it, so a caller that stops early does not pay for the rest.
    ``segment_begin`` is the position of the segment's row 0, from which records count their rows.
    """
    for record in records:
        head, batch = decode_batch(record, schema, file, offset)
        yield segment_begin + head.first_row, batch
        offset += record.size


def decode_payload(payload: pa.Buffer | pa.ipc.Message, schema: pa.Schema) -> pa.RecordBatch:
    """The rows of a payload that is known to be valid: the store has accepted it, and its checksum was verified."""
    try:
        return pa.ipc.read_record_batch(payload, schema)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise SchemaMismatch(f"not a record batch of the queue's schema: {error}") from None


def validate_payload(payload: pa.Buffer, schema: pa.Schema, not_null: Sequence[int]) -> int:
    """Validates a payload from a client and returns its number of rows; raises ``BadInput`` if it is not valid.

    ``not_null`` are the columns of the schema that must have no nulls.

    Every later reader trusts the payload. Arrow does not check offsets before it uses them: a batch with offsets beyond
    their buffer crashes each process that reads it, and again after each restart. Compressed payloads are refused, as
    no client of this project compresses: a few bytes could become gigabytes before their size is known.
    """
    if payload.size > BATCH_BYTES_MAX:
        raise TooLarge(f"a batch of {payload.size} bytes, more than {BATCH_BYTES_MAX}", limit=BATCH_BYTES_MAX)
    try:
        message = pa.ipc.read_message(payload)
        compressed = _is_compressed(memoryview(message.metadata)) if message.type == "record batch" else False
    except (pa.ArrowException, OSError, EOFError, struct.error) as error:
        raise BadInput(f"not a message of Arrow: {error}") from None
    body_bytes = message.body.size if message.body is not None else 0
    if compressed or payload.size % 8 or payload.size != _MESSAGE_HEAD_BYTES + message.metadata.size + body_bytes:
        raise BadInput("a batch is one Arrow IPC message, not compressed, a multiple of 8 bytes, and nothing behind it")
    batch = decode_payload(message, schema)
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise SchemaMismatch(f"a record batch that is broken: {error}") from None
    if batch.num_rows > BATCH_ROWS_MAX:
        raise TooLarge(f"a batch of {batch.num_rows} rows, more than {BATCH_ROWS_MAX}", limit=BATCH_ROWS_MAX)
    for index in not_null:
        if batch.column(index).null_count:
            raise SchemaMismatch(f"null in the column {schema.names[index]!r}, which is declared not nullable")
    return int(batch.num_rows)


def _is_compressed(metadata: memoryview) -> bool:
    """Says whether a record batch's header has the field ``compression``. Arrow itself only tells after unpacking.

    The metadata is a flatbuffer, which Arrow has verified. It begins with the offset of the root table; a table begins
    with the distance back to its list of fields, which has the offset of each field in the table, or 0.
    """
    message = _U32.unpack_from(metadata, 0)[0]
    header = _field_at(metadata, message, _HEADER_OF_MESSAGE)
    return header > 0 and _field_at(metadata, header + _U32.unpack_from(metadata, header)[0], _COMPRESSION) > 0


def _field_at(metadata: memoryview, table: int, field: int) -> int:
    """The offset of a field of a table; 0 if the table does not have it."""
    fields = table - _I32.unpack_from(metadata, table)[0]
    entry = 4 + 2 * field
    if fields < 0 or entry >= _U16.unpack_from(metadata, fields)[0]:
        return 0
    offset = _U16.unpack_from(metadata, fields + entry)[0]
    return table + offset if offset else 0


class RecordIndex:
    """The first row and the offset of each record of one segment."""

    __slots__ = ("_first_rows", "_offsets", "size_bytes")

    def __init__(self, header_bytes: int) -> None:
        self._first_rows = array("Q")
        self._offsets = array("Q")
        self.size_bytes = header_bytes

    def add(self, first_row: int, size_bytes: int) -> None:
        self._first_rows.append(first_row)
        self._offsets.append(self.size_bytes)
        self.size_bytes += size_bytes

    def find(self, row: int) -> int:
        """The number of the record that holds ``row``."""
        return bisect_right(self._first_rows, row) - 1

    def __len__(self) -> int:
        return len(self._offsets)

    def offset(self, record: int) -> int:
        return self._offsets[record] if record < len(self._offsets) else self.size_bytes

    def first_row(self, record: int) -> int:
        return self._first_rows[record]

    @staticmethod
    def load(data: memoryview, committed_bytes: int, file: str) -> RecordIndex:
        """Builds the index from the records of a file up to ``committed_bytes``; bytes after that are not read.

        Records count their rows from the segment's start, so a missing record is noticed.
        """
        if len(data) < committed_bytes:
            raise CorruptData(
                f"{file}: {len(data)} bytes, but {committed_bytes} were acknowledged: the file was cut",
                file=file,
                offset=len(data),
            )
        view = data[:committed_bytes]
        index = RecordIndex(file_header_bytes(view, file))
        rows = 0
        while index.size_bytes < committed_bytes:
            head = decode_head(view, index.size_bytes, file)
            if head.first_row != rows:
                raise CorruptData(
                    f"{file}: the record at offset {index.size_bytes} begins with row {head.first_row} and not "
                    f"with row {rows}: the file was damaged",
                    file=file,
                    offset=index.size_bytes,
                )
            index.add(head.first_row, head.size_bytes)
            rows += head.rows
        if index.size_bytes != committed_bytes:
            raise CorruptData(f"{file}: its header is longer than the file: it was damaged", file=file, offset=0)
        return index
