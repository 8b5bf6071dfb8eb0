"""GetRows over Arrow Flight, as single calls and as exchanges of many, with long poll; and the action ``status``.

Handlers hold the lock only for slicing: small batches are joined, and everything is sent, outside of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from shuffle.errors import BadInput, ShuffleError, StaleMapper, WrongVersion, to_wire
from shuffle.ids import Guid
from shuffle.limits import MIB
from shuffle.mapper.bucket import ServedBatch
from shuffle.mapper.shared_core import MemoryBudget, Served, SharedCore
from shuffle.messages import METADATA_FIELDS, ROWS_EXCHANGE, STREAM_OVER, GetRows, SharedRows, Tail
from shuffle.support import crash_points, flight
from shuffle.support.endpoint import Endpoint
from shuffle.support.shared_memory import BYTES_MIN, MemoryWriter, machine
from shuffle.support.slots import Slots

JOIN_BYTES_MAX = 1 * MIB
"""The most bytes of adjacent batches that are joined into one. Below it the cost of a message outweighs that of a
copy."""

EXCHANGES_PER_REDUCER_MAX = 8
EXCHANGES_MIN = 64
"""The number of exchanges and calls that are served at once: this many for each reducer of each mapper, and at least
``EXCHANGES_MIN``. Each has a thread. A reducer has one exchange, and for a while those that it, or an instance before
it, has abandoned; Spark's tasks and ``status`` come on top."""


def joined(batches: Iterable[ServedBatch], join_bytes_max: int = JOIN_BYTES_MAX) -> Iterator[ServedBatch]:
    """The same rows in batches of a sensible size: small adjacent batches are copied into one, large ones are not
    copied."""
    batches = list(batches)
    if len(batches) == 1:
        yield batches[0]
        return
    small: list[ServedBatch] = []
    small_bytes = 0
    for served in batches:
        nbytes = served.rows.nbytes
        if small and small_bytes + nbytes > join_bytes_max:
            yield _join(small)
            small, small_bytes = [], 0
        small.append(served)
        small_bytes += nbytes
    if small:
        yield _join(small)


def _join(batches: list[ServedBatch]) -> ServedBatch:
    if len(batches) == 1:
        return batches[0]
    return ServedBatch(pa.concat_batches([served.rows for served in batches]), batches[-1].last_row_index)


def _with_tails(batches: Iterable[ServedBatch], tail: Tail) -> Iterator[tuple[pa.RecordBatch, Tail]]:
    """Each batch with its tail: the last one has ``tail``, and the tails before it speak of their own rows only."""
    before: ServedBatch | None = None
    for served in batches:
        if before is not None:
            last = before.last_row_index
            yield before.rows, Tail(last, last, None, tail.generation, True)
        before = served
    if before is not None:
        yield before.rows, tail._replace(last_row_index=before.last_row_index)


_NO_COLUMNS = pa.schema([])


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


@dataclass(frozen=True, slots=True)
class HostedMapper:
    """One mapper instance, as the server sees it."""

    shared: SharedCore
    memory_budget: MemoryBudget
    status: Callable[[], dict[str, Any]]
    on_served: Callable[[int, int], None]
    """A callback that gets the numbers of rows and bytes of each response."""

    @classmethod
    def of(
        cls,
        shared: SharedCore,
        status: Callable[[], dict[str, Any]] | None = None,
        on_served: Callable[[int, int], None] = lambda rows, nbytes: None,
    ) -> HostedMapper:
        return cls(shared, MemoryBudget(shared), status or shared.status, on_served)


class MapperServer(flight.FlightServerBase):
    """Serves the rows of the mapper instances of one process; each request names the instance that it is for."""

    def __init__(self, mappers: Iterable[HostedMapper], listen: str = "127.0.0.1:0") -> None:
        listening = Endpoint.parse_listen(listen)
        super().__init__(flight.location(listening.target))
        self.mappers: dict[Guid, HostedMapper] = {mapper.shared.core.guid: mapper for mapper in mappers}
        reducers = sum(mapper.shared.reducer_count for mapper in self.mappers.values())
        self._slots = Slots("exchanges", max(EXCHANGES_MIN, EXCHANGES_PER_REDUCER_MAX * reducers))
        self.endpoint = replace(listening, port=self.port)
        """The endpoint on which the server listens, with the port that it was given."""
        self.address = str(self.endpoint)

    def mapper(self, guid: str) -> HostedMapper:
        """The instance that a request names. If there is only one, it is returned whatever the request names, and its
        core refuses requests for other instances."""
        mapper = self.mappers.get(Guid(guid))
        if mapper is None and len(self.mappers) == 1:
            mapper = next(iter(self.mappers.values()))
        if mapper is None:
            served = ", ".join(f"{guid} of mapper {one.shared.core.mapper_index}" for guid, one in self.mappers.items())
            raise StaleMapper(
                f"the request is for instance {guid} of a mapper, but this process serves the instances {served}: ask "
                "discovery again"
            )
        return mapper

    def do_get(self, context: Any, ticket: Any) -> Any:
        with self._slots.taken():
            request = GetRows.decode(ticket.ticket)
            mapper = self.mapper(request.mapper_id)
            served = self._rows(mapper, request, context)
        schema = served.schema or _NO_COLUMNS
        return flight.GeneratorStream(schema, self._stream(mapper, schema, served))

    def _stream(
        self, mapper: HostedMapper, schema: pa.Schema, served: Served
    ) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        if not served.rows:
            yield empty_batch(schema), served.tail.encode()
        for rows, tail in _with_tails(joined(served.rows), served.tail):
            yield rows, tail.encode()
            mapper.on_served(rows.num_rows, rows.nbytes)

    def _rows(self, mapper: HostedMapper, request: GetRows, context: Any) -> Served:
        served = mapper.shared.get_rows(request, context.is_cancelled)
        if served.rows:
            crash_points.reach("mapper.before_answer")
            # The schema is that of the rows: spilled rows may be served before this instance has mapped any.
            return served._replace(schema=served.rows[0].rows.schema)
        if served.schema is not None and request.with_metadata:
            return served._replace(schema=pa.schema([*served.schema, *METADATA_FIELDS], served.schema.metadata))
        return served

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Serve GetRows again and again on one stream (see ``messages``), while all responses have the same schema."""
        if descriptor.command != ROWS_EXCHANGE:
            raise WrongVersion(
                f"unknown exchange {descriptor.command!r}, and not {ROWS_EXCHANGE!r}: mapper and reducer are of "
                "different versions of this project. Install the same one everywhere, and start them again"
            )
        flight.check_schema(reader, _NO_COLUMNS)
        with self._slots.taken(), ExitStack() as stack:
            self._serve_exchange(context, reader, writer, stack)

    def _serve_exchange(self, context: Any, reader: Any, writer: Any, stack: ExitStack) -> None:
        memory: MemoryWriter | None = None
        begun_with: pa.Schema | None = None
        has_begun = False
        while True:
            try:
                ticket = flight.read_chunk(reader).app_metadata
            except StopIteration:
                return
            error: ShuffleError | None = None
            served: Served | None = None
            sharing: MemoryWriter | None = None
            try:
                request = GetRows.decode(b"" if ticket is None else bytes(ticket))
                mapper = self.mapper(request.mapper_id)
                if request.machine is not None and request.machine == machine():
                    memory = memory or mapper.memory_budget.take(stack)
                    sharing = None if memory is None or memory.is_refused else memory
                if sharing is not None and request.to_row_index is None:
                    request = replace(request, max_bytes=min(request.max_bytes, sharing.bytes_max))
                served = self._rows(mapper, request, context)
            except ShuffleError as refused:
                error = refused
            schema = begun_with if served is None else served.schema
            if not has_begun:
                begun_with, has_begun = schema, True
                writer.begin(schema or _NO_COLUMNS)
            if served is None:
                assert error is not None
                writer.write_metadata(to_wire(error).encode())
                continue
            if schema != begun_with or mapper.shared.closing:
                writer.write_metadata(STREAM_OVER)
                return
            if not served.rows:
                writer.write_metadata(served.tail.encode())
                continue
            nbytes = sum(batch.rows.nbytes for batch in served.rows)
            if sharing is None or nbytes < BYTES_MIN or not self._share(writer, sharing, served):
                for rows, tail in _with_tails(joined(served.rows), served.tail):
                    writer.write_with_metadata(rows, tail.encode())
            mapper.on_served(sum(batch.rows.num_rows for batch in served.rows), nbytes)

    def _share(self, writer: Any, memory: MemoryWriter, served: Served) -> bool:
        """Respond by way of shared memory; False if there are too many rows for it."""
        batches = list(_with_tails(joined(served.rows), served.tail))
        handle = memory.put([rows for rows, _ in batches])
        if handle is None:
            return False
        writer.write_metadata(SharedRows(handle, tuple(tail for _, tail in batches)).encode())
        return True

    def do_action(self, context: Any, action: Any) -> Any:
        if action.type != "status":
            raise BadInput(f"unknown action {action.type!r}: a mapper knows only status")
        body = b"" if action.body is None else bytes(action.body)
        return [flight.Result(pa.py_buffer(json.dumps(self._status_of(body)).encode()))]

    def _status_of(self, guid: bytes) -> dict[str, Any]:
        """The status of the instance with this guid; where there is only one, it need not be named."""
        return self.mapper(guid.decode("ascii", "replace")).status()

    def list_actions(self, context: Any) -> Any:
        return [("status", "what the mapper instance of this guid holds, as JSON")]

    def close(self, timeout_s: float = 5.0) -> bool:
        """Respond to the requests that wait, and stop; whether all calls ended in time."""
        for mapper in self.mappers.values():
            mapper.shared.close()
        return flight.shutdown(self, timeout_s)
