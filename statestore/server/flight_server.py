"""The daemon's end of the Flight exchange (see ``wire``)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from shuffle.errors import BadInput
from shuffle.statestore.server.handlers import Answer, Questions
from shuffle.statestore.wire.messages import EXCHANGE, FRAME, check_frame, decode_header, encode_header, frame, rows_in
from shuffle.statestore.wire.operations import check_question
from shuffle.support.fields import shown
from shuffle.support.flight import FlightServerBase, check_schema, read_chunk
from shuffle.support.slots import Places, machine_of

STREAMS_MAX = 1024
"""Streams that are open at once; each is a thread here, whether anything is asked on it or not."""

STREAMS_PER_PEER_MAX = 512
"""Of those, from one machine: half is left for everybody else."""


class DataPlane(FlightServerBase):
    """Serves the exchange. Each stream has a thread of its own, and asks one question at a time."""

    def __init__(self, location: str, questions: Questions) -> None:
        self._questions = questions
        self._places = Places("streams", STREAMS_MAX, STREAMS_PER_PEER_MAX)
        super().__init__(location)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        check_schema(reader, FRAME)
        with self._places.taken(machine_of(context.peer())):
            self._answer_all(descriptor, reader, writer)

    def _answer_all(self, descriptor: Any, reader: Any, writer: Any) -> None:
        writer.begin(FRAME)
        while True:
            try:
                chunk = read_chunk(reader)
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
                raise BadInput(f"unknown exchange {shown(command)}: client and store are of different versions")
            header = decode_header(None if metadata is None else metadata.to_pybytes())
            if batch is not None:
                check_frame(batch)
            check_question(header)
            return self._questions.answer(header, rows_in(batch))
        except Exception as error:
            return self._questions.failed(error), None
