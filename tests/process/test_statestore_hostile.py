"""Messages that lie, against a real daemon, over the lane and over Flight: each is refused alone, with one typed line.

Every test ends with ordinary clients writing, reading and appending: the daemon lives, and nobody else noticed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shuffle.errors import BadInput, CommitConflict, ShuffleError, from_wire
from shuffle.statestore import StateClient
from shuffle.statestore.codec.keys import table_prefix
from shuffle.statestore.codec.sorted_table import Table
from shuffle.statestore.engine.catalogue import CATALOGUE_PREFIX
from shuffle.statestore.wire.lane_frames import encode_frame
from shuffle.statestore.wire.messages import (
    EXCHANGE,
    FRAME,
    Header,
    Rows,
    as_value,
    decode_header,
    encode_header,
    frame,
)
from shuffle.support import flight
from tests.daemons import StoreProcess
from tests.process.test_statestore_lane import Talker, info
from tests.raw_flight import Message, messages_of
from tests.raw_flight import exchange as exchange_raw

NUMBERS = pa.schema([("n", pa.int64())])
LETTERS = pa.schema([("s", pa.string()), ("z", pa.null())])
LEAKS = ("Traceback", 'File "', ".py", "site-packages")

Ask = Callable[[Header, Rows | None], Header]


def on_the_lane(daemon: StoreProcess, header: Header, rows: Rows | None) -> Header:
    talker = Talker(daemon)
    answer = talker.ask(encode_frame(header, rows))
    talker.close()
    assert answer is not None, "it was answered"
    return answer


class Exchange:
    """Somebody on Flight who may say anything."""

    def __init__(self, daemon: StoreProcess, schema: pa.Schema = FRAME, command: bytes = EXCHANGE) -> None:
        self.client = flight.connect(info(daemon).flight_address)
        descriptor = flight.FlightDescriptor.for_command(command)
        self.writer, self.reader = self.client.do_exchange(descriptor, flight.call_options(20))
        self.writer.begin(schema)

    def ask(self, header: bytes, batch: pa.RecordBatch | None) -> Header:
        if batch is None:
            self.writer.write_metadata(header)
        else:
            self.writer.write_with_metadata(batch, header)
        return decode_header(self.reader.read_chunk().app_metadata.to_pybytes())

    def close(self) -> None:
        self.reader.cancel()
        self.client.close()


def over_flight(daemon: StoreProcess, header: Header, rows: Rows | None) -> Header:
    exchange = Exchange(daemon)
    answer = exchange.ask(encode_header(header), None if rows is None else frame(*rows))
    exchange.close()
    return answer


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path_factory.mktemp("hostile") / "state") as running:
        with StateClient.connect(running.address) as client:
            client.create_table("t", key=NUMBERS, value=pa.schema([("v", pa.string())]))
            client.create_table("secret", key=NUMBERS, value=pa.schema([("v", pa.string())]))
            client.create_queue("q", schema=NUMBERS, partitions=1)
            client.create_queue("letters", schema=LETTERS, partitions=1)
        yield running
        assert "Traceback" not in running.errors()
        assert running.stop() == 0


@pytest.fixture(params=[on_the_lane, over_flight])
def ask(daemon: StoreProcess, request: pytest.FixtureRequest) -> Iterator[Ask]:
    with StateClient.connect(daemon.address) as client:
        yield lambda header, rows: request.param(daemon, header, rows)
        works(client)


def works(client: StateClient) -> None:
    with client.transaction() as tx:
        tx.write("t", pa.table({"n": [1], "v": ["one"]}))
        tx.append("q", 0, pa.table({"n": [1]}))
        tx.append("letters", 0, pa.table({"s": ["a"], "z": pa.nulls(1)}))
        tx.commit()
    assert client.scan("t").read_all().to_pylist() == [{"n": 1, "v": "one"}]
    begin, end = client.queue("letters").bounds()[0]
    assert client.queue("letters").read(0, begin)[1] == end


def refused(answer: Header, kind: type[ShuffleError] = BadInput) -> str:
    error = from_wire(answer["error"])
    assert isinstance(error, kind), error
    assert not any(leak in answer["error"] for leak in LEAKS)
    assert "\n" not in error.message
    return error.message


def commit(*sections: Any, **fields: Any) -> Header:
    return {"op": "commit", "sections": [*sections], **fields}


def ids(daemon: StoreProcess) -> dict[str, int]:
    with StateClient.connect(daemon.address) as client:
        tables = {schema.name: schema.table_id for schema in client.tables()}
        return tables | {schema.name: schema.queue_id for schema in client.queues()}


# --- payloads that lie ---


def lying(
    offsets: list[int], data: bytes, kind: pa.DataType, batch_of: Callable[[pa.Array], pa.RecordBatch]
) -> pa.RecordBatch:
    """A batch with a column whose offsets are not those of ``data``."""
    told = np.linspace(0, len(data), len(offsets)).astype(np.int32)
    column = pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(told), pa.py_buffer(data)])
    batch = batch_of(column)
    told[:] = offsets  # Arrow has looked at the others.
    return batch


def lines(column: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([column, pa.nulls(len(column))], schema=LETTERS)


def lie(*offsets: int, data: bytes = b"12345678") -> bytes:
    return lying([*offsets], data, pa.string(), lines).serialize().to_pybytes()  # type: ignore[no-any-return]


def patched(payload: bytes, before: int, after: int) -> bytes:
    """With each 64-bit number that is ``before`` made ``after``: the rows, the length of a column, its nulls."""
    at = range(0, len(payload) - 7, 4)
    found = bytearray(payload)
    for place in at:
        if payload[place : place + 8] == struct.pack("<q", before):
            found[place : place + 8] = struct.pack("<q", after)
    assert found != payload
    return bytes(found)


def compressed(codec: str) -> bytes:
    batch = pa.record_batch([pa.array(["a" * 1_000_000]), pa.nulls(1)], schema=LETTERS)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, LETTERS, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(batch)
    messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(sink.getvalue()))
    messages.read_next_message()
    return messages.read_next_message().serialize().to_pybytes()  # type: ignore[no-any-return]


def only_nulls(rows: int) -> bytes:
    """A batch of the queue's second column alone would do; its first has no rows of its own in there."""
    schema = pa.schema([("z", pa.null())])
    return patched(pa.record_batch([pa.nulls(7)], schema=schema).serialize().to_pybytes(), 7, rows)


GOOD = lines(pa.array(["a", "b"])).serialize().to_pybytes()

PAYLOADS = {
    "nothing": b"",
    "no message": b"\xff" * 64,
    "offsets that decrease": lie(0, 100_000, 8),
    "an offset beyond the buffer": lie(0, 8, 100_000),
    "negative offsets": lie(0, -4, 8),
    "no UTF-8": lie(0, 4, 8, data=b"\xff\xfe\xfd\xfc1234"),
    "compressed with lz4": compressed("lz4"),
    "compressed with zstd": compressed("zstd"),
    "cut off": GOOD[:-8],
    "something behind it": GOOD + bytes(8),
    "more rows than there are": patched(GOOD, 2, 3),
    "2^32 rows": patched(GOOD, 2, 2**32),
    "negative rows": patched(GOOD, 2, -2),
    "another schema": pa.record_batch({"n": [1, 2]}).serialize().to_pybytes(),
    "a schema": LETTERS.serialize().to_pybytes(),
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_a_batch_that_lies_is_not_taken_into_a_queue(daemon: StoreProcess, ask: Ask, payload: bytes) -> None:
    queue = ids(daemon)["letters"]
    sections = [["append", queue, 0, 2, None, None]]
    refused(ask(commit(*sections), ([None, None], [GOOD, payload])))
    exchange = Exchange(daemon)
    staged = encode_header({"op": "stage", "queue": queue, "ttl_ms": 1000})
    refused(exchange.ask(staged, frame(None, as_value(pa.py_buffer(payload)))))
    exchange.close()


@pytest.mark.parametrize("rows", [2**24 + 1, 2**32, 2**40, -1, -(2**40)])
def test_nulls_without_number_are_not_taken_into_a_queue(daemon: StoreProcess, ask: Ask, rows: int) -> None:
    """They have no bytes, so a small message can claim any number of them."""
    with StateClient.connect(daemon.address) as client:
        name = f"nulls of {rows} {ask}"
        queue = client.create_queue(name, schema=pa.schema([("z", pa.null())]), partitions=1)
        refused(ask(commit(["append", queue.queue_id, 0, 1, None, None]), ([None], [only_nulls(rows)])))
        assert queue.append(0, pa.table({"z": pa.nulls(3)})) == (0, 3)
        client.drop_queue(name)


# --- fields that are not what they should be ---

NO_NUMBERS: list[Any] = [True, 1.5, 2**70, -1, "1", None, [1], {}]


@pytest.mark.parametrize("index", NO_NUMBERS)
def test_trim_up_to_what_is_no_position_is_refused(daemon: StoreProcess, ask: Ask, index: Any) -> None:
    queue = ids(daemon)["q"]
    message = refused(ask(commit(["trim", queue, 0, index]), None))
    assert "index" in message
    refused(ask(commit(["trim", queue, index, 0]), None)) if index != -1 else None


@pytest.mark.parametrize("version", [True, False, 1.5, 2**70, 2**62, -1, "1", [1]])
def test_commit_that_read_at_no_version_is_not_excused_from_the_conflict_check(
    daemon: StoreProcess, ask: Ask, version: Any
) -> None:
    table = ids(daemon)["t"]
    key = table_prefix(table) + struct.pack(">Q", 2**63 + 1)
    refused(ask(commit(["read", 1], version=version), ([key], [None])), (BadInput, CommitConflict))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        (commit(["write", 2**40, 1]), ([b"k"], [b""])),
        (commit(["write", 1.0, 1]), ([b"k"], [b""])),
        (commit(["write", 1, True]), ([b"k"], [b""])),
        (commit(["write", 1, 2**70]), ([b"k"], [b""])),
        (commit(["write", 1, 1]), ([None], [b""])),
        (commit(["range", 1], version=0), ([None], [b"b"])),
        (commit(["append", 3, 0, 1, None, None]), ([None], [None])),
        (commit(["append", 3, 0, 0, "p" * 256, 1]), None),
        (commit(["append", 3, 0, 0, "\ud800", 1]), None),
        (commit(["append", 3, 0, 0, "p", 2**63]), None),
        (commit(["append", 3, 0, 0, 7, 1]), None),
        (commit(["publish", 3, 0, "../../etc"]), None),
        (commit(["trim", 3]), None),
        (commit([]), None),
        (commit([["trim"]]), None),
        (commit(7), None),
        ({"op": "commit"}, None),
        ({"op": "commit", "sections": None}, ([None], [b"[" * 100_000])),
        ({"op": "commit", "sections": None}, ([None], [b"7"])),
        ({"op": "commit", "sections": []}, ([b"a"], [b"b"])),
        ({"op": "commit", "sections": {"a": 1}}, None),
        ({"op": "get", "table": 1}, None),
        ({"op": "get", "table": 1, "view": 1}, ([b"k"], [None])),
        ({"op": "get", "table": 1, "hold": 1}, ([b"k"], [None])),
        ({"op": "get", "table": 1, "hold": True}, ([b"k"], [None])),
        ({"op": "get", "table": 1, "view": 1.0, "session": 1}, ([b"k"], [None])),
        ({"op": "open"}, None),
        ({"op": "open", "session": 2**64}, None),
        ({"op": "release", "session": 1}, None),
        ({"op": "discard", "staged": "x" * 32}, None),
        ({"op": "discard", "staged": 1}, None),
        ({"op": "bounds", "queue": "q"}, None),
        ({"op": ["get"]}, None),
        ({"op": None}, None),
        ({}, None),
        ({"op": "read", "queue": 1}, None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_header_that_is_none_is_refused(ask: Ask, header: Header, rows: Rows | None) -> None:
    refused(ask(header, rows))


@pytest.mark.parametrize("field", ["begin", "rows", "bytes", "wait_ms", "partition"])
@pytest.mark.parametrize("value", [True, 1.5, 2**70, -1, None])
def test_read_of_no_place_is_refused(daemon: StoreProcess, field: str, value: Any) -> None:
    read = {"op": "read", "queue": ids(daemon)["q"], "partition": 0, "begin": 0, "rows": 1, "bytes": 1, "wait_ms": 0}
    assert field in refused(on_the_lane(daemon, {**read, field: value}, None))


@pytest.mark.parametrize(
    "text",
    [
        b'{"op": "bounds", "queue": NaN}',
        b'{"op": "bounds", "queue": Infinity}',
        b'{"op": "bounds", "queue": ' + b"9" * 5000 + b"}",
        b'{"op": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"\xff\xfe",
    ],
    ids=["NaN", "Infinity", "digits", "lists", "objects", "no UTF-8"],
)
def test_json_that_is_none_is_refused(daemon: StoreProcess, text: bytes) -> None:
    talker, exchange = Talker(daemon), Exchange(daemon)
    answer = talker.ask(struct.pack("<III", 8 + len(text), len(text), 0xFFFFFFFF) + text)
    assert answer is not None
    refused(answer)
    refused(exchange.ask(text, None))
    talker.close()
    exchange.close()


# --- rows over Flight whose offsets lie ---

FRAMES = {"decreasing": [0, 100_000, 8], "beyond": [0, 4, 100_000], "negative": [0, -100_000, 8]}


@pytest.mark.parametrize("offsets", FRAMES.values(), ids=FRAMES.keys())
@pytest.mark.parametrize("where", ["key", "value"])
def test_offsets_beyond_their_buffer_neither_crash_the_store_nor_show_its_memory(
    daemon: StoreProcess, offsets: list[int], where: str
) -> None:
    table = ids(daemon)["t"]
    prefix = table_prefix(table)
    good = pa.array([prefix, prefix], pa.binary())

    def framed(lies: pa.Array) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([lies, good] if where == "key" else [good, lies], schema=FRAME)

    batch = lying(offsets, prefix + b"123", pa.binary(), framed)
    for header in (
        commit(["write", table, 2]),
        commit(["read", 2], version=0),
        commit(["expect", table, 2]),
        commit(["range", 2], version=0),
        {"op": "get", "table": table},
        {"op": "scan", "table": table, "rows": 10},
        {"op": "stage", "queue": ids(daemon)["q"], "ttl_ms": 1000},
        {"op": "commit", "sections": None},
    ):
        exchange = Exchange(daemon)
        refused(exchange.ask(encode_header(header), batch))
        exchange.close()
    with StateClient.connect(daemon.address) as client:
        works(client)


# --- keys of another table, and rows that are none ---


def test_only_keys_of_the_table_that_is_named_are_read(daemon: StoreProcess, ask: Ask) -> None:
    table, secret = ids(daemon)["t"], ids(daemon)["secret"]
    for key in (table_prefix(secret), CATALOGUE_PREFIX + b"tsecret", b"\0v", b"", b"q"):
        assert "not of this table" in refused(ask({"op": "get", "table": table}, ([key], [None])))
    refused(ask({"op": "get", "table": 2**31}, ([table_prefix(2**31)], [None])))


def test_only_keys_of_the_table_that_is_named_are_scanned(daemon: StoreProcess) -> None:
    table, secret = table_prefix(ids(daemon)["t"]), table_prefix(ids(daemon)["secret"])
    after = bytes([*secret[:-1], secret[-1] + 1])
    for begin, end in ((b"", None), (table, None), (b"\0c", secret), (table, after), (b"", table), (secret, after)):
        header = {"op": "scan", "table": ids(daemon)["t"], "rows": 10, "reverse": False}
        assert "not of this table" in refused(over_flight(daemon, header, ([begin], [end])))
    for columns in (([table, table], [None, None]), ([], []), ([None], [None])):
        refused(over_flight(daemon, header, columns))


def test_a_row_that_is_none_of_its_table_is_refused_and_scans_go_on(daemon: StoreProcess, ask: Ask) -> None:
    with StateClient.connect(daemon.address) as client:
        table = Table(client.table("t"))
        [key], [value] = table.encode_rows(pa.table({"n": [5], "v": ["five"]}))
        deleted = pa.table({"n": [5]})
        good = commit(["write", table.table_id, 1])
        assert "version" in ask(good, ([key], [value]))
        for wrong in (key[:-1], key + b"\0", key[:5]):
            assert "not a row of this table" in refused(ask(good, ([wrong], [value])))
        for wrong in (b"", value[:-1], value + b"x", b"\x02" + value[1:], value[:-1] + b"\xff", b"\x01" + value[1:]):
            assert "not a row of this table" in refused(ask(good, ([key], [wrong])))
        many = commit(["write", table.table_id, 100])
        assert "not a row of this table" in refused(ask(many, ([key] * 100, [value] * 99 + [value + b"x"])))
        with client.transaction() as tx:
            tx.delete("t", deleted)
            tx.commit()


# --- what crosses the wire when it goes wrong ---


def test_no_answer_over_flight_has_a_traceback(daemon: StoreProcess) -> None:
    client = flight.connect(info(daemon).flight_address)
    descriptor = flight.FlightDescriptor.for_path("a", "b")
    options = flight.call_options(10)

    def put() -> None:
        writer, reader = client.do_put(descriptor, NUMBERS, options)
        writer.write_table(pa.table({"n": [1]}))
        writer.close()
        reader.read()

    def begin() -> None:
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(EXCHANGE), options)
        writer.begin(NUMBERS)
        reader.read_chunk()

    for attempt in (
        put,
        begin,
        lambda: client.do_get(flight.Ticket(b"x"), options).read_all(),
        lambda: client.get_flight_info(descriptor, options),
        lambda: list(client.list_flights(b"", options)),
        lambda: list(client.list_actions(options)),
        lambda: list(client.do_action(flight.Action("explode", b""), options)),
    ):
        with pytest.raises((flight.FlightError, pa.ArrowException, OSError)) as caught:
            attempt()
        assert '"code": "bad_input"' in str(caught.value)
        assert not any(leak in str(caught.value) for leak in LEAKS)
    told = client.get_schema(descriptor, options).schema
    assert told.names == []
    refused({"error": told.metadata[b"error"].decode()})
    client.close()
    other = Exchange(daemon, command=b"other/7")
    assert "different versions" in refused(other.ask(b"{}", None))
    other.close()


DICTIONARY = messages_of(pa.record_batch({"d": pa.array(["a", "b"]).dictionary_encode()}))
ROWS = messages_of(frame([b"a", b"b"], [b"v", None]))


@pytest.mark.parametrize(
    "messages",
    [
        [*DICTIONARY[:2], (b"", b"")],
        [*DICTIONARY[:2], (b"", b"x" * 64)],
        DICTIONARY,
        [ROWS[0], DICTIONARY[1], (b"", b"")],
        [ROWS[0], (b"\xff" * 64, b"")],
        [ROWS[0], (ROWS[1][0], b"")],
        [ROWS[0], (ROWS[1][0], ROWS[1][1][:8])],
        [ROWS[0], ROWS[0]],
        [ROWS[1]],
        [(b"\xff" * 64, b"")],
        [(b"", b"")],
    ],
    ids=[
        "a dictionary and nothing",
        "a dictionary and a body",
        "a dictionary and rows",
        "a dictionary that nobody asked for",
        "no message",
        "no body",
        "half a body",
        "two schemas",
        "no schema",
        "only garbage",
        "nothing",
    ],
)
def test_broken_messages_on_an_exchange_end_it_and_nothing_else(daemon: StoreProcess, messages: list[Message]) -> None:
    """Below what Flight's own client can send. The first of these once ended the process inside of Flight."""
    said = exchange_raw(info(daemon).flight_address, EXCHANGE, messages)
    assert said
    assert not any(leak in said for leak in LEAKS)
    with StateClient.connect(daemon.address) as client:
        works(client)


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("Drop", b'{"kind": "table", "name": "' + b"x" * 100_000 + b'"}'),
        ("Drop", b'{"kind": "", "name": "t"}'),
        ("Members", b'{"group": ""}'),
        ("Members", b'{"group": "' + b"g" * 256 + b'"}'),
        ("Watch", b'{"group": "g", "revision": 0, "wait_ms": 60001}'),
        ("Watch", b'{"group": "g", "revision": -1, "wait_ms": 1}'),
        ("Watch", b'{"group": "g", "revision": 1.5, "wait_ms": 1}'),
        ("Watch", b'{"group": "g", "revision": NaN, "wait_ms": 1}'),
        ("Renew", b'{"lease_id": true}'),
        ("OpenSession", b'{"ttl_ms": 0}'),
        ("CreateTable", b'{"schema_json": ""}'),
        ("CreateTable", b'{"schema_json": "' + b"[" * 50_000 + b'"}'),
        ("CreateQueue", b'{"schema_json": "{\\"name\\": 7}"}'),
        (
            "CreateQueue",
            b'{"schema_json": "{\\"name\\": \\"x\\", \\"partitions\\": 1, \\"queue_id\\": 0, \\"schema\\": '
            b'[{\\"name\\": \\"n\\", \\"type\\": \\"?\\", \\"arrow\\": \\"AAAA\\"}]}"}',
        ),
        ("Info", b"[" * 100_000),
        ("Info", b"\xff"),
    ],
)
def test_request_of_the_control_plane_that_is_none_is_refused(daemon: StoreProcess, method: str, body: bytes) -> None:
    client = flight.connect(daemon.address)
    with pytest.raises(BadInput) as caught:
        flight.do_action(client, method, body, who="the store", timeout_s=10)
    assert not any(leak in caught.value.message for leak in LEAKS)
    client.close()
