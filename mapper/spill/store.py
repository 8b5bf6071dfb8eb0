"""The spill in the state store: a queue for each mapper with a partition for each reducer, and the table of their ends.

The queue is created when a mapper expects to spill for the first time. Large spills are staged: written and synced
ahead, outside of the transaction, which then only adopts their file; one that is never published is collected by the
store. Small ones are appended in the transaction, and share files.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from shuffle.durable.mapper_state import MapperState, lookup_state
from shuffle.durable.spill_ends import SpillEnd, lookup_spills, spill_rows
from shuffle.durable.tables import spill_queue, spills_table
from shuffle.errors import CommitUnknown, OutOfRange, StoreUnavailable
from shuffle.ids import MapperIndex, ReducerIndex, ShuffleIndex
from shuffle.limits import MIB
from shuffle.mapper.bucket import ServedBatch
from shuffle.mapper.spill.format import (
    SPILL_SCHEMA,
    SpilledBatch,
    SpillHead,
    SpillPart,
    decode_batch,
    decode_heads,
    encode,
)
from shuffle.mapper.spill.index import Spill
from shuffle.mapper.spill.response import SpillRead, SpillResponse
from shuffle.spec.config import Compression

if TYPE_CHECKING:
    from shuffle.statestore import StateClient, Transaction

STAGED_BYTES_MIN = 1 * MIB
"""The least bytes of a spill that is staged. A smaller one is not worth a file of its own, and does not hold up the
store's writer for long."""

STAGED_TTL_MS = 60_000
"""The milliseconds after which staged rows that were not published are garbage. The transaction that publishes them
follows at once."""

READ_BYTES = 4 * MIB
"""The most bytes of stored batches in one read of the queue."""

RESPONSE_BYTES_MAX = 4 * MIB
"""The most bytes of spilled rows in one response, however many were requested: they come on top of the window's
limit."""

LOAD_ATTEMPTS_MAX = 5
"""The number of attempts at finding where a spill begins. Only another instance that trims it can make one fail."""

CACHED_MAX = 4
"""The number of decoded batches that are kept, each of another reducer. Without them, small responses would decode each
batch again and again."""


@dataclass(slots=True)
class Prepared:
    """Encoded rows on their way into the spill."""

    before: dict[ReducerIndex, SpillEnd]
    """The ends of the spills before these rows."""
    after: dict[ReducerIndex, SpillEnd] = field(default_factory=dict)
    """The ends of the spills behind these rows."""
    staged: dict[ReducerIndex, str] = field(default_factory=dict)
    """The ids of the rows that were staged, and which the transaction is to publish."""
    tables: dict[ReducerIndex, pa.Table] = field(default_factory=dict)
    """The rows that the transaction is to append itself."""


class SpillStore:
    """The spill of one mapper. ``read`` may be called by many threads, the rest by one at a time."""

    def __init__(
        self,
        client: StateClient,
        processor: str,
        mapper_index: MapperIndex,
        reducer_count: int,
        compression: Compression = "lz4",
    ) -> None:
        self._client = client
        self._processor = processor
        self._mapper_index = mapper_index
        self._reducer_count = reducer_count
        self._compression: Compression = compression
        self._queue_name = spill_queue(processor, mapper_index)
        self._has_queue = False
        self._cache: OrderedDict[ReducerIndex, SpilledBatch] = OrderedDict()
        self._cache_lock = threading.Lock()

    # loading, after a restart

    def load(self) -> tuple[MapperState | None, dict[ReducerIndex, Spill]]:
        """The mapper's persisted state and the ends of the spills, from one snapshot.

        Where a spill begins is read afterwards. The begin may have moved on by then, even past the end that was read;
        but only committed rows are trimmed, so none is missing.
        """
        reducers = [ReducerIndex(index) for index in range(self._reducer_count)]
        with self._client.snapshot() as snapshot:
            state = lookup_state(snapshot, self._processor, self._mapper_index)
            ends = lookup_spills(snapshot, self._processor, self._mapper_index, reducers)
        if not ends:
            return state, {}
        return state, {reducer: self._load_one(reducer, end) for reducer, end in ends.items()}

    def _load_one(self, reducer: ReducerIndex, end: SpillEnd) -> Spill:
        queue = self._client.queue(self._queue_name)
        for _ in range(LOAD_ATTEMPTS_MAX):
            begin, _ = queue.bounds()[reducer]
            if begin >= end.position:
                return Spill(end, end.position, end.rows, end.nbytes)
            try:
                first, _ = queue.read(reducer, begin, max_rows=1)
            except OutOfRange:
                continue  # Another instance has trimmed it meanwhile.
            return Spill(end, begin, first["rows_before"][0].as_py(), first["bytes_before"][0].as_py())
        raise StoreUnavailable(f"the spill of reducer {reducer} is being trimmed all the time")

    # writing

    def get_ready(self) -> None:
        """Create the queue, unless this instance knows that it exists."""
        if not self._has_queue:
            self._client.create_queue(self._queue_name, SPILL_SCHEMA, self._reducer_count, if_not_exists=True)
            self._has_queue = True

    def prepare(
        self,
        parts: Mapping[ReducerIndex, Sequence[SpillPart]],
        before: dict[ReducerIndex, SpillEnd],
        freed: Mapping[ReducerIndex, ShuffleIndex],
        is_begun: Mapping[ReducerIndex, bool],
    ) -> Prepared:
        """Encode the rows, and stage the large spills ahead of the transaction."""
        self.get_ready()
        queue = self._client.queue(self._queue_name)
        prepared = Prepared(before)
        now_ms = time.time_ns() // 1_000_000
        for reducer, rows in parts.items():
            end = before[reducer]
            since_ms = end.since_ms if is_begun[reducer] else now_ms
            table, after = encode(rows, end, freed[reducer], self._compression, since_ms)
            prepared.after[reducer] = after
            if table.nbytes >= STAGED_BYTES_MIN:
                prepared.staged[reducer] = queue.stage(table, ttl_ms=STAGED_TTL_MS)
            else:
                prepared.tables[reducer] = table
        return prepared

    def is_expected(self, tx: Transaction, prepared: Prepared) -> bool:
        """Whether the spills end where this instance expects. The lookup makes the transaction depend on it."""
        ends = lookup_spills(tx, self._processor, self._mapper_index, list(prepared.before))
        return all(ends.get(reducer, SpillEnd()) == end for reducer, end in prepared.before.items())

    def write(self, tx: Transaction, prepared: Prepared) -> None:
        for reducer, staged_id in prepared.staged.items():
            tx.publish(self._queue_name, reducer, staged_id)
        for reducer, table in prepared.tables.items():
            tx.append(self._queue_name, reducer, table)
        tx.write(spills_table(self._processor), spill_rows(self._mapper_index, prepared.after))

    def discard(self, prepared: Prepared) -> None:
        """Remove staged rows. To be called only if it is certain that the transaction did not and will not happen."""
        for staged_id in prepared.staged.values():
            self._client.queue(self._queue_name).discard(staged_id)

    def trim(self, positions: Mapping[ReducerIndex, int]) -> bool:
        """Trim the batches before ``positions``, which are committed; False if the outcome is unknown, so that it has
        to be done again.

        It may be repeated, and be done by any instance: what is committed stays so.
        """
        with self._client.transaction() as tx:
            for reducer, position in positions.items():
                tx.trim(self._queue_name, reducer, position)
            try:
                tx.commit()
            except CommitUnknown:
                return False
        return True

    # reading

    def read(self, read: SpillRead) -> tuple[list[SpillHead], list[ServedBatch]]:
        """The rows that ``read`` is for, and the heads of the batches that were read for it."""
        queue = self._client.queue(self._queue_name)
        response = SpillResponse(read, RESPONSE_BYTES_MAX)
        heads: list[SpillHead] = []
        position = read.position
        cached = self._cached(read.reducer_index, position)
        if cached is not None:
            heads.append(cached.head)
            position += 1
            if not response.add(cached):
                return heads, response.served
        while position < read.end:
            stored, _ = queue.read(read.reducer_index, position, max_rows=read.end - position, max_bytes=READ_BYTES)
            if not stored.num_rows:
                break
            for at, head in enumerate(decode_heads(stored, position)):
                heads.append(head)
                if head.last_row_index <= read.cursor:
                    continue
                batch = decode_batch(stored, at, head)
                if not response.add(batch):
                    self._keep(read.reducer_index, batch)
                    return heads, response.served
            position += stored.num_rows
        return heads, response.served

    def _cached(self, reducer: ReducerIndex, position: int) -> SpilledBatch | None:
        with self._cache_lock:
            batch = self._cache.get(reducer)
        return batch if batch is not None and batch.head.position == position else None

    def _keep(self, reducer: ReducerIndex, batch: SpilledBatch) -> None:
        with self._cache_lock:
            self._cache[reducer] = batch
            self._cache.move_to_end(reducer)
            if len(self._cache) > CACHED_MAX:
                self._cache.popitem(last=False)
