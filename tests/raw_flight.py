"""Arrow Flight without its library: any bytes at all on an exchange, as no proper client would send them."""

from __future__ import annotations

import grpc
import pyarrow as pa

Message = tuple[bytes, bytes]
"""The metadata and the body of an Arrow IPC message."""


def messages_of(*batches: pa.RecordBatch) -> list[Message]:
    """What a proper client would send: the schema, dictionaries, and the batches."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    found = pa.ipc.MessageReader.open_stream(pa.BufferReader(sink.getvalue()))
    return [(one.metadata.to_pybytes(), b"" if one.body is None else one.body.to_pybytes()) for one in found]


def exchange(address: str, command: bytes, messages: list[Message], app_metadata: bytes = b"{}") -> str:
    """Everything that a server says to these messages: its answers, and the error at the end if there is one.

    ``app_metadata`` goes with the last of them.
    """
    asked = [_flight_data(*message) for message in messages]
    asked[0] = _field(1, b"\x08\x02" + _field(2, command)) + asked[0]
    asked[-1] += _field(3, app_metadata)
    answers: list[bytes] = []
    error = ""
    with grpc.insecure_channel(address.removeprefix("grpc://")) as channel:
        call = channel.stream_stream(
            "/arrow.flight.protocol.FlightService/DoExchange",
            request_serializer=lambda data: data,
            response_deserializer=lambda data: data,
        )
        try:
            answers.extend(call(iter(asked), timeout=10))
        except grpc.RpcError as failed:
            error = str(failed.details())
    return b"".join(answers).decode(errors="replace") + error


def _flight_data(metadata: bytes, body: bytes) -> bytes:
    """``FlightData`` of Flight.proto: a message without metadata has none of the field, as Flight has it."""
    return (_field(2, metadata) if metadata else b"") + _field(1000, body)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    head, rest = number & 127, number >> 7
    return bytes([head | 128]) + _varint(rest) if rest else bytes([head])
