"""False Arrow messages: wrong lengths, null counts, positions of buffers, offsets inside them, and types.

The IPC format is read here byte by byte, and not by Arrow, because Arrow's own writer would not write what is needed,
or would read the memory that the lie is about. Only the few numbers of a message that a lie can be about are found.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tests.fuzz.mutate import INTEGERS, damaged

CONTINUATION = 0xFFFFFFFF
END = b"\xff\xff\xff\xff\0\0\0\0"
"""Of a stream of messages."""

_BODY_LENGTH_FIELD = 3
"""Of the table that a message is."""

_BODY_LENGTH, _LENGTH, _NODE_LENGTH, _NULL_COUNT, _BUFFER_OFFSET, _BUFFER_LENGTH = (
    *("body length", "length", "node length", "null count"),
    *("buffer offset", "buffer length"),
)


@dataclass(slots=True)
class Message:
    """One IPC message: its metadata, a flatbuffer, and the body that the metadata speaks of."""

    header: bytes
    body: bytes
    batch: pa.RecordBatch | None = None
    """What it says, as long as it is true."""

    @staticmethod
    def of(batch: pa.RecordBatch, compression: str | None = None) -> Message:
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
            writer.write_batch(batch)
        stream: bytes = sink.getvalue().to_pybytes()
        after_schema = 8 + struct.unpack_from("<I", stream, 4)[0]
        made = Message.parsed(stream[after_schema : -len(END)])
        made.batch = batch
        return made

    @staticmethod
    def of_schema(schema: pa.Schema) -> Message:
        return Message.parsed(schema.serialize().to_pybytes())

    @staticmethod
    def parsed(data: bytes) -> Message:
        """Of the encapsulated form: a marker, the size of the metadata, the metadata, the body."""
        size = struct.unpack_from("<I", data, 4)[0]
        return Message(data[8 : 8 + size], data[8 + size :])

    def encapsulated(self) -> bytes:
        return struct.pack("<II", CONTINUATION, len(self.header)) + self.header + self.body


@dataclass(slots=True)
class Layout:
    """Where the numbers of a record batch's metadata are: kind and byte position; and the buffers of its body."""

    slots: list[tuple[str, int]] = field(default_factory=list)
    buffers: list[tuple[int, int]] = field(default_factory=list)


def layout_of(header: bytes) -> Layout:
    """Of a message that holds a record batch; empty for another one. ``struct.error`` if it is damaged."""
    found = Layout()
    message = _u32(header, 0)
    body_length, batch = _field(header, message, _BODY_LENGTH_FIELD), _field(header, message, 2)
    if batch is None:
        return found
    if body_length is not None:
        found.slots.append((_BODY_LENGTH, body_length))
    table = batch + _u32(header, batch)
    length, nodes, buffers = (_field(header, table, index) for index in range(3))
    if length is not None:
        found.slots.append((_LENGTH, length))
    for at in _structs(header, nodes):
        found.slots += [(_NODE_LENGTH, at), (_NULL_COUNT, at + 8)]
    for at in _structs(header, buffers):
        found.slots += [(_BUFFER_OFFSET, at), (_BUFFER_LENGTH, at + 8)]
        found.buffers.append(struct.unpack_from("<qq", header, at))
    return found


def _u32(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _field(data: bytes, table: int, index: int) -> int | None:
    """Where a field of a flatbuffer's table is; None where it has its default."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    if 4 + 2 * index >= int(struct.unpack_from("<H", data, vtable)[0]):
        return None
    offset = int(struct.unpack_from("<H", data, vtable + 4 + 2 * index)[0])
    return table + offset if offset else None


def _structs(data: bytes, at: int | None) -> list[int]:
    """Where the 16-byte structs of a vector are."""
    if at is None:
        return []
    vector = at + _u32(data, at)
    count = min(_u32(data, vector), len(data) // 16)  # A message that was damaged may claim any number of them.
    return [vector + 4 + 16 * index for index in range(count)]


# --- lies ---


def lying(message: Message, chance: random.Random) -> tuple[Message, str]:
    """The message with one lie in it, and what it is about."""
    layout = layout_of(message.header)
    kind = chance.choice(_LIES)
    made = kind(message, layout, chance)
    return (made[0], made[1]) if made is not None else (_flipped(message, layout, chance))


def _number(message: Message, layout: Layout, chance: random.Random) -> tuple[Message, str] | None:
    if not layout.slots:
        return None
    name, at = chance.choice(layout.slots)
    header = bytearray(message.header)
    (old,) = struct.unpack_from("<q", header, at)
    new = chance.choice((*INTEGERS, old + 1, old - 1, old + 8, old - 8, -old, old + 64))
    new = (new + 2**63) % 2**64 - 2**63
    struct.pack_into("<q", header, at, new)
    return Message(bytes(header), message.body), f"{name} at {at}: {old} -> {new}"


def _same_length(message: Message, layout: Layout, chance: random.Random) -> tuple[Message, str] | None:
    """All lengths say the same wrong number, so that a check of one against the other finds nothing."""
    new = chance.choice((2**32, 2**31, -1, 2**62, -(2**63), 0, 1, 10**6))
    header = bytearray(message.header)
    for name, at in layout.slots:
        if name in (_LENGTH, _NODE_LENGTH):
            struct.pack_into("<q", header, at, new)
        elif name == _NULL_COUNT and chance.random() < 0.5:
            struct.pack_into("<q", header, at, chance.choice((0, new, -1)))
    return Message(bytes(header), message.body), f"every length is {new}"


def _offsets(message: Message, layout: Layout, chance: random.Random) -> tuple[Message, str] | None:
    """A number inside a buffer of the body, which is an offset more often than not."""
    filled = [(begin, size) for begin, size in layout.buffers if size >= 4 and begin + size <= len(message.body)]
    if not filled:
        return None
    begin, size = chance.choice(filled)
    at = begin + 4 * chance.randrange(size // 4)
    body = bytearray(message.body)
    (old,) = struct.unpack_from("<i", body, at)
    new = chance.choice((100_000, -1, 2**31 - 1, -(2**31), old + 1, old - 1, old + 4096, 0, 2**20))
    new = (new + 2**31) % 2**32 - 2**31
    struct.pack_into("<i", body, at, new)
    return Message(message.header, bytes(body)), f"number at {at} of the body: {old} -> {new}"


def _all_offsets(message: Message, layout: Layout, chance: random.Random) -> tuple[Message, str] | None:
    """A buffer of the body filled with one wrong number, or with numbers that decrease."""
    filled = [(begin, size) for begin, size in layout.buffers if size >= 8 and begin + size <= len(message.body)]
    if not filled:
        return None
    begin, size = chance.choice(filled)
    count = size // 4
    wrong = chance.choice((100_000, -1, 2**31 - 1, 7))
    numbers = [wrong] * count if chance.random() < 0.5 else [8 * (count - index) for index in range(count)]
    body = bytearray(message.body)
    struct.pack_into(f"<{count}i", body, begin, *numbers)
    return Message(message.header, bytes(body)), f"buffer at {begin}: {numbers[:4]}…"


def _flipped(message: Message, layout: Layout, chance: random.Random) -> tuple[Message, str]:
    if chance.random() < 0.6:
        return Message(damaged(message.header, chance, 2), message.body), "metadata damaged"
    return Message(message.header, damaged(message.body, chance, 2)), "body damaged"


def _cut(message: Message, layout: Layout, chance: random.Random) -> tuple[Message, str]:
    if chance.random() < 0.5:
        return Message(message.header, message.body[: chance.randrange(len(message.body) + 1)]), "body cut"
    return Message(message.header, message.body + bytes(chance.choice((8, 64, 4096)))), "body prolonged"


def _emptied(message: Message, layout: Layout, chance: random.Random) -> tuple[Message, str]:
    header, body = chance.choice(((b"", b""), (message.header, b""), (b"", message.body), (bytes(8), message.body)))
    return Message(header, body), "a part is empty"


def _replaced(message: Message, layout: Layout, chance: random.Random) -> tuple[Message, str]:
    return chance.choice(others(chance)), "a message of another kind or schema"


def _compressed(message: Message, layout: Layout, chance: random.Random) -> tuple[Message, str]:
    """A compressed body whose sizes lie: the first eight bytes of each buffer say how large it becomes."""
    batch = message.batch if message.batch is not None else some_batch(chance, COMPRESSIBLE)
    if batch.num_rows and chance.random() < 0.5:
        batch = pa.concat_batches([batch] * 50)
    made = Message.of(batch, chance.choice(("lz4", "zstd")))
    filled = [begin for begin, size in layout_of(made.header).buffers if size > 8]
    body = bytearray(made.body)
    if filled and chance.random() < 0.9:
        claimed = chance.choice((2**20, 2**31, 2**33, 2**40, 2**62, -1, -2, 0, 1))
        struct.pack_into("<q", body, chance.choice(filled), claimed)
    return Message(made.header, bytes(body)), "compressed, and lying about its size"


_LIES: tuple[Callable[[Message, Layout, random.Random], tuple[Message, str] | None], ...] = (
    *(_number, _number, _same_length, _offsets, _offsets, _all_offsets),
    *(_flipped, _cut, _emptied, _replaced, _compressed),
)

# --- batches to begin from ---

COMPRESSIBLE = pa.schema([("n", pa.int64()), ("s", pa.string())])

OTHER_SCHEMAS = (
    pa.schema([("key", pa.null()), ("value", pa.null())]),
    pa.schema([("key", pa.binary())]),
    pa.schema([("key", pa.string()), ("value", pa.binary())]),
    pa.schema([("key", pa.large_binary()), ("value", pa.large_binary())]),
    pa.schema([("key", pa.binary_view()), ("value", pa.binary_view())]),
    pa.schema([("n", pa.int64()), ("s", pa.string()), ("extra", pa.int8())]),
    pa.schema([("s", pa.string()), ("n", pa.int64())]),
    pa.schema([("n", pa.list_(pa.list_(pa.int8())))]),
    pa.schema([("s", pa.dictionary(pa.int8(), pa.string()))]),
    pa.schema([]),
)


def some_batch(chance: random.Random, schema: pa.Schema, rows: int | None = None) -> pa.RecordBatch:
    """A valid batch of ``schema`` with a few random rows."""
    count = chance.choice((0, 1, 2, 5, 20)) if rows is None else rows
    return pa.RecordBatch.from_arrays([_column(chance, field.type, count) for field in schema], schema=schema)


def _column(chance: random.Random, kind: pa.DataType, count: int) -> pa.Array:
    return pa.array([_value(chance, kind) for _ in range(count)], kind)


def _value(chance: random.Random, kind: pa.DataType) -> Any:
    if pa.types.is_null(kind) or chance.random() < 0.1:
        return None
    if pa.types.is_dictionary(kind):
        return _value(chance, kind.value_type)
    if pa.types.is_list(kind):
        return [_value(chance, kind.value_type) for _ in range(chance.randrange(4))]
    if pa.types.is_integer(kind):
        return chance.randrange(100)
    if pa.types.is_floating(kind):
        return chance.random()
    text = "~" * chance.randrange(20)
    return text if pa.types.is_string(kind) else text.encode()


def others(chance: random.Random) -> list[Message]:
    """Messages that are valid, but not what is expected."""
    schema = chance.choice(OTHER_SCHEMAS)
    sink = pa.BufferOutputStream()
    tensor = pa.Tensor.from_numpy(np.arange(6.0))
    pa.ipc.write_tensor(tensor, sink)
    made = [Message.of_schema(schema), Message.parsed(sink.getvalue().to_pybytes())]
    if not any(pa.types.is_dictionary(column.type) for column in schema):
        made.append(Message.of(some_batch(chance, schema)))
    return made


def is_sound(payload: bytes, schema: pa.Schema) -> bool:
    """Whether the bytes are a record batch of ``schema`` in which nothing lies."""
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(payload), schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, EOFError):
        return False
    return bool(batch.num_rows >= 0)


def is_sound_for_flight(message: Message, schema: pa.Schema) -> bool:
    """The same for a message of Flight, which has lengths of its own and does not look at that of the body."""
    return is_sound(_with_true_body_length(message).encapsulated(), schema)


def columns_of(message: Message, schema: pa.Schema) -> tuple[list[Any], list[Any]] | None:
    """The first two columns of a message: what it says in spite of what was done to it; None if that cannot be told."""
    data = _with_true_body_length(message).encapsulated()
    if not is_sound(data, schema):
        return None
    batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
    return batch.column(0).to_pylist(), batch.column(1).to_pylist()


def _with_true_body_length(message: Message) -> Message:
    """The message with the true length of its body, in eight bytes of its own behind the metadata: what stands where a
    damaged message has its length may be something else, and stays."""
    header = bytearray(message.header)
    try:
        table = _u32(header, 0)
        vtable = table - int(struct.unpack_from("<i", header, table)[0])
        entry = vtable + 4 + 2 * _BODY_LENGTH_FIELD
        if entry + 2 <= vtable + int(struct.unpack_from("<H", header, vtable)[0]):
            at = len(header) + -len(header) % 8
            struct.pack_into("<H", header, entry, at - table)
            header += struct.pack("<q", len(message.body)).rjust(8 + at - len(header), b"\0")
    except (struct.error, IndexError):
        pass  # Not even that can be found in it.
    return Message(bytes(header), message.body)


# --- Flight's own message around it ---


def flight_data(message: Message | None, metadata: bytes | None, command: bytes | None = None) -> bytes:
    """``FlightData`` of Flight.proto: descriptor (1), data_header (2), app_metadata (3), data_body (1000)."""
    made = b""
    if command is not None:
        made += _proto(1, b"\x08\x02" + _proto(2, command))
    if message is not None:
        made += _proto(2, message.header)
    if metadata is not None:
        made += _proto(3, metadata)
    if message is not None:
        made += _proto(1000, message.body)
    return made


def _proto(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


def ticket(data: bytes) -> bytes:
    """``Ticket`` and, since it has the same shape, the body of other one-field messages of Flight.proto."""
    return _proto(1, data)


def action(kind: str, body: bytes) -> bytes:
    return _proto(1, kind.encode("utf-8", "surrogatepass")) + _proto(2, body)


def proto_fields(data: bytes) -> dict[int, bytes]:
    """The length-delimited fields of a message, the last of each number; numbers are left out."""
    found: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        if tag & 7 == 2:
            size, at = _read_varint(data, at)
            found[tag >> 3] = data[at : at + size]
            at += size
        elif tag & 7 == 0:
            _, at = _read_varint(data, at)
        else:
            at += 8 if tag & 7 == 1 else 4
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
