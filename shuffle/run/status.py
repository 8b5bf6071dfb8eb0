"""The status of a streaming processor: persisted positions, registered workers, and the state that mappers report.

``StatusCollector.collect`` collects it once. Persisted rows are read in one snapshot; the live state of a mapper is
requested over Flight (action ``status``), with a deadline, and may be missing if the mapper is starting or dying.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from shuffle.discovery import MapperAddress, arrange_mappers
from shuffle.durable.reducer_state import ReducerState
from shuffle.durable.tables import mappers_group, reducers_group
from shuffle.errors import ShuffleError, UnknownTable
from shuffle.ids import Token
from shuffle.mapper.readers.opening import known_partitions, open_input
from shuffle.preflight.check import count_partitions
from shuffle.reducer.outputs.routes import routes
from shuffle.run.dead_letters import DeadLetterQueue, dead_letter_queues
from shuffle.spec.config import ProcessorSpec
from shuffle.support import flight

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

STATUS_TIMEOUT_S = 2.0
"""The most seconds that a mapper may take to respond."""
REQUESTS_AT_ONCE_MAX = 16
"""The most mappers whose status is requested at the same time."""


@dataclass(frozen=True, slots=True)
class MapperStatus:
    """The status of one mapper."""

    index: int
    """The index of the mapper."""
    input_unread_row_index: int
    """The persisted input index: all rows made of input rows before it have been committed, or are in the spill."""
    shuffle_unread_row_index: int
    """The persisted shuffle index: all rows before it have been committed, or are in the spill."""
    instances: list[str] = field(default_factory=list)
    """The guids registered for this index, the youngest first. If there is more than one, a lease has not yet expired,
    or there is a second instance."""
    address: str | None = None
    """The address of the youngest instance; None if none is registered."""
    input_rows_left: int | None = None
    """The number of rows in the input partition after the persisted position; None if the input cannot tell."""
    live: dict[str, Any] | None = None
    """The state that the youngest instance reports; None if it did not respond."""

    def number(self, name: str) -> int | None:
        """The number ``name`` of the state that the mapper reports; None if there is none."""
        value = (self.live or {}).get(name)
        return value if isinstance(value, int) else None

    @property
    def done_rows(self) -> int:
        """The number of input rows that are done. Rows before the persisted state that are in the spill are not: each
        spilled row is subtracted, which is exact where ``map`` makes at most one row of each input row."""
        buckets = (self.live or {}).get("buckets")
        spilled = [bucket.get("spilled_rows") for bucket in buckets] if isinstance(buckets, list) else []
        return max(0, self.input_unread_row_index - sum(rows for rows in spilled if isinstance(rows, int)))


@dataclass(frozen=True, slots=True)
class ReducerStatus:
    """The status of one reducer."""

    index: int
    """The index of the reducer."""
    committed_row_indices: list[int]
    """The persisted last shuffle index that the reducer has committed, for each mapper; -1 if none yet."""
    instances: list[str] = field(default_factory=list)
    """The guids registered for this index."""
    pending_rows: int | None = None
    """The number of rows for this reducer in the windows and spills of mappers that responded; None if none did."""
    spilled_rows: int = 0
    """The number of those rows that are in the spill."""
    spilled_bytes: int = 0
    """The bytes of the rows in the spill, uncompressed."""
    spilled_bytes_ever: int = 0
    """The bytes spilled for this reducer over the life of the processor; the rate of spilling is computed from it."""
    spilled_since_ms: int | None = None
    """The wall-clock time, in milliseconds, since when it has had rows in the spill of some mapper; None if it has
    none."""
    is_straggler: bool = False
    """True if some mapper reports that the reducer lags behind the others."""


@dataclass(frozen=True, slots=True)
class ExporterStatus:
    """The status of one exporter."""

    index: int
    """The partition of the queue whose rows the exporter carries; in the outbox, that is the index of the reducer."""
    position: int
    """The persisted position in the queue: all rows before it are outside, or were taken by other commands."""
    waiting_rows: int
    """The number of rows in the queue after that position. Those that were published in the last second may be among
    them."""
    instances: list[str] = field(default_factory=list)
    """The guids registered for this index."""
    queue: str = ""
    """The queue: the outbox, or one of dead letters."""
    name: str = ""
    """The name of the exporter: its index, with that of the queue before it if it carries dead letters."""


@dataclass(frozen=True, slots=True)
class ProcessorStatus:
    """The status of one streaming processor."""

    processor: str
    """The name of the processor."""
    state: str
    """The folder or the address of its state store."""
    mappers: list[MapperStatus]
    """The mappers, by index."""
    reducers: list[ReducerStatus]
    """The reducers, by index."""
    dead_letters: list[DeadLetterQueue] = field(default_factory=list)
    """The dead-letter queues that exist."""
    exporters: list[ExporterStatus] = field(default_factory=list)
    """The exporters, by queue and index; empty unless rows go to a place outside of the state store."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def committed_rows(self) -> int:
        """The number of input rows that are done, over all mappers; it grows with every trim."""
        return sum(mapper.done_rows for mapper in self.mappers)


class StatusCollector:
    """Collects the status repeatedly, over connections that stay open."""

    def __init__(self, spec: ProcessorSpec, client: StateClient) -> None:
        self._spec = spec
        self._client = client
        self._input = open_input(spec, client)
        self._flights: dict[str, Any] = {}
        self._pool = ThreadPoolExecutor(max_workers=REQUESTS_AT_ONCE_MAX, thread_name_prefix="status")

    def __enter__(self) -> StatusCollector:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for connection in self._flights.values():
            connection.close()
        self._flights = {}
        self._input.close()

    def collect(self) -> ProcessorStatus:
        """The status now."""
        spec, client = self._spec, self._client
        mapper_rows, reducer_rows = self._persisted()
        registered = arrange_mappers(client.leases.members(mappers_group(spec.processor)))
        # Others may have numbered new partitions meanwhile, and put them into groups.
        self._input.known_partitions = known_partitions(spec, client)
        mapper_count = max(count_partitions(spec, self._input), *(index + 1 for index in mapper_rows), 1)
        youngest = {int(index): listed[0] for index, listed in registered.items() if listed and index < mapper_count}
        live = dict(zip(youngest, self._pool.map(self._request_status, youngest.values()), strict=True))
        self._forget(address.address for address in youngest.values())
        left = self._input.rows_left({index: Token(row["continuation_token"]) for index, row in mapper_rows.items()})
        mappers = []
        for index in range(mapper_count):
            row = mapper_rows.get(index, {})
            guids = [str(address.guid) for i, listed in registered.items() if int(i) == index for address in listed]
            mappers.append(
                MapperStatus(
                    index=index,
                    input_unread_row_index=row.get("input_unread_row_index", 0),
                    shuffle_unread_row_index=row.get("shuffle_unread_row_index", 0),
                    instances=guids,
                    address=youngest[index].address if index in youngest else None,
                    input_rows_left=left.get(index),
                    live=live.get(index),
                )
            )
        return ProcessorStatus(
            spec.processor,
            spec.state,
            mappers,
            self._reducers(reducer_rows, mapper_count, live.values()),
            dead_letter_queues(spec, client),
            self._exporters(),
        )

    def _exporters(self) -> list[ExporterStatus]:
        found = []
        for route in routes(self._spec):
            try:
                waiting = route.waiting_rows(self._client)
            except UnknownTable:  # Nothing was emitted yet, or set aside.
                waiting = [0] * (1 if route.is_dead_letters else self._spec.reducer.count)
            guids = self._guids(route.group)
            try:
                rows = self._client.scan(route.table).read_all().to_pylist()
            except UnknownTable:  # It never ran.
                rows = []
            positions = {row["partition"]: row["position"] for row in rows}
            found += [
                ExporterStatus(
                    index,
                    positions.get(index, 0),
                    count,
                    guids.get(index, []),
                    route.queue,
                    str(route.worker(index)),
                )
                for index, count in enumerate(waiting)
            ]
        return found

    def _guids(self, group: str) -> dict[int, list[str]]:
        """The registered instances of each worker of a group, by index."""
        guids: dict[int, list[str]] = {}
        for member in self._client.leases.members(group):
            guids.setdefault(int(member.attributes.get("index", "-1")), []).append(member.name)
        return guids

    def _persisted(self) -> tuple[dict[int, dict[str, Any]], dict[int, bytes]]:
        try:
            with self._client.snapshot() as snapshot:
                mappers = snapshot.scan(self._spec.mappers_table).read_all()
                reducers = snapshot.scan(self._spec.reducers_table).read_all()
        except UnknownTable:  # It never ran.
            return {}, {}
        return (
            {row["mapper_index"]: row for row in mappers.to_pylist()},
            {row["reducer_index"]: row["committed_row_indices"] for row in reducers.to_pylist()},
        )

    def _reducers(
        self, rows: dict[int, bytes], mapper_count: int, live: Iterable[dict[str, Any] | None]
    ) -> list[ReducerStatus]:
        guids = self._guids(reducers_group(self._spec.processor))
        responses = [response for response in live if response is not None]
        reducers = []
        for index in range(max(self._spec.reducer.count, *(index + 1 for index in rows), 1)):
            state = ReducerState.decode_any(rows[index]) if index in rows else ReducerState.initial(mapper_count)
            committed = [int(last) for last in state.committed_row_indices]
            reducers.append(_reducer(index, committed, guids.get(index, []), responses))
        return reducers

    def _request_status(self, mapper: MapperAddress) -> dict[str, Any] | None:
        try:
            if mapper.address not in self._flights:
                self._flights[mapper.address] = flight.connect(mapper.address)
            connection, guid = self._flights[mapper.address], mapper.guid.encode()
            body = flight.do_action(connection, "status", guid, who=mapper.address, timeout_s=STATUS_TIMEOUT_S)
            response = json.loads(body)
            return response if isinstance(response, dict) else None
        except (ShuffleError, ValueError):
            return None

    def _forget(self, addresses: Iterable[str]) -> None:
        """Closes connections to other addresses, whose instances are gone: a restarted mapper has another address."""
        current = set(addresses)
        for address in [address for address in self._flights if address not in current]:
            self._flights.pop(address).close()


def _reducer(index: int, committed: list[int], guids: list[str], responses: list[dict[str, Any]]) -> ReducerStatus:
    """The status of one reducer, with the rows that the mappers that responded hold for it."""
    buckets = [bucket for response in responses if (bucket := _bucket(response, index)) is not None]

    def total(name: str) -> int:
        return sum(int(bucket.get(name) or 0) for bucket in buckets)

    since = [bucket["spilled_since_ms"] for bucket in buckets if bucket.get("spilled_since_ms") is not None]
    return ReducerStatus(
        index,
        committed,
        guids,
        pending_rows=total("rows") + total("spilled_rows") if responses else None,
        spilled_rows=total("spilled_rows"),
        spilled_bytes=total("spilled_bytes"),
        spilled_bytes_ever=total("spilled_bytes_ever"),
        spilled_since_ms=min(since, default=None),
        is_straggler=any(bucket.get("is_straggler") for bucket in buckets),
    )


def _bucket(response: dict[str, Any], reducer_index: int) -> dict[str, Any] | None:
    buckets = response.get("buckets")
    if not isinstance(buckets, list) or reducer_index >= len(buckets):
        return None
    bucket = buckets[reducer_index]
    return bucket if isinstance(bucket, dict) else None


def collect(spec: ProcessorSpec, client: StateClient) -> ProcessorStatus:
    """The status of a processor, collected once."""
    with StatusCollector(spec, client) as collector:
        return collector.collect()
