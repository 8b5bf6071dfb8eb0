"""Frames of the data plane: commits there and back, and what is refused when it is not a frame."""

from __future__ import annotations

import contextlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shuffle.errors import BadInput, TooLarge
from shuffle.limits import TICKET_BYTES_MAX
from shuffle.statestore.codec.arrow_bytes import to_list
from shuffle.statestore.key_range import KeyRange
from shuffle.statestore.request import Append, CommitRequest, Precondition, Publish, ReadSet, TableWrite, Trim
from shuffle.statestore.wire.lane_frames import (
    REQUEST_BYTES_MAX,
    decode_frame,
    encode_committed,
    encode_frame,
    frame_bytes,
    is_small,
)
from shuffle.statestore.wire.messages import (
    FRAME,
    Header,
    Rows,
    as_buffers,
    as_value,
    as_values,
    check_frame,
    decode_commit,
    decode_header,
    encode_commit,
    encode_header,
    frame,
    pack_sections,
    rows_in,
    unpack_sections,
)


def binary(*values: bytes | None) -> pa.BinaryArray:
    return pa.array(values, pa.binary())


def plain(request: CommitRequest) -> dict[str, Any]:
    """A request as something that can be compared."""
    reads = request.reads
    return {
        "version": None if reads is None else reads.version,
        "keys": [] if reads is None else [key for keys in reads.keys for key in to_list(keys)],
        "ranges": [] if reads is None else reads.ranges,
        "expects": [(one.table_id, to_list(one.keys), to_list(one.values)) for one in request.preconditions],
        "writes": [(write.table_id, to_list(write.keys), to_list(write.values)) for write in request.writes],
        "appends": [
            append
            if isinstance(append, Publish)
            else (
                append.queue_id,
                append.partition,
                [bytes(p) for p in append.payloads],
                append.producer,
                append.sequence,
            )
            for append in request.appends
        ],
        "trims": request.trims,
    }


def over_flight(header: Header, rows: Rows | None) -> tuple[Header, Rows | None]:
    """Through the bytes of an IPC stream."""
    if rows is None:
        return decode_header(encode_header(header)), None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, FRAME) as writer:
        writer.write_batch(frame(*rows))
    batch = pa.ipc.open_stream(sink.getvalue()).read_next_batch()
    check_frame(batch)
    return decode_header(encode_header(header)), rows_in(batch)


def over_the_lane(header: Header, rows: Rows | None) -> tuple[Header, Rows | None]:
    data = encode_frame(header, None if rows is None else (to_list(rows[0]), to_list(rows[1])))
    assert frame_bytes(data) == len(data)
    return decode_frame(data)


def sent(request: CommitRequest) -> CommitRequest:
    """As over the network: both ways, which have to agree."""
    sections, rows = encode_commit(request)
    version = None if request.reads is None else request.reads.version
    found = []
    for way in (over_flight, over_the_lane):
        packed, packed_rows = pack_sections(sections, rows)
        header, received = way({"sections": packed}, packed_rows)
        found.append(decode_commit(version, *unpack_sections(header["sections"], received)))
    assert plain(found[0]) == plain(found[1])
    return found[0]


def test_commit_of_every_kind_of_part_comes_through() -> None:
    request = CommitRequest(
        reads=ReadSet(7, [binary(b"a", b""), binary(b"z")], [KeyRange(b"", None), KeyRange(b"a", b"b")]),
        preconditions=[Precondition(2, binary(b"e1", b"e2"), binary(None, b"is"))],
        writes=[TableWrite(1, binary(b"k1", b"k2"), binary(b"v", None)), TableWrite(2, binary(b"\0"), binary(b""))],
        appends=[
            Append(3, 0, [pa.py_buffer(b"one"), pa.py_buffer(b"three")]),
            Publish(3, 1, "0123456789abcdef" * 2),
            Append(4, 9, [], "producer", -5),
            Append(4, 9, [pa.py_buffer(b"")], "producer", 2**62),
        ],
        trims=[Trim(3, 0, 12)],
    )
    assert plain(sent(request)) == plain(request)


def test_commit_of_more_parts_than_fit_a_header_comes_through() -> None:
    trims = [Trim(3, 0, n) for n in range(10_000)]
    for writes in ([], [TableWrite(1, binary(b"k"), binary(b"v"))], [TableWrite(1, [b"k"], [None])]):
        request = CommitRequest(writes=writes, trims=trims)
        assert plain(sent(request)) == plain(request)
    for rows in (None, ([], []), ([None], [None]), ([None], [b"{"])):
        with pytest.raises(BadInput):
            unpack_sections(None, rows)


def test_empty_commit_and_commit_without_rows_come_through() -> None:
    for request in (
        CommitRequest(),
        CommitRequest(reads=ReadSet(0)),
        CommitRequest(appends=[Publish(1, 0, "f" * 32)], trims=[Trim(1, 0, 1)]),
        CommitRequest(appends=[Append(1, 0, [])]),
        CommitRequest(reads=ReadSet(3, [binary()])),
    ):
        assert plain(sent(request)) == plain(request)


@given(
    keys=st.lists(st.binary(max_size=5)),
    values=st.lists(st.none() | st.binary(max_size=5)),
    payloads=st.lists(st.binary(max_size=5), max_size=4),
)
def test_any_commit_comes_through(keys: list[bytes], values: list[bytes | None], payloads: list[bytes]) -> None:
    rows = min(len(keys), len(values))
    write = TableWrite(1, binary(*keys)[:rows], binary(*values)[:rows])
    request = CommitRequest(ReadSet(1, [binary(*keys)]), [write], [Append(1, 0, [pa.py_buffer(p) for p in payloads])])
    assert plain(sent(request)) == plain(request)


def test_slices_are_sent_as_what_they_show() -> None:
    whole = binary(b"no", b"yes", b"also", b"no")
    request = CommitRequest(writes=[TableWrite(1, whole[1:3], whole[2:])])
    assert plain(sent(request))["writes"] == [(1, [b"yes", b"also"], [b"also", b"no"])]
    assert [bytes(part) for part in as_buffers(whole[1:3])] == [b"yes", b"also"]


def test_buffers_are_values() -> None:
    data = pa.py_buffer(b"abcdef")
    assert as_value(data).to_pylist() == [b"abcdef"]
    assert as_value(data).buffers()[2].address == data.address, "it is not copied"
    values = as_values([data.slice(0, 1), data.slice(1, 2), data.slice(3, 3)])
    assert values.to_pylist() == [b"a", b"bc", b"def"]
    assert [bytes(part) for part in as_buffers(values)] == [b"a", b"bc", b"def"]
    assert as_values([]).to_pylist() == []
    assert as_buffers(binary()) == []


def test_buffers_that_were_values_are_let_go() -> None:
    before = pa.total_allocated_bytes()
    for count in (1, 2):
        values = as_values([pa.allocate_buffer(1 << 20) for _ in range(count)])
        assert len(values) == count
    del values
    assert pa.total_allocated_bytes() < before + (1 << 20)


@pytest.mark.parametrize("data", [None, b"", b"{", b"[]", b"7", b"\xff"])
def test_header_that_is_no_json_object_is_refused(data: bytes | None) -> None:
    with pytest.raises(BadInput):
        decode_header(data)


def test_header_over_its_limit_is_refused() -> None:
    fits = encode_header({"x": "y" * (TICKET_BYTES_MAX - 8)})
    assert len(fits) == TICKET_BYTES_MAX
    assert decode_header(fits)
    with pytest.raises(TooLarge) as caught:
        decode_header(encode_header({"x": "y" * TICKET_BYTES_MAX}))
    assert caught.value.limit == TICKET_BYTES_MAX


@pytest.mark.parametrize(
    "sections",
    [
        [["write", 1, 3]],
        [["write", 1, -1]],
        [["write", 1, "two"]],
        [["write"]],
        [["expect", 1]],
        [["read", 1]],
        [["range", 1]],
        [["append", 1, 0]],
        [["append", 1, 0, 1, None, None, None]],
        [["publish", 1]],
        [["trim", 1, 2, 3, 4]],
        [["explode"]],
        [[]],
        [7],
        None,
    ],
)
def test_sections_that_make_no_sense_are_refused(sections: Any) -> None:
    with pytest.raises(BadInput):
        decode_commit(None, sections, ([b"a", b"b"], [None, None]))


def test_frame_of_other_columns_is_refused() -> None:
    with pytest.raises(BadInput, match="key and a value"):
        check_frame(pa.record_batch({"key": ["a"], "value": ["b"]}))


def test_oversized_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shuffle.statestore.wire.messages.TRANSACTION_BYTES_MAX", 100)
    check_frame(frame(binary(b"x" * 50), None))
    with pytest.raises(TooLarge):
        check_frame(frame(binary(b"x" * 101), None))


# --- the lane ---


@given(rows=st.none() | st.lists(st.tuples(st.none() | st.binary(max_size=5), st.none() | st.binary(max_size=5))))
def test_any_rows_come_through_the_lane(rows: list[tuple[bytes | None, bytes | None]] | None) -> None:
    given_rows = None if rows is None else ([key for key, _ in rows], [value for _, value in rows])
    header, found = over_the_lane({"op": "ä", "n": 1}, given_rows)
    assert header == {"op": "ä", "n": 1}
    assert found == given_rows


@given(data=st.binary(max_size=64))
def test_any_bytes_are_a_frame_or_refused(data: bytes) -> None:
    with contextlib.suppress(BadInput):
        header, _ = decode_frame(data)
        assert isinstance(header, dict)


@given(cut=st.integers(0, 60), at=st.integers(0, 60), value=st.integers(0, 255))
def test_damaged_frame_is_refused_or_has_as_many_keys_as_values(cut: int, at: int, value: int) -> None:
    data = bytearray(encode_frame({"op": "get"}, ([b"key", b"other"], [None, b"value"])))
    data[at % len(data)] = value
    with contextlib.suppress(BadInput):
        _, rows = decode_frame(bytes(data[: max(len(data) - cut, 0)]))
        assert rows is None or len(rows[0]) == len(rows[1])


@pytest.mark.parametrize("version", [0, 7, 2**63 - 1])
def test_answer_to_a_commit_is_filled_in_as_it_would_be_encoded(version: int) -> None:
    assert encode_committed(version) == encode_frame({"version": version, "appended": ()}, None)


def test_lane_takes_only_what_is_small_and_quickly_answered() -> None:
    assert is_small({"op": "bounds"}, None)
    assert is_small({"op": "commit"}, ([b"a"], [b"b"]))
    assert is_small({"op": "read", "local": True}, None)
    assert is_small({"op": "read"}, None)  # the question is; its answer is bytes of a file, which the kernel sends
    assert not is_small({"op": "scan"}, ([b"a"], [b"b"]))
    assert not is_small({}, None)
    assert not is_small({"op": "commit"}, (binary(b"a"), [b"b"]))
    assert not is_small({"op": "commit"}, ([b"a"], [bytes(REQUEST_BYTES_MAX)]))
    assert not is_small({"op": "commit"}, ([b"a"] * 2000, [None] * 2000))


def test_no_values_are_no_buffers_even_without_an_offset() -> None:
    nothing = pa.Array.from_buffers(pa.binary(), 0, [None, pa.py_buffer(b""), pa.py_buffer(b"")])
    assert as_buffers(nothing) == []
