"""The bytes of a segment file: written, read back, and refused with file and offset when they were changed."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shuffle.errors import BadInput, CorruptData, FormatTooNew, SchemaMismatch, TooLarge
from shuffle.statestore.codec.segment import (
    RECORD_HEAD_BYTES,
    RecordIndex,
    decode_batch,
    decode_head,
    decode_payload,
    encode_file_header,
    encode_record,
    file_header_bytes,
    record_bytes,
    validate_payload,
)

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])


def batch(first: int, count: int) -> pa.RecordBatch:
    numbers = range(first, first + count)
    return pa.record_batch({"n": list(numbers), "s": [f"row {n}" for n in numbers]}, schema=SCHEMA)


def segment(*counts: int) -> tuple[bytes, list[int]]:
    """A file with one record for each count, and where each begins."""
    data, offsets, rows = encode_file_header(SCHEMA), [], 0
    for count in counts:
        offsets.append(len(data))
        data += b"".join(encode_record(rows, count, batch(rows, count).serialize()))
        rows += count
    return data, offsets


def test_header_and_records_are_aligned_and_counted() -> None:
    data, offsets = segment(3, 5)
    assert file_header_bytes(memoryview(data), "f") == offsets[0]
    assert all(offset % 8 == 0 for offset in [*offsets, len(data)])
    payload = batch(0, 3).serialize()
    assert offsets[1] - offsets[0] == record_bytes(payload.size)
    head = decode_head(memoryview(data), offsets[1], "f")
    assert (head.first_row, head.rows, head.size_bytes) == (3, 5, len(data) - offsets[1])


def test_index_finds_the_record_of_every_row() -> None:
    data, offsets = segment(3, 1, 5)
    index = RecordIndex.load(memoryview(data), len(data), "f")
    assert len(index) == 3
    assert [index.find(row) for row in range(9)] == [0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert [index.offset(record) for record in range(4)] == [*offsets, len(data)]
    assert [index.first_row(record) for record in range(3)] == [0, 3, 4]


def test_bytes_behind_what_was_committed_are_not_looked_at() -> None:
    data, offsets = segment(3, 5)
    torn = data[: offsets[1] + 20]
    index = RecordIndex.load(memoryview(torn), offsets[1], "f")
    assert len(index) == 1
    assert index.size_bytes == offsets[1]


def test_rows_come_back() -> None:
    data, offsets = segment(3, 5)
    for offset, first, count in ((offsets[0], 0, 3), (offsets[1], 3, 5)):
        head = decode_head(memoryview(data), offset, "f")
        record = pa.py_buffer(data).slice(offset, head.size_bytes)
        decoded_head, rows = decode_batch(record, SCHEMA, "f", offset)
        assert decoded_head == head
        assert rows.equals(batch(first, count))


@pytest.mark.parametrize("at", [0, 4, 9, 17, 21, 24, 31, 32, 60, -1])
def test_any_changed_byte_of_a_record_is_found(at: int) -> None:
    data, offsets = segment(4)
    record = bytearray(data[offsets[0] :])
    record[at] ^= 0x10
    with pytest.raises(CorruptData, match=rf"seg-1.*offset {offsets[0]}\b") as caught:
        decode_batch(pa.py_buffer(bytes(record)), SCHEMA, "seg-1", offsets[0])
    assert (caught.value.file, caught.value.offset) == ("seg-1", offsets[0])


@pytest.mark.parametrize("kept", [0, 7, RECORD_HEAD_BYTES - 1, RECORD_HEAD_BYTES, RECORD_HEAD_BYTES + 8])
def test_file_cut_inside_what_was_committed_is_refused(kept: int) -> None:
    data, offsets = segment(4, 4)
    cut = memoryview(data[: offsets[1] + kept])
    with pytest.raises(CorruptData, match="acknowledged") as caught:
        RecordIndex.load(cut, len(data), "seg-1")
    assert caught.value.offset == len(cut)
    if kept:
        with pytest.raises(CorruptData) as caught:
            RecordIndex.load(cut, len(cut), "seg-1")
        assert caught.value.offset == offsets[1]


def test_header_that_passes_over_records_is_noticed() -> None:
    data, offsets = segment(4, 4)
    at = struct.calcsize("<8sI")  # Where the header says how long the schema is.
    [schema_bytes] = struct.unpack_from("<I", data, at)
    for skipped in (offsets[1] - offsets[0], len(data)):
        longer = bytearray(data)
        struct.pack_into("<I", longer, at, schema_bytes + skipped)
        with pytest.raises(CorruptData, match="damaged"):
            RecordIndex.load(memoryview(longer), len(data), "f")


def test_foreign_and_newer_files_are_refused() -> None:
    with pytest.raises(CorruptData, match="not a segment"):
        file_header_bytes(memoryview(b"PAR1" * 10), "f")
    with pytest.raises(CorruptData, match="cut off"):
        file_header_bytes(memoryview(b"SHUF"), "f")
    newer = bytearray(encode_file_header(SCHEMA))
    newer[8] = 99
    with pytest.raises(FormatTooNew, match="format 99"):
        file_header_bytes(memoryview(newer), "f")


def test_rows_of_another_schema_are_refused() -> None:
    payload = pa.record_batch({"x": [1]}).serialize()
    record = pa.py_buffer(b"".join(encode_record(0, 1, payload)))
    with pytest.raises(SchemaMismatch):
        decode_batch(record, SCHEMA, "f", 0)


# --- what is taken in ---

NESTED = [
    pa.array([["a", None], [], None], pa.list_(pa.string())),
    pa.array([[1], [2, 3], []], pa.large_list(pa.int8())),
    pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}]),
    pa.array([[1, 2], [3, 4], None], pa.list_(pa.int32(), 2)),
    pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
    pa.array(["short", "a string that is too long to be inlined", None], pa.string_view()),
    pa.array([b"x" * 40, None, b""], pa.binary_view()),
    pa.array([[1], [2, 3], []], pa.list_view(pa.int64())),
    pa.array([b"abcd", None, b"efgh"], pa.binary(4)),
    pa.array([None, None, None], pa.null()),
    pa.array([True, None, False]),
]


@pytest.mark.parametrize("column", NESTED, ids=lambda column: str(column.type))
def test_batches_of_every_type_of_a_queue_are_taken_in(column: pa.Array) -> None:
    rows = pa.record_batch({"c": pa.concat_arrays([column, column])})
    for part in (rows, rows.slice(2, 3), rows.slice(0, 0)):
        assert validate_payload(part.serialize(), rows.schema, []) == part.num_rows
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
            writer.write_batch(part)
        messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(sink.getvalue()))
        messages.read_next_message()
        with pytest.raises(BadInput, match="not compressed"):
            validate_payload(messages.read_next_message().serialize(), rows.schema, [])


def test_batch_of_too_many_bytes_or_rows_is_not_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = batch(0, 100).serialize()
    assert validate_payload(rows, SCHEMA, [0]) == 100
    monkeypatch.setattr("shuffle.statestore.codec.segment.BATCH_ROWS_MAX", 99)
    with pytest.raises(TooLarge) as caught:
        validate_payload(rows, SCHEMA, [0])
    assert caught.value.limit == 99
    monkeypatch.setattr("shuffle.statestore.codec.segment.BATCH_BYTES_MAX", 99)
    with pytest.raises(TooLarge, match="bytes"):
        validate_payload(rows, SCHEMA, [0])


def test_null_where_there_must_be_none_is_not_taken_in() -> None:
    rows = pa.record_batch({"n": pa.array([1, None], pa.int64()), "s": ["a", None]}, schema=SCHEMA).serialize()
    assert validate_payload(rows, SCHEMA, []) == 2
    with pytest.raises(SchemaMismatch, match="'s'"):
        validate_payload(rows, SCHEMA, [1])


@given(at=st.integers(0, 1000), value=st.integers(0, 255), cut=st.integers(0, 8))
def test_any_damaged_batch_is_refused_or_can_be_read(at: int, value: int, cut: int) -> None:
    data = bytearray(batch(0, 5).serialize())
    data[at % len(data)] = value
    damaged = pa.py_buffer(bytes(data[: len(data) - cut]))
    try:
        rows = validate_payload(damaged, SCHEMA, [])
    except BadInput:
        return
    decoded = decode_payload(damaged, SCHEMA)
    assert decoded.num_rows == rows
    assert len(decoded.to_pylist()) == rows
