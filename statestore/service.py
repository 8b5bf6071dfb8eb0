"""The daemon's end of the Flight exchange (see ``wire``)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from shuffle.errors import BadInput
from shuffle.flight import FlightServerBase
from statestore.questions import Answer, Questions
from statestore.wire import EXCHANGE, FRAME, check_frame, decode_header, encode_header, frame, rows_in


class DataPlane(FlightServerBase):  # type: ignore[misc]
    """Serves the exchange. Each stream has a thread of its own, and asks one question at a time."""

    def __init__(self, location: str, questions: Questions) -> None:
        self._questions = questions
        super().__init__(location)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        writer.begin(FRAME)
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            header, rows = self._answer(chunk.app_metadata, chunk.data, descriptor.command)
            if rows is None:
                writer.write_metadata(encode_header(header))
                continue
            writer.write_with_metadata(frame(*rows), encode_header(header))

    def _answer(self, metadata: pa.Buffer | None, batch: pa.RecordBatch | None, command: bytes) -> Answer:
        try:
            if command != EXCHANGE:
                raise BadInput(f"unknown exchange {command!r}: client and store are of different versions")
            header = decode_header(None if metadata is None else metadata.to_pybytes())
            if batch is not None:
                check_frame(batch)
            return self._questions.answer(header, rows_in(batch))
        except Exception as error:
            return self._questions.failed(error), None
