"""Queues for users and workers: appending to partitions, reading them, and trimming rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa

from shuffle.errors import BadInput, TooLarge, UnknownTable
from shuffle.limits import BATCH_BYTES_MAX, BATCH_ROWS_MAX, MIB
from shuffle.statestore.client.appender import LINGER_MS_DEFAULT, TIMEOUT_S_DEFAULT, Appender
from shuffle.statestore.codec.schema import QueueSchema
from shuffle.statestore.request import Append, CommitRequest, Trim
from shuffle.statestore.store import STAGED_TTL_MS_DEFAULT, Store
from shuffle.statestore.wire.operations import check_section
from shuffle.support.fields import as_int

READ_ROWS_DEFAULT = 65_536
"""The most rows of one ``Queue.read``, unless the caller asks for another number."""

READ_BYTES_DEFAULT = 16 * MIB
"""The most bytes of one ``Queue.read``, unless the caller asks for another number."""

APPEND_BYTES_MAX = 4 * MIB
"""The size in bytes of the batches into which one append is cut: a reader maps and decodes one at a time."""


class Queue:
    """A queue: rows in partitions, each row at a position that counts from 0 and never changes.

    A queue that was dropped and created anew is another queue, with other rows at the same positions: calls of the old
    ``Queue`` raise ``UnknownTable``, and ``StateClient.queue`` returns the new one.
    """

    def __init__(self, store: Store, description: QueueSchema, on_gone: Callable[[], None] = lambda: None) -> None:
        """``on_gone`` is called when the store does not know the queue any more."""
        self._store = store
        self._description = description
        self._on_gone = on_gone
        self.queue_id = description.queue_id

    @property
    def name(self) -> str:
        """The name of the queue."""
        return self._description.name

    @property
    def schema(self) -> pa.Schema:
        """The columns of the queue's rows."""
        return self._description.schema

    @property
    def partitions(self) -> int:
        """The number of partitions; they are numbered from 0."""
        return self._description.partitions

    def append(
        self,
        partition: int,
        rows: pa.Table | pa.RecordBatch,
        producer: str | None = None,
        sequence: int | None = None,
    ) -> tuple[int, int]:
        """Append rows durably; returns their positions, from ``begin`` up to and without ``end``.

        With a ``producer`` and a ``sequence`` (which grows with each append), repeating an append whose response was
        lost is safe: the rows are appended once, and both calls return the same positions.
        """
        append = self.encode_append(partition, rows, producer, sequence)
        with self._reporting_unknown():
            return self._store.commit(CommitRequest(appends=[append])).appended[0]

    def appender(
        self, partition: int, linger_ms: float = LINGER_MS_DEFAULT, timeout_s: float = TIMEOUT_S_DEFAULT
    ) -> Appender:
        """For very many small appends a second: an ``Appender``, which appends several pieces of rows together.

        The first rows of an append wait ``linger_ms`` for others, and the more there are, the more go together. If the
        store cannot be reached, an append is repeated for ``timeout_s``.
        """
        partition = as_int(partition)
        if not 0 <= partition < self.partitions:
            raise BadInput(f"queue {self.name!r} has no partition {partition}: they go from 0 to {self.partitions - 1}")
        return Appender(self, partition, linger_ms, timeout_s)

    def conform(self, rows: pa.Table | pa.RecordBatch) -> pa.RecordBatch:
        """``rows`` as one batch in the queue's own schema; raises ``SchemaMismatch`` if they do not fit."""
        return self._description.conform_rows(rows)

    def encode_append(
        self, partition: int, rows: pa.Table | pa.RecordBatch, producer: str | None, sequence: int | None
    ) -> Append:
        if (producer is None) != (sequence is None):
            raise BadInput("producer and sequence go together: give both, or none")
        partition, sequence = as_int(partition), as_int(sequence)
        append = _make_append(self.queue_id, partition, self._description.conform_rows(rows), producer, sequence)
        check_section("append", self.queue_id, partition, len(append.payloads), producer, sequence)
        self._check_sizes(append.payloads)
        return append

    def stage(self, rows: pa.Table | pa.RecordBatch, ttl_ms: int = STAGED_TTL_MS_DEFAULT) -> str:
        """Write rows durably but invisibly; ``Transaction.publish`` makes them part of a partition.

        Returns the id to publish. Rows that are not published within ``ttl_ms`` are removed.
        """
        encoded = _encode_payloads(self._description.conform_rows(rows))
        self._check_sizes(encoded)
        with self._reporting_unknown():
            return self._store.stage(self.queue_id, encoded, ttl_ms)

    def _check_sizes(self, encoded: list[pa.Buffer]) -> None:
        """Checks the sizes before anything is sent; the store checks them again."""
        largest = max((payload.size for payload in encoded), default=0)
        if largest > BATCH_BYTES_MAX:
            raise TooLarge(
                f"queue {self.name!r}: one row, or some rows of very different sizes, have {largest} bytes, more than "
                f"{BATCH_BYTES_MAX}",
                queue=self.name,
                limit=BATCH_BYTES_MAX,
            )

    def discard(self, staged_id: str) -> None:
        """Discard staged rows before they expire."""
        self._store.discard(staged_id)

    def read(
        self,
        partition: int,
        begin: int,
        max_rows: int = READ_ROWS_DEFAULT,
        max_bytes: int = READ_BYTES_DEFAULT,
        wait_ms: int = 0,
        one_answer: bool = False,
    ) -> tuple[pa.Table, int]:
        """Rows from the position ``begin`` on, and the position after them; waits up to ``wait_ms`` for the first one.

        Raises ``OutOfRange`` if ``begin`` was trimmed or lies after the end.
        ``max_bytes`` is kept to about one row, and at least one row is returned if there is any. With ``one_answer``
        only one request is sent, which may return fewer rows than there are: it does not read on from file to file.
        """
        partition, begin, max_rows = as_int(partition), as_int(begin), as_int(max_rows)
        if max_rows < 1 or max_bytes < 1:
            raise BadInput(f"max_rows and max_bytes must be at least 1, not {max_rows} and {max_bytes}")
        max_bytes = min(max_bytes, BATCH_BYTES_MAX)
        batches: list[pa.RecordBatch] = []
        position, size_bytes = begin, 0
        while position - begin < max_rows and size_bytes < max_bytes:
            rows_left = max_rows - (position - begin)
            with self._reporting_unknown():
                response = self._store.read(
                    self._description, partition, position, rows_left, max_bytes - size_bytes, 0 if batches else wait_ms
                )
            if response is None:
                break
            for first, batch in response.batches:
                batch = batch.slice(max(position - first, 0), max_rows - (position - begin))
                batch_bytes = batch.nbytes
                cut = _cut_to_bytes(batch, batch_bytes, max_bytes - size_bytes, at_least_one=not batches)
                if not cut.num_rows:
                    return pa.Table.from_batches(batches, self.schema), position
                batches.append(cut)
                position += cut.num_rows
                size_bytes += batch_bytes if cut is batch else cut.nbytes
                if cut.num_rows < batch.num_rows:
                    break  # The next batch of this response would not follow these rows.
            if one_answer:
                break
        return pa.Table.from_batches(batches, self.schema), position

    def trim(self, partition: int, index: int) -> None:
        """Remove the rows below the position ``index`` for good; whole files are freed."""
        partition, index = as_int(partition), as_int(index)
        check_section("trim", self.queue_id, partition, index)
        with self._reporting_unknown():
            self._store.commit(CommitRequest(trims=[Trim(self.queue_id, partition, index)]))

    def bounds(self) -> list[tuple[int, int]]:
        """For each partition: the first position that can be read, and the one after the last."""
        with self._reporting_unknown():
            return self._store.bounds(self.queue_id)

    @contextmanager
    def _reporting_unknown(self) -> Iterator[None]:
        try:
            yield
        except UnknownTable:
            self._on_gone()
            raise


def _cut_to_bytes(batch: pa.RecordBatch, batch_bytes: int, max_bytes: int, at_least_one: bool) -> pa.RecordBatch:
    """The first rows of ``batch`` that fit into ``max_bytes``, if all rows are taken to be equally large."""
    if batch_bytes <= max_bytes or not batch.num_rows:
        return batch
    rows = int(batch.num_rows * max(max_bytes, 0) / batch_bytes)
    return batch.slice(0, max(rows, 1) if at_least_one else rows)


def _make_append(
    queue_id: int, partition: int, batch: pa.RecordBatch, producer: str | None, sequence: int | None
) -> Append:
    """An append whose batches are small enough to be read one at a time."""
    return Append(queue_id, partition, _encode_payloads(batch), producer, sequence)


def _encode_payloads(batch: pa.RecordBatch) -> list[pa.Buffer]:
    """``batch`` as Arrow IPC messages of at most about ``APPEND_BYTES_MAX``."""
    pieces = -(-batch.nbytes // APPEND_BYTES_MAX) or 1
    rows = min(-(-batch.num_rows // pieces) or 1, BATCH_ROWS_MAX)
    return [batch.slice(begin, rows).serialize() for begin in range(0, batch.num_rows, rows)]
