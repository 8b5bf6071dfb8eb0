"""What a streaming processor is doing: persisted positions, who is registered, and what the mappers say of themselves.

``StatusCollector.collect`` takes one look. Persisted rows are read in one snapshot; what a mapper says of itself is
asked over Flight (action ``status``), with a deadline, and may be missing when it is busy dying.
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
from shuffle.mapper.readers.opening import open_input
from shuffle.preflight.check import count_partitions
from shuffle.run.dead_letters import DeadLetterQueue, dead_letter_queues
from shuffle.spec.config import ProcessorSpec
from shuffle.support import flight

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

ASK_TIMEOUT_S = 2.0
ASKED_AT_ONCE_MAX = 16


@dataclass(frozen=True, slots=True)
class MapperStatus:
    index: int
    input_unread_row_index: int
    """Persisted: what input rows before it became has been committed by all reducers, or is in the spill."""
    shuffle_unread_row_index: int
    instances: list[str] = field(default_factory=list)
    """The guids registered for this index, the youngest first. More than one: a lease running out, or a twin."""
    address: str | None = None
    input_rows_left: int | None = None
    """Rows in the input partition after the persisted place; None if the input cannot tell."""
    live: dict[str, Any] | None = None
    """What the youngest instance says of itself; None if it did not answer."""

    def number(self, name: str) -> int | None:
        value = (self.live or {}).get(name)
        return value if isinstance(value, int) else None

    @property
    def done_rows(self) -> int:
        """Input rows that are done with. Those before the persisted state whose rows wait in the spill are not: each
        spilled row takes one off, which is exact where ``map`` makes one row, or none, of one."""
        buckets = (self.live or {}).get("buckets")
        spilled = [bucket.get("spilled_rows") for bucket in buckets] if isinstance(buckets, list) else []
        return max(0, self.input_unread_row_index - sum(rows for rows in spilled if isinstance(rows, int)))


@dataclass(frozen=True, slots=True)
class ReducerStatus:
    index: int
    committed_row_indices: list[int]
    """Persisted: per mapper the last shuffle index committed; -1 is none yet."""
    instances: list[str] = field(default_factory=list)
    pending_rows: int | None = None
    """Rows that wait for this reducer in the windows and spills of mappers that answered; None if none did."""
    spilled_rows: int = 0
    """Of those, the ones in the spill."""
    spilled_bytes: int = 0
    """Their bytes, uncompressed."""
    spilled_bytes_ever: int = 0
    """Spilled for this reducer over the life of the processor: what the rate of spilling is made of."""
    spilled_since_ms: int | None = None
    """Since when it has had rows in the spill of some mapper; wall clock."""
    is_straggler: bool = False
    """Whether some mapper finds that it lags behind the others."""


@dataclass(frozen=True, slots=True)
class ProcessorStatus:
    processor: str
    state: str
    mappers: list[MapperStatus]
    reducers: list[ReducerStatus]
    dead_letters: list[DeadLetterQueue] = field(default_factory=list)
    """The queues of rows that were set aside, as far as there are any."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def committed_rows(self) -> int:
        """Input rows that are done with, over all mappers; moves at every trim."""
        return sum(mapper.done_rows for mapper in self.mappers)


class StatusCollector:
    """Looks again and again, over connections that stay open."""

    def __init__(self, spec: ProcessorSpec, client: StateClient) -> None:
        self._spec = spec
        self._client = client
        self._input = open_input(spec, client)
        self._flights: dict[str, Any] = {}
        self._pool = ThreadPoolExecutor(max_workers=ASKED_AT_ONCE_MAX, thread_name_prefix="status")

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
        spec, client = self._spec, self._client
        mapper_rows, reducer_rows = self._persisted()
        registered = arrange_mappers(client.leases.members(mappers_group(spec.processor)))
        mapper_count = max(count_partitions(spec, self._input), *(index + 1 for index in mapper_rows), 1)
        youngest = {int(index): found[0] for index, found in registered.items() if found and index < mapper_count}
        live = dict(zip(youngest, self._pool.map(self._ask, youngest.values()), strict=True))
        self._forget(address.address for address in youngest.values())
        left = self._input.rows_left({index: Token(row["continuation_token"]) for index, row in mapper_rows.items()})
        mappers = []
        for index in range(mapper_count):
            row = mapper_rows.get(index, {})
            known = [(int(i), found) for i, found in registered.items() if int(i) == index]
            guids = [str(address.guid) for _, found in known for address in found]
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
        )

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
        guids: dict[int, list[str]] = {}
        for member in self._client.leases.members(reducers_group(self._spec.processor)):
            guids.setdefault(int(member.attributes.get("index", "-1")), []).append(member.name)
        answers = [answer for answer in live if answer is not None]
        found = []
        for index in range(max(self._spec.reducer.count, *(index + 1 for index in rows), 1)):
            state = ReducerState.decode_any(rows[index]) if index in rows else ReducerState.initial(mapper_count)
            committed = [int(last) for last in state.committed_row_indices]
            found.append(_reducer(index, committed, guids.get(index, []), answers))
        return found

    def _ask(self, mapper: MapperAddress) -> dict[str, Any] | None:
        try:
            if mapper.address not in self._flights:
                self._flights[mapper.address] = flight.connect(mapper.address)
            connection, guid = self._flights[mapper.address], mapper.guid.encode()
            body = flight.do_action(connection, "status", guid, who=mapper.address, timeout_s=ASK_TIMEOUT_S)
            answer = json.loads(body)
            return answer if isinstance(answer, dict) else None
        except (ShuffleError, ValueError):
            return None

    def _forget(self, addresses: Iterable[str]) -> None:
        """Closes connections to instances that are gone: each restart of a mapper has another address."""
        wanted = set(addresses)
        for address in [address for address in self._flights if address not in wanted]:
            self._flights.pop(address).close()


def _reducer(index: int, committed: list[int], guids: list[str], answers: list[dict[str, Any]]) -> ReducerStatus:
    """One reducer, with what all mappers that answered hold for it."""
    buckets = [bucket for answer in answers if (bucket := _bucket(answer, index)) is not None]

    def total(name: str) -> int:
        return sum(int(bucket.get(name) or 0) for bucket in buckets)

    since = [bucket["spilled_since_ms"] for bucket in buckets if bucket.get("spilled_since_ms") is not None]
    return ReducerStatus(
        index,
        committed,
        guids,
        pending_rows=total("rows") + total("spilled_rows") if answers else None,
        spilled_rows=total("spilled_rows"),
        spilled_bytes=total("spilled_bytes"),
        spilled_bytes_ever=total("spilled_bytes_ever"),
        spilled_since_ms=min(since, default=None),
        is_straggler=any(bucket.get("is_straggler") for bucket in buckets),
    )


def _bucket(answer: dict[str, Any], reducer_index: int) -> dict[str, Any] | None:
    buckets = answer.get("buckets")
    if not isinstance(buckets, list) or reducer_index >= len(buckets):
        return None
    bucket = buckets[reducer_index]
    return bucket if isinstance(bucket, dict) else None


def collect(spec: ProcessorSpec, client: StateClient) -> ProcessorStatus:
    """One look."""
    with StatusCollector(spec, client) as collector:
        return collector.collect()
