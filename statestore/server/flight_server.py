"""The daemon's end of the Flight exchange (see ``wire.messages``)."""

from __future__ import annotations

from typing import Any

from shuffle.errors import BadInput
from shuffle.statestore.server.handlers import Handlers, Request, Response
from shuffle.statestore.wire.messages import EXCHANGE, FRAME, check_frame, decode_header, encode_header, frame, rows_in
from shuffle.statestore.wire.operations import check_request
from shuffle.support.fields import shown
from shuffle.support.flight import FlightServerBase, check_schema, read_chunk
from shuffle.support.slots import Slots, machine_of

STREAMS_MAX = 1024
"""The most streams that are open at once; each occupies a thread of the daemon, even without a request."""

STREAMS_PER_PEER_MAX = 512
"""The most streams from one machine: half of all streams is left for the others."""


class FlightServer(FlightServerBase):
    """Serves the exchange. Each stream has a thread of its own, and carries one request at a time."""

    def __init__(self, location: str, handlers: Handlers) -> None:
        self._handlers = handlers
        self.streams = Slots("streams", STREAMS_MAX, STREAMS_PER_PEER_MAX)
        """The slots of the streams that are open."""
        super().__init__(location)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        check_schema(reader, FRAME)
        with self.streams.taken(machine_of(context.peer())):
            self._respond_to_all(context, descriptor, reader, writer)

    def _respond_to_all(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        writer.begin(FRAME)
        while True:
            try:
                chunk = read_chunk(reader)
            except StopIteration:
                return
            header, rows = self._respond(context, chunk, descriptor.command)
            if rows is None:
                writer.write_metadata(encode_header(header))
                continue
            writer.write_with_metadata(frame(*rows), encode_header(header))

    def _respond(self, context: Any, chunk: Any, command: bytes) -> Response:
        try:
            if command != EXCHANGE:
                raise BadInput(f"unknown exchange {shown(command)}: client and store are of different versions")
            header = decode_header(None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes())
            if chunk.data is not None:
                check_frame(chunk.data)
            check_request(header)
            return self._handlers.handle(Request(header, rows_in(chunk.data), context.is_cancelled))
        except Exception as error:
            return self._handlers.error_header(error), None
