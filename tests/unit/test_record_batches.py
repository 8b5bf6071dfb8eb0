"""Record batches into columns: each form of record, and nothing that is damaged is taken for a row."""

from __future__ import annotations

import random
import struct
from typing import Any

import google_crc32c
import pyarrow as pa
import pytest

from shuffle.formats.framing import varint
from shuffle.mapper.readers.kafka import record_batches
from shuffle.mapper.readers.kafka.record_batches import HEADER, Columns, Unfit, columns_of, committed_batches
from shuffle.mapper.readers.kafka.wire import BadResponse, fetch_request, parse_response

Record = tuple[int, int, bytes | None, bytes | None, list[tuple[bytes, bytes | None]]]
"""Offset delta, time delta, key, value, headers."""


@pytest.fixture(params=["few", "many"], autouse=True)
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches here are small, and must be read in the way of large ones, too."""
    if request.param == "many":
        monkeypatch.setattr(record_batches, "FEW_RECORDS", 0)


def zigzag(number: int) -> bytes:
    raw = number << 1 if number >= 0 else (-number << 1) - 1
    parts = bytearray()
    while raw > 0x7F:
        parts.append(raw & 0x7F | 0x80)
        raw >>= 7
    return bytes([*parts, raw])


def sized(value: bytes | None) -> bytes:
    return zigzag(-1) if value is None else varint(len(value)) + value


def record_bytes(record: Record) -> bytes:
    offset, time, key, value, headers = record
    body = b"\0" + zigzag(time) + zigzag(offset) + sized(key) + sized(value) + varint(len(headers))
    for name, content in headers:
        body += sized(name) + sized(content)
    return varint(len(body)) + body


def batch_bytes(
    base: int, records: list[Record], attributes: int = 0, producer: int = -1, last: int | None = None
) -> bytes:
    body = b"".join(record_bytes(record) for record in records)
    if attributes & 7 == 4:
        body = pa.compress(body, codec="zstd", asbytes=True)
    last = records[-1][0] if last is None else last
    tail = struct.pack(">hiqqqhii", attributes, last, 1_000, 2_000, producer, 0, -1, len(records)) + body
    return struct.pack(">qiibI", base, 9 + len(tail), 7, 2, google_crc32c.value(tail)) + tail


def plain(count: int, key: bytes | None = None, begin: int = 0) -> list[Record]:
    return [(begin + n, n * 3 - 1, key, b"v%d" % n, []) for n in range(count)]


def read(data: bytes, aborted: Any = ()) -> tuple[Columns, int]:
    batches, after = committed_batches(memoryview(data), aborted)
    return columns_of(batches), after


def test_records_become_columns() -> None:
    columns, after = read(batch_bytes(100, plain(5)) + batch_bytes(200, plain(3, b"k")))
    assert columns.offset.tolist() == [100, 101, 102, 103, 104, 200, 201, 202]
    assert columns.timestamp_ms.tolist() == [999, 1002, 1005, 1008, 1011, 999, 1002, 1005]
    assert columns.value.to_pylist() == [b"v0", b"v1", b"v2", b"v3", b"v4", b"v0", b"v1", b"v2"]
    assert columns.key.to_pylist() == [None] * 5 + [b"k"] * 3
    assert columns.headers is None
    assert after == 203


@pytest.mark.parametrize("attributes", [0, 4])
def test_many_at_a_time_is_as_one_by_one(attributes: int) -> None:
    chance = random.Random(2)
    for with_key in (False, True):
        records = [
            (n * 2, chance.randrange(-(2**40), 2**40), b"k" * chance.randrange(200) if with_key else None, value, [])
            for n, value in enumerate(chance.randbytes(chance.choice([0, 1, 63, 64, 9_000])) for _ in range(300))
        ]
        batches, _ = committed_batches(memoryview(batch_bytes(5, records, attributes)), ())
        many, single = record_batches._many(batches, with_key), record_batches._one_by_one(batches[0])
        assert many.offset.tolist() == single.offset.tolist()
        assert many.timestamp_ms.tolist() == single.timestamp_ms.tolist()
        assert many.key.equals(single.key)
        assert many.value.equals(single.value)


def test_records_of_other_forms_are_read_one_by_one() -> None:
    odd: list[Record] = [
        (0, 0, None, b"a", []),
        (1, 0, b"k", b"b", []),
        (2, 0, b"", None, []),
        (3, 0, None, b"d", [(b"h", b"1"), (b"h", None)]),
    ]
    columns, _ = read(batch_bytes(0, plain(3)) + batch_bytes(10, odd) + batch_bytes(20, plain(2, b"x")))
    assert columns.offset.tolist() == [0, 1, 2, 10, 11, 12, 13, 20, 21]
    assert columns.key.to_pylist()[3:7] == [None, b"k", b"", None]
    assert columns.value.to_pylist()[3:7] == [b"a", b"b", None, b"d"]
    assert columns.headers is not None
    assert columns.headers[6] == [("h", b"1"), ("h", None)]
    assert columns.headers[0] is None


def marker(base: int, producer: int, abort: bool) -> bytes:
    return batch_bytes(base, [(0, 0, struct.pack(">hh", 0, 0 if abort else 1), b"", [])], 0x30, producer)


def test_aborted_records_and_markers_are_left_out() -> None:
    data = batch_bytes(0, plain(2), 0x10, 1) + batch_bytes(2, plain(2), 0x10, 2) + marker(4, 1, True)
    data += batch_bytes(5, plain(2), 0x10, 1) + marker(7, 2, False) + marker(8, 1, False)
    columns, after = read(data, [(1, 0)])
    assert columns.offset.tolist() == [2, 3, 5, 6], "the second transaction of producer 1 is committed"
    assert after == 9
    assert read(marker(9, 1, True), [(1, 0)])[1] == 10


def test_batch_that_did_not_fit_into_the_response_is_left_for_the_next() -> None:
    data = batch_bytes(0, plain(3)) + batch_bytes(3, plain(3))
    columns, after = read(data[:-1])
    assert columns.offset.tolist() == [0, 1, 2]
    assert after == 3
    assert read(data[:20])[1] == -1


def test_damaged_batch_is_never_taken_for_rows() -> None:
    data = batch_bytes(50, plain(20))
    chance = random.Random(4)
    good = read(data)[0].value.to_pylist()
    for _ in range(500):
        damaged = bytearray(data)
        # The offset and the leader's epoch are not under the checksum: a broker writes them without reading the rest.
        at = chance.randrange(16, len(data))
        damaged[at] ^= 1 << chance.randrange(8)
        with pytest.raises(Unfit):
            assert read(bytes(damaged))[0].value.to_pylist() != good


@pytest.mark.parametrize(
    "records",
    [
        [(1, 0, None, b"a", []), (0, 0, None, b"b", [])],
        [(0, 0, None, b"a", []), (0, 0, None, b"b", [])],
    ],
)
def test_offsets_that_do_not_rise_are_not_believed_many_at_a_time(records: list[Record]) -> None:
    batches, _ = committed_batches(memoryview(batch_bytes(0, records, last=1)), ())
    with pytest.raises(Unfit, match="do not rise"):
        record_batches._many(batches, False)


def test_lengths_that_lie_are_found_one_by_one() -> None:
    record = bytearray(record_bytes((0, 0, None, b"abc", [])))
    record[0] += 2
    tail = struct.pack(">hiqqqhii", 0, 0, 0, 0, -1, 0, -1, 1) + bytes(record)
    data = struct.pack(">qiibI", 0, 9 + len(tail), 0, 2, google_crc32c.value(tail)) + tail
    with pytest.raises(Unfit):
        read(data)
    assert HEADER.size == 61


# Fetch ---------------------------------------------------------------------------------------------------------------


def response(records: bytes, topic: bytes = b"orders", partition: int = 3, correlation: int = 9) -> bytes:
    head = struct.pack(">iihii", correlation, 0, 0, 0, 1) + struct.pack(">h", len(topic)) + topic
    head += struct.pack(">iihqqqi", 1, partition, 0, 10, 8, 0, 1) + struct.pack(">qq", 77, 5)
    return head + struct.pack(">ii", -1, len(records)) + records


def test_response_is_read_as_it_was_asked_for() -> None:
    found = parse_response(memoryview(response(b"abc")), 9, "orders", 3)
    assert (found.error_code, found.last_stable_offset, found.aborted) == (0, 8, ((77, 5),))
    assert bytes(found.records) == b"abc"
    request = fetch_request(9, "orders", 3, 17, -1, 100, 1_000)
    assert struct.unpack_from(">ihhi", request) == (len(request) - 4, 1, 11, 9)


@pytest.mark.parametrize(
    "data",
    [
        response(b"abc", topic=b"others"),
        response(b"abc", partition=4),
        response(b"abc", correlation=8),
        response(b"abc")[:-1],
        response(b"")[:30],
        b"",
    ],
)
def test_response_to_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(BadResponse):
        parse_response(memoryview(data), 9, "orders", 3)
