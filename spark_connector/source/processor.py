"""A running processor, read from Spark: its shape, its mappers, and its reducers' rows in the store."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from shuffle.discovery import MapperAddress, arrange_mappers
from shuffle.durable.reducer_state import ReducerState
from shuffle.durable.tables import mappers_group, meta_table, processor_of_meta_table, reducers_table
from shuffle.durable.upgrade import refuse_old_tables
from shuffle.errors import (
    BadInput,
    NotServed,
    RowsGone,
    ShuffleError,
    StaleGeneration,
    StaleMapper,
    StoreUnavailable,
    UnknownTable,
)
from shuffle.ids import Guid, MapperIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.limits import MIB
from shuffle.messages import GetRows
from shuffle.reducer.exchange import RowsResponse, RowStream
from shuffle.reducer.fetch import get_rows
from shuffle.spark_connector.store_handle import RETRY_MS, StoreHandle, retry_backoff
from shuffle.spark_connector.waiting import Waiting
from shuffle.statestore import StateClient
from shuffle.support import flight

CALL_TIMEOUT_S = 5.0
"""The time in seconds after which a call to a mapper has failed."""
FETCH_ROWS = 262_144
"""The most rows in one response of a mapper."""
FETCH_BYTES = 16 * MIB
"""The most bytes in one response of a mapper."""
GENERATION = 0
"""The only generation of a processor that Spark can read: its offsets have no field for a generation."""
FETCH_WAIT_MS = 500
"""The time in milliseconds for which a mapper holds a request for rows that it has yet to map again."""

BEYOND_WAIT_MS = 50
"""The time in milliseconds for which a mapper holds a request for rows behind the end of a micro-batch."""

_flights: dict[tuple[int, str], Any] = {}
_streams: dict[tuple[int, str], list[RowStream]] = {}
"""The exchanges of each process that no thread uses now, by address of the mapper."""
_lock = threading.Lock()


@dataclass(frozen=True)
class Shape:
    """The properties of a processor that cannot change while it has state."""

    mapper_count: int
    reducer_count: int
    input: str
    """The input's description of itself: ``queue NAME``, ``folder PATH``, ``class module:Class {…}``."""


@dataclass(frozen=True)
class MapperProgress:
    """How far one instance of a mapper is, from its status."""

    mapper: MapperAddress
    last_row_index: int
    """The last shuffle index that it has produced."""
    token: Token
    """The continuation token after the rows that it has mapped."""
    row_bytes: float
    """The average number of bytes of a row in its window."""


@dataclass(frozen=True)
class Processor:
    """A processor by name. Plain data, so that Spark can send it to its workers."""

    store: StoreHandle
    name: str

    # --- the store's side ---

    def shape(self) -> Shape:
        """The shape of the processor. Waits for a processor that has not been started yet."""

        def call(client: StateClient) -> Shape:
            try:
                rows = client.scan(meta_table(self.name)).read_all().to_pylist()
                meta = {row["name"]: row["value"] for row in rows}
                refuse_old_tables(client, self.name)
                return Shape(int(meta["mapper_count"]), int(meta["reducer_count"]), meta["input"])
            except (UnknownTable, KeyError) as error:
                known = sorted(filter(None, (processor_of_meta_table(table.name) for table in client.tables())))
                there = f"there are {', '.join(known)}" if known else "there is none at all"
                raise StoreUnavailable(
                    f"there is no processor {self.name!r} in the state store at {client.address} ({there}): start its "
                    "mappers"
                ) from error

        return self.store.with_retries(call)

    def committed(self, source: Any, shape: Shape) -> list[list[int]]:
        """The last committed shuffle index for each reducer and mapper, read from ``source``, a client or a
        transaction."""
        return [list(map(int, state.committed_row_indices)) for state in self.states(source, shape)]

    def states(self, source: Any, shape: Shape) -> list[ReducerState]:
        """The states of all reducers, read from ``source``, a client or a transaction."""
        keys = pa.table({"reducer_index": pa.array(range(shape.reducer_count), pa.int32())})
        rows = source.lookup(reducers_table(self.name), keys)
        stored = {row["reducer_index"]: ReducerState.from_row(row, shape.mapper_count) for row in rows.to_pylist()}
        others = {state.generation for state in stored.values()} - {GENERATION}
        if others:
            raise StaleGeneration(
                f"processor {self.name} is of generation {max(others)}, and Spark reads generation {GENERATION} only: "
                "reduce it with its own reducers, or give the query a processor of its own",
                processor=self.name,
            )
        nothing = ReducerState.initial(shape.mapper_count)
        return [stored.get(index, nothing) for index in range(shape.reducer_count)]

    def mappers(self) -> dict[MapperIndex, list[MapperAddress]]:
        return self.store.with_retries(lambda client: arrange_mappers(client.leases.members(mappers_group(self.name))))

    # --- the mappers' side ---

    def produced(self) -> dict[int, MapperProgress]:
        """The progress of every mapper that responds; if a mapper has two instances, of the first that responds."""
        produced = {}
        for index, instances in self.mappers().items():
            for mapper in instances:
                progress = _status(mapper)
                if progress is not None:
                    produced[int(index)] = progress
                    break
        return produced

    def notify_committed(self, committed: Mapping[int, Mapping[int, int]]) -> None:
        """Notify mappers of what reducers have committed (by mapper, by reducer), so that they can drop it.

        Best effort: the next request for rows says it again.
        """
        for index, instances in self.mappers().items():
            for mapper in instances:
                for reducer, last in committed.get(int(index), {}).items():
                    if last < 0:
                        continue
                    try:
                        _get_rows(mapper, int(index), self._request(mapper, reducer, last, last, last, wait_ms=0))
                    except ShuffleError:
                        break

    def rows(
        self,
        reducer: int,
        mapper_index: int,
        begin: int,
        end: int,
        committed: Callable[[], int],
        hint: MapperProgress | None = None,
        with_metadata: bool = False,
    ) -> Iterator[tuple[pa.RecordBatch, int]]:
        """The reducer's rows with shuffle indexes after ``begin`` up to ``end``, in order, each batch with its last
        index. They are the same rows every time, until they are committed. A mapper that is away, or that has to map
        them again, is waited for. ``committed`` returns the index that the mapper may take as committed.

        1. Request rows after the cursor from an instance.
        2. A response without rows is the end only if that instance had produced all of the range before the request:
           shuffle indexes of one reducer have gaps, and a restarted mapper begins further back.
        3. After a failure look up the instances in discovery again.
        """
        cursor = begin
        known = hint if hint is not None and hint.last_row_index >= end else None
        waiting = Waiting(self.store.timeout_s)
        backoff = retry_backoff()
        while cursor < end:
            try:
                known = known or self._instance(mapper_index)
                complete = known.last_row_index >= end
                wait_ms = 0 if complete else FETCH_WAIT_MS
                request = self._request(known.mapper, reducer, committed(), cursor, end, wait_ms, with_metadata)
                response = _stream_rows(known.mapper, mapper_index, request)  # 1
            except RowsGone as error:
                raise RowsGone(
                    f"processor {self.name}: the rows after {begin} up to {end} of mapper {mapper_index} for reducer "
                    f"{reducer} cannot be read any more: {error.message}",
                    **error.fields,
                ) from error
            except (StaleMapper, NotServed, StoreUnavailable) as error:  # 3
                known = None
                waiting.report(f"processor {self.name}: mapper {mapper_index} is away ({error.message})")
                if waiting.is_over:
                    raise self._timed_out(mapper_index, error) from error
                time.sleep(backoff.next_s())
                continue
            if response.batches:
                for batch, last in response.batches:
                    yield batch, int(last)
                    cursor = int(last)
                waiting.restart()
                backoff.reset()
            elif complete:  # 2
                return
            else:
                known = None
                waiting.report(
                    f"processor {self.name}: mapper {mapper_index} has not mapped the rows up to {end} again yet"
                )
                if waiting.is_over:
                    raise self._timed_out(mapper_index, StoreUnavailable("it does not get on"))

    def rows_beyond(
        self,
        reducer: int,
        mapper_index: int,
        begin: int,
        committed: Callable[[], int],
        hint: MapperProgress | None,
        until_s: float,
    ) -> Iterator[tuple[pa.RecordBatch, int]]:
        """The reducer's rows after ``begin``, wherever they end: until the mapper has none for a moment, something
        fails, or it is later than ``until_s`` on the monotonic clock. Nobody relies on these rows, so nothing is waited
        for."""
        cursor = begin
        try:
            known = hint or self._instance(mapper_index)
            while time.monotonic() < until_s:
                request = self._request(known.mapper, reducer, committed(), cursor, None, BEYOND_WAIT_MS)
                response = _stream_rows(known.mapper, mapper_index, request)
                if not response.batches:
                    return
                for batch, last in response.batches:
                    yield batch, int(last)
                    cursor = int(last)
        except ShuffleError:
            return

    def _request(
        self,
        mapper: MapperAddress,
        reducer: int,
        committed: int,
        begin: int,
        end: int | None,
        wait_ms: int,
        with_metadata: bool = False,
    ) -> GetRows:
        return GetRows(
            mapper_id=Guid(mapper.guid),
            reducer_index=ReducerIndex(reducer),
            committed_row_index=ShuffleIndex(committed),
            from_row_index=ShuffleIndex(begin),
            to_row_index=None if end is None else ShuffleIndex(end),
            max_rows=FETCH_ROWS,
            max_bytes=FETCH_BYTES,
            wait_ms=wait_ms,
            with_metadata=with_metadata,
            processor=self.name,
            generation=GENERATION,
        )

    def _instance(self, mapper_index: int) -> MapperProgress:
        for mapper in self.mappers().get(MapperIndex(mapper_index), []):
            progress = _status(mapper)
            if progress is not None:
                return progress
        raise StoreUnavailable("no instance of it answers")

    def _timed_out(self, mapper_index: int, error: ShuffleError) -> StoreUnavailable:
        return StoreUnavailable(
            f"processor {self.name}: mapper {mapper_index} has been away for {self.store.timeout_s:g} s "
            f"({error.message}): start it again, or raise the option 'timeout'",
            processor=self.name,
            mapper=mapper_index,
        )

    def row_schema(self, shape: Shape) -> pa.Schema:
        """The schema of the rows that the mappers produce. Waits until one of them has mapped its first batch."""
        waiting = Waiting(self.store.timeout_s)
        while True:
            committed = self.store.with_retries(lambda client: self.committed(client, shape))
            for index, instances in self.mappers().items():
                for mapper in instances:
                    last = committed[0][index]
                    schema = _schema(mapper, self._request(mapper, 0, last, last, last, wait_ms=0))
                    if schema is not None:
                        return schema
            waiting.report(
                f"processor {self.name}: no mapper has mapped a row yet, so the schema is not known. Start the "
                "mappers, give them input, or give the schema with .schema(…)"
            )
            if waiting.is_over:
                raise BadInput(
                    f"processor {self.name}: no mapper has mapped a row in {self.store.timeout_s:g} s, so the schema "
                    "is not known. Start the mappers, give them input, or give the schema with .schema(…)"
                )
            time.sleep(RETRY_MS / 1000)


def _flight(address: str) -> Any:
    key = os.getpid(), address
    with _lock:
        if key not in _flights:
            _flights[key] = flight.connect(address)
        return _flights[key]


@atexit.register
def _close_streams() -> None:
    """Close the exchanges of a process that ends: Arrow complains on stderr about one that was left open."""
    with _lock:
        left = [stream for (pid, _), idle in _streams.items() if pid == os.getpid() for stream in idle]
        _streams.clear()
    for stream in left:
        stream.close()


def _stream_rows(mapper: MapperAddress, index: int, request: GetRows) -> RowsResponse:
    """One GetRows over an exchange, through shared memory where the mapper is on the same machine. Exchanges are kept
    for the next request of this process, whichever task it is of; one that has failed opens itself again."""
    key = os.getpid(), mapper.address
    with _lock:
        idle = _streams.setdefault(key, [])
        stream = idle.pop() if idle else None
    if stream is None:
        stream = RowStream(_flight(mapper.address), f"mapper {index} at {mapper.address}")
    try:
        return stream.get_rows(request, timeout_s=request.wait_ms / 1000 + 2 * CALL_TIMEOUT_S)
    finally:
        with _lock:
            idle.append(stream)


def _status(mapper: MapperAddress) -> MapperProgress | None:
    try:
        connection, guid = _flight(mapper.address), mapper.guid.encode()
        body = flight.do_action(connection, "status", guid, who=mapper.address, timeout_s=CALL_TIMEOUT_S)
        status = json.loads(body)
        if status["guid"] != mapper.guid:
            return None
        return MapperProgress(
            mapper,
            int(status["next_shuffle_index"]) - 1,
            Token(bytes.fromhex(status["token"])),
            int(status["window_bytes"]) / max(1, int(status["window_rows"])),
        )
    except (ShuffleError, ValueError, KeyError):
        return None


def _get_rows(mapper: MapperAddress, index: int, request: GetRows) -> RowsResponse:
    who = f"mapper {index} at {mapper.address}"
    return get_rows(_flight(mapper.address), request, who=who, timeout_s=request.wait_ms / 1000 + 2 * CALL_TIMEOUT_S)


def _schema(mapper: MapperAddress, request: GetRows) -> pa.Schema | None:
    try:
        with flight.typed_errors(mapper.address):
            ticket = flight.Ticket(request.encode())
            reader = _flight(mapper.address).do_get(ticket, flight.call_options(CALL_TIMEOUT_S))
            schema = reader.schema
            reader.cancel()
        return schema if len(schema) else None
    except ShuffleError:
        return None
