"""The format of segment files: where the rows of ordered tables are stored, once.

A segment is a header and a run of records, written front to back and never changed:

    header   8 B magic · 4 B format · 4 B length of the schema · the Arrow schema · padding to 8
    record   4 B magic · 4 B payload length · 8 B first row, counted from the segment's start · 4 B rows ·
             4 B zero · 8 B checksum · the payload: one Arrow IPC record-batch message, a multiple of 8

The checksum (xxh3, 64 bits) covers the numbers before it and the payload. A reader on another machine gets records as
they stand in the file, so it checks the very bytes that the writer wrote.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from dataclasses import dataclass

import pyarrow as pa
import xxhash

from shuffle.errors import CorruptData, FormatTooNew, SchemaMismatch

FORMAT = 1
_FILE_MAGIC = b"SHUFSEG\x01"
_FILE_HEAD = struct.Struct("<8sII")
_RECORD_MAGIC = b"REC1"
_RECORD_HEAD = struct.Struct("<4sIQII")
RECORD_HEAD_BYTES = _RECORD_HEAD.size + 8


def _padded(size: int) -> int:
    return (size + 7) & ~7


def encode_file_header(schema: pa.Schema) -> bytes:
    text: bytes = schema.serialize().to_pybytes()
    head = _FILE_HEAD.pack(_FILE_MAGIC, FORMAT, len(text))
    return (head + text).ljust(_padded(len(head) + len(text)), b"\0")


def file_header_bytes(data: memoryview, file: str) -> int:
    """The length of the header at the front of ``data``."""
    if len(data) < _FILE_HEAD.size:
        raise CorruptData(f"{file}: cut off inside its header", file=file, offset=len(data))
    magic, version, schema_bytes = _FILE_HEAD.unpack_from(data)
    if magic != _FILE_MAGIC:
        raise CorruptData(f"{file}: not a segment file", file=file, offset=0)
    if version > FORMAT:
        raise FormatTooNew(f"{file}: segment format {version}, this version reads up to {FORMAT}", file=file)
    return _padded(_FILE_HEAD.size + schema_bytes)


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


def decode_batch(record: pa.Buffer, schema: pa.Schema, file: str, offset: int) -> tuple[RecordHead, pa.RecordBatch]:
    """The rows of one record, its checksum found right, and without a copy. ``file`` and ``offset`` say where it is."""
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
    return head, decode_payload(record.slice(RECORD_HEAD_BYTES, head.payload_bytes), schema)


def decode_payload(payload: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    try:
        return pa.ipc.read_record_batch(payload, schema)
    except (pa.ArrowException, OSError) as error:
        raise SchemaMismatch(f"not a record batch of the queue's schema: {error}") from None


class RecordIndex:
    """Where each record of one segment begins, by row and by byte."""

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
        """Built by walking the records of a file up to what was committed; what lies behind is not looked at."""
        if len(data) < committed_bytes:
            raise CorruptData(
                f"{file}: {len(data)} bytes, but {committed_bytes} were acknowledged: the file was cut",
                file=file,
                offset=len(data),
            )
        view = data[:committed_bytes]
        index = RecordIndex(file_header_bytes(view, file))
        while index.size_bytes < committed_bytes:
            head = decode_head(view, index.size_bytes, file)
            index.add(head.first_row, head.size_bytes)
        return index
