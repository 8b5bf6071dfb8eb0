"""The rule of the exporter: from where it goes on after any crash, and which rows it may publish next.

One instance of the exporter works on one partition of the outbox. Three things are durable: the outbox, the row of the
partition in the table of exports (``ExportState``), and the sink. They change in this order:

    sink that keeps the position            any other sink
    ------------------------------------    ----------------------------------------------------
    claim: our guid into the row            claim: our guid into the row
    open the sink: fence, ask position      open the sink
    row: any rows may be under way
    publish rows with their end             row: the rows [position, end) are under way
    publish rows with their end …           publish them, under a name made of that range
    row: position; trim the outbox          row: position is their end, nothing under way; trim
    clean stop: nothing under way

Whatever fails in between, the next instance (or this one, which simply starts again) goes on from what is durable:

- Nothing under way: at the row's position. If the sink knows an earlier one or none, it is told first, before the row
  says that anything is under way. If it knows a later one, that is of another processor of the same name, or the store
  was restored (``PositionLost``): a clean stop has published everything before it.
- Under way, and the sink keeps the position: at the sink's. If it has none, it has lost it: what is in the sink cannot
  be known, and so nothing is published (``PositionLost``).
- Under way, and the sink keeps none: exactly the same rows are published again under the same name.

A position before the trimmed rows of the outbox, or after its end, is an error too: one of the three is not the one
that the others belong to. Nothing is ever skipped or doubled to make them fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from shuffle.durable.export_state import ANY_END, ExportState
from shuffle.errors import PositionLost
from shuffle.ids import Guid


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """When the rows that were read become a batch."""

    rows_max: int
    bytes_max: int
    age_ms: int
    """Milliseconds that the first row of a batch may wait for others; 0 to publish at once whatever was read."""
    trim_period_ms: int
    """Milliseconds between two trims of the outbox, for sinks that keep the position."""


@dataclass(frozen=True, slots=True)
class ExportBatch:
    """Rows that are published in one step."""

    begin: int
    end: int
    parts: Sequence[pa.Table]

    @property
    def rows(self) -> pa.Table:
        return pa.concat_tables(self.parts)

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class ExporterCore:
    """What one instance of the exporter of one partition knows. No threads, sockets or clocks."""

    def __init__(
        self,
        partition: int,
        sink: str,
        keeps_position: bool,
        limits: BatchLimits,
        letters: tuple[str, str] | None = None,
    ) -> None:
        """``letters`` are the role and the queue, if it is not the outbox that is exported but a queue of dead letters,
        of which people may have taken rows before any exporter worked on it."""
        self.partition = partition
        self._letters = letters
        self._sink = sink
        self._keeps_position = keeps_position
        self._limits = limits
        self.state: ExportState | None = None
        """The persisted row as this instance has written it; None before the claim."""
        self.position = 0
        """The position before which all rows are in the sink."""
        self.found_other = False
        """Whether the claim took the partition over from another instance that had not ended cleanly."""
        self._redo_end: int | None = None
        self._forget_rows()
        self._trimmed_ms: int | None = None

    def _forget_rows(self) -> None:
        self._parts: list[pa.Table] = []
        self._cursor = self.position
        self._bytes = 0
        self._since_ms: int | None = None

    # -- start --------------------------------------------------------------------------------------------------------

    def claim(self, found: ExportState | None, guid: Guid, outbox_begin: int) -> ExportState:
        """The row that makes the partition ours, in place of ``found``. What was under way stays noted in it."""
        mine = self.state.owner if self.state is not None else None
        self.found_other = mine is not None and found is not None and found.owner != mine
        self.state = None
        if found is None:
            if outbox_begin and self._letters is None:
                raise PositionLost(
                    f"{self._named} begins at {outbox_begin}, and no exporter has ever worked on it: somebody else has "
                    "trimmed it, or the table of exports was dropped. Rows may be missing outside; to go on without "
                    "them, drop the outbox with `shuffle state drop STORE QUEUE --yes`",
                    partition=self.partition,
                    outbox_begin=outbox_begin,
                )
            return ExportState(guid, self._sink, outbox_begin)
        if found.sink == self._sink:
            return replace(found, owner=guid)
        if found.in_flight_end is not None:
            raise PositionLost(
                f"{self._named}: the output has changed from {found.sink} to {self._sink}, and rows from "
                f"{found.position} on may have reached the old one already. Put the old output back, let the exporter "
                "stop cleanly (SIGTERM, Ctrl-C or the end of `shuffle run`), and change it then",
                partition=self.partition,
                position=found.position,
            )
        return replace(found, owner=guid, sink=self._sink)

    def claimed(self, state: ExportState) -> None:
        """The row is durable."""
        self.state = state
        self.position = state.position
        self._redo_end = None
        self._trimmed_ms = None
        self._forget_rows()

    def opened(self, sink_position: int | None, outbox: tuple[int, int]) -> bool:
        """Decide from where to go on, given the sink's position and the bounds of the outbox, both read after the
        claim. Returns whether the sink must be told the position before anything else. See the module."""
        state = self._claimed_state()
        is_under_way = state.in_flight_end is not None
        if not self._keeps_position:
            start = state.position
            self._redo_end = state.in_flight_end
        elif not is_under_way:
            start = state.position
            if sink_position is not None and sink_position > start:
                raise self._ahead(sink_position, start)
        elif sink_position is None or sink_position < state.position:
            raise self._lost(sink_position, state.position)
        else:
            start = sink_position
        begin, end = outbox
        if not begin <= start <= end or (self._redo_end or 0) > end:
            raise self._does_not_fit(max(start, self._redo_end or 0), begin, end)
        self.position = start
        self._forget_rows()
        return self._keeps_position and not is_under_way and sink_position != start

    def under_way(self, end: int = ANY_END) -> ExportState:
        """The row to persist before rows up to ``end`` may be in the sink."""
        return replace(self._claimed_state(), position=self.position, in_flight_end=end)

    @property
    def may_publish(self) -> bool:
        """Whether the persisted row says that rows may be under way, as it must before any of them is."""
        return self._claimed_state().in_flight_end is not None

    @property
    def notes_each_batch(self) -> bool:
        """Whether the row is written before each batch, and not once for all."""
        return not self._keeps_position

    def _claimed_state(self) -> ExportState:
        assert self.state is not None, "the partition is claimed before anything else"
        return self.state

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def cursor(self) -> int:
        """The position after the rows that were read."""
        return self._cursor

    def room(self) -> tuple[int, int]:
        """The most rows and bytes to read now; no rows if the batch is full."""
        if self._redo_end is not None:
            return self._redo_end - self._cursor, self._limits.bytes_max
        rows_left = self._limits.rows_max - (self._cursor - self.position)
        return (rows_left, self._limits.bytes_max - self._bytes) if self._bytes < self._limits.bytes_max else (0, 0)

    def add(self, rows: pa.Table, now_ms: int) -> None:
        """Rows of the outbox from ``cursor`` on."""
        if not rows.num_rows:
            return
        if self._since_ms is None:
            self._since_ms = now_ms
        self._parts.append(rows)
        self._cursor += rows.num_rows
        self._bytes += rows.nbytes

    def wait_ms(self, now_ms: int, most_ms: int) -> int:
        """How long a read may wait for rows: no longer than until the batch is due."""
        if self._since_ms is None:
            return most_ms
        return max(0, min(most_ms, self._since_ms + self._limits.age_ms - now_ms))

    def due(self, now_ms: int, flush: bool = False) -> ExportBatch | None:
        """The batch to publish now, if there is one; with ``flush``, whatever has been read."""
        if self._since_ms is None:
            return None
        if self._redo_end is not None:
            is_due = self._cursor == self._redo_end
        else:
            is_old = now_ms - self._since_ms >= self._limits.age_ms
            is_due = flush or is_old or self.room()[0] <= 0
        return ExportBatch(self.position, self._cursor, tuple(self._parts)) if is_due else None

    def published(self, batch: ExportBatch) -> None:
        """The sink has acknowledged ``batch``."""
        self.position = batch.end
        self._redo_end = None
        self._forget_rows()

    # -- trim ---------------------------------------------------------------------------------------------------------

    def trim_due(self, now_ms: int) -> bool:
        """Whether the row and the outbox should follow what was published."""
        if self.position == self._claimed_state().position:
            return False
        if not self._keeps_position:
            return True
        if self._trimmed_ms is None:
            self._trimmed_ms = now_ms
        return now_ms - self._trimmed_ms >= self._limits.trim_period_ms

    def trimmed_state(self) -> ExportState:
        """The row that is written in the transaction that trims the outbox up to its position."""
        in_flight_end = ANY_END if self._keeps_position else None
        return replace(self._claimed_state(), position=self.position, in_flight_end=in_flight_end)

    def stopped_state(self) -> ExportState:
        """The row after a clean stop: nothing is under way."""
        assert self._cursor == self.position or self._since_ms is not None
        return replace(self._claimed_state(), position=self.position, in_flight_end=None)

    def persisted(self, state: ExportState, now_ms: int) -> None:
        """``state`` is durable."""
        self.state = state
        self._trimmed_ms = now_ms

    # -- errors -------------------------------------------------------------------------------------------------------

    @property
    def _queue(self) -> str:
        return "the outbox" if self._letters is None else f"the queue {self._letters[1]}"

    @property
    def _named(self) -> str:
        return f"partition {self.partition} of {self._queue}"

    def _lost(self, sink_position: int | None, position: int) -> PositionLost:
        has = "has no position" if sink_position is None else f"says {sink_position}"
        of_letters = f" --dead-letters {self._letters[0]}" if self._letters else ""
        return PositionLost(
            f"{self._named}: {self._sink} {has}, and rows before {position} have been published to it. Was it deleted, "
            "created anew or restored? Look at what it has: to go on after all rows that were trimmed, run "
            f"`shuffle exporter SPEC{of_letters} --index {self.partition} --position {position}` once; rows "
            "from there on that it has already would then be there twice",
            partition=self.partition,
            sink_position=sink_position,
            position=position,
        )

    def _ahead(self, sink_position: int, position: int) -> PositionLost:
        return PositionLost(
            f"{self._named}: {self._sink} says {sink_position}, and of {self._queue} only rows before {position} were "
            "ever published to it. It has rows of an earlier processor of this name, or the store was restored: give "
            "the output a new place, or the processor another name",
            partition=self.partition,
            sink_position=sink_position,
            position=position,
        )

    def _does_not_fit(self, start: int, begin: int, end: int) -> PositionLost:
        what = "rows between them were trimmed" if start < begin else f"it has rows that {self._queue} never had"
        return PositionLost(
            f"{self._named} has the rows from {begin} up to {end}, and {self._sink} is at {start}: {what}. Was one of "
            "them restored or created anew? Restore what belongs together, or give the output a new place",
            partition=self.partition,
            position=start,
            outbox_begin=begin,
            outbox_end=end,
        )
