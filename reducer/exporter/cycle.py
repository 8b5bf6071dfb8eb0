"""Claim, open, read, publish, trim: what the exporter of one partition does, in the order that ``core`` demands.

Nothing here starts threads, reads clocks or sleeps by itself. Every error leaves it to the caller to begin again with
``start``: what is durable then decides, so that an answer which was lost needs no rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from shuffle.durable.export_state import ExportState
from shuffle.errors import OutOfRange, PositionLost, SplitBrain
from shuffle.ids import new_guid
from shuffle.reducer.exporter.core import ExportBatch, ExporterCore
from shuffle.reducer.outputs.sink import Sink
from shuffle.support import crash_points

if TYPE_CHECKING:
    from shuffle.statestore import Queue, StateClient

READS_MAX = 64
"""The most reads of the outbox for one batch, so that a stop is noticed: redoing a batch may take several."""


class Metrics(Protocol):
    def count_publish(self, rows: int, size_bytes: int, seconds: float) -> None: ...


class ExportCycle:
    """Runs the exporter of one partition. Only one thread may call it."""

    def __init__(
        self,
        client: StateClient,
        sink: Sink,
        core: ExporterCore,
        *,
        outbox: str,
        table: str,
        clock: Callable[[], float],
        metrics: Metrics,
        outside: Callable[[pa.Table], pa.Table] = lambda rows: rows,
    ) -> None:
        """``outside`` makes of rows of the queue ``outbox`` those that are published, one of each."""
        self._client = client
        self._sink = sink
        self._core = core
        self._outbox = outbox
        self._table = table
        self._clock = clock
        self._metrics = metrics
        self._outside = outside
        self._used_s = clock()
        """When the sink was used last, by the clock."""

    # -- start and stop -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the partition ours and find out from where to go on.

        1. Claim the row: from now on nobody else can note or trim anything.
        2. Open the sink: from now on nobody else can publish, if the sink keeps the position.
        3. Compare what the row, the sink and the outbox say (``ExporterCore.opened``).
        4. If nothing is under way, tell the sink the position if it does not have it, and only then note in the row
           that from now on rows may be under way. In the other order, a sink that was never told would look like one
           that has lost its position.
        """
        core = self._core
        found = ExportState.from_rows(self._client.lookup(self._table, ExportState.key(core.partition)))
        if found is None:
            self._sink.check_new()
        state = core.claim(found, new_guid(), self._bounds()[0])
        self._write(found, state)  # 1
        core.claimed(state)
        crash_points.reach("exporter.after_claim")
        position = self._sink.open()  # 2
        crash_points.reach("exporter.after_open")
        try:
            is_unknown_to_sink = core.opened(position, self._bounds())  # 3
        except PositionLost as error:
            self._refuse_if_replaced(error)
            raise
        if core.notes_each_batch or core.may_publish:
            return
        if is_unknown_to_sink:  # 4
            self._sink.publish(self._outside(self._queue().schema.empty_table()), core.position, core.position)
        self._note(core.under_way())

    def _refuse_if_replaced(self, error: PositionLost) -> None:
        """``SplitBrain`` if the row is not ours any more: another one may have claimed the partition, published and
        trimmed between our claim and our look at the outbox. Nothing is lost then; it only looks so from here."""
        key = ExportState.key(self._core.partition)
        if ExportState.from_rows(self._client.lookup(self._table, key)) != self._core.state:
            raise SplitBrain(f"another instance has taken the partition over: {error.message}") from error

    def stop(self) -> None:
        """Publish what is in the outbox now, and note that nothing is under way."""
        end = self._bounds()[1]
        for _ in range(READS_MAX):
            if self._core.cursor < end:
                self._read(0)
            batch = self._core.due(self._now_ms(), flush=True)
            if batch is None:
                break
            self._publish(batch)
        state = self._core.stopped_state()
        if state != self._core.state:
            self._note(state, trims=True)

    # -- one round ----------------------------------------------------------------------------------------------------

    def step(self, wait_ms: int) -> int:
        """Read, publish if a batch is due, trim if that is due; returns the number of rows that were published."""
        self._read(wait_ms)
        batch = self._core.due(self._now_ms())
        if batch is not None:
            self._publish(batch)
        if self._core.trim_due(self._now_ms()):
            self._note(self._core.trimmed_state(), trims=True)
            crash_points.reach("exporter.after_trim")
        return 0 if batch is None else batch.end - batch.begin

    def keep_alive(self, period_s: float) -> None:
        """Now and then while nothing is published, let the sink do what keeps it from forgetting us."""
        if self._clock() - self._used_s >= period_s:
            self._sink.keep_alive()
            self._used_s = self._clock()

    def lag_rows(self) -> int:
        """The rows of the outbox that are not published yet."""
        return self._bounds()[1] - self._core.position

    def _read(self, wait_ms: int) -> None:
        core = self._core
        for _ in range(READS_MAX):
            rows_max, bytes_max = core.room()
            if rows_max <= 0:
                return
            wait_ms = core.wait_ms(self._now_ms(), wait_ms)
            try:
                rows, _ = self._queue().read(core.partition, core.cursor, rows_max, bytes_max, wait_ms)
            except OutOfRange as error:
                # Only an exporter trims the outbox, and only up to what is outside. Whether that explains it, the next
                # start finds out.
                raise SplitBrain(f"rows were trimmed that this instance has not published: {error.message}") from error
            core.add(rows, self._now_ms())
            if not rows.num_rows:
                return
            wait_ms = 0

    def _publish(self, batch: ExportBatch) -> None:
        """1. Note what is under way, unless the row says already that anything may be. 2. Publish it."""
        core = self._core
        if core.notes_each_batch:  # 1
            self._note(core.under_way(batch.end))
            crash_points.reach("exporter.after_intent")
        begin_s = self._clock()
        crash_points.reach("exporter.before_publish")
        self._sink.publish(self._outside(batch.rows), batch.begin, batch.end)  # 2
        crash_points.reach("exporter.after_publish")
        core.published(batch)
        self._used_s = self._clock()
        self._metrics.count_publish(batch.end - batch.begin, batch.size_bytes, self._clock() - begin_s)

    # -- the store ----------------------------------------------------------------------------------------------------

    def _note(self, state: ExportState, trims: bool = False) -> None:
        if state != self._core.state:
            self._write(self._core.state, state, trims)
        self._core.persisted(state, self._now_ms())

    def _write(self, expected: ExportState | None, state: ExportState, trims: bool = False) -> None:
        """Write the row in place of exactly ``expected``, and with ``trims`` trim the outbox up to its position."""
        partition = self._core.partition
        with self._client.transaction() as tx:
            if expected is None:
                tx.expect_absent(self._table, ExportState.key(partition))
            else:
                tx.expect(self._table, expected.to_row(partition))
            tx.write(self._table, state.to_row(partition))
            if trims:
                tx.trim(self._outbox, partition, state.position)
            tx.commit()

    def _queue(self) -> Queue:
        return self._client.queue(self._outbox)

    def _bounds(self) -> tuple[int, int]:
        return self._queue().bounds()[self._core.partition]

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)
