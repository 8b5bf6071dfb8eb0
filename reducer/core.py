"""The reducer's cycle as a plain state machine: no threads, clocks, sockets or randomness.

Rows go through it in one direction:

    fetch_plan -> fetched -> [queued] -> take -> [in flight: reduced, then committed] -> committed

- *committed* is what the store is known to hold. Requests to mappers call nothing else committed, because mappers free
  the rows that a request calls committed.
- *cursor* is the last shuffle index fetched, per mapper; it runs ahead of committed.
- *queued* are the batches that were fetched and are not yet part of a batch to reduce. They are bounded in bytes, for
  each mapper apart, so that a fast mapper cannot take the room of the others.
- *in flight* is the one batch that is being reduced or committed, from ``take`` until ``committed``. There is never a
  second one: it would read the state that the first has not written yet, and its commit would be a conflict.

A method whose name is a past participle (``fetched``, ``committed``) records that something has happened; the others
return something or change something.

An *epoch* is the time between two restarts. A restart drops everything but the persisted state, and responses to
requests of an earlier epoch are ignored: there is no other form of staleness, and it is one integer.

A batch whose commit did not happen is reduced again with the same rows (``rerun``). A batch that was superseded in this
way, or by a restart, is not ``current`` any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import pyarrow as pa

from shuffle.durable.reducer_state import ReducerState
from shuffle.errors import ShuffleError
from shuffle.ids import MapperIndex, ShuffleIndex
from shuffle.messages import Tail

SETTLING_WAIT_MS = 250
"""The longest wait of a request, in milliseconds, while rows of that mapper are still on their way to a commit: the
mapper learns of the commit with the next request. A mapper whose window is full responds sooner by itself."""

IDLE_WAIT_MS_MAX = 4_000
"""The longest wait of a request, in milliseconds, unless ``fetch_wait_ms`` is longer. Beginning with ``fetch_wait_ms``
the wait doubles with every response without rows, until there are rows again: a mapper and a reducer that have nothing
to say to each other cost next to nothing then. A mapper that has ceased to respond is found out later by as much. It is
less than ``DRAIN_S`` of a mapper, so that a poll ends with a response while a mapper that a row has stopped still
serves."""

_CHUNK_ROWS_SMALL = 4096
"""The average number of rows in a chunk below which all are copied into one chunk: user code pays for each chunk in
each of its kernels."""


class Settled(Enum):
    """What the persisted row says about a batch whose commit was not acknowledged."""

    COMMITTED = "committed"
    RERUN = "rerun"
    SPLIT_BRAIN = "split brain"


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """The limits on what is requested and fetched ahead, and on what is reduced at once."""

    fetch_rows_max: int
    fetch_bytes_max: int
    fetch_wait_ms: int
    batch_rows_max: int
    batch_bytes_max: int
    queued_bytes_max: int
    """The most bytes of rows that are fetched and not yet taken, over all mappers. Each mapper may exceed its share by
    one response."""
    enough_bytes: int | None = None
    """The bytes of fetched rows, over all mappers, from which on it is not worth waiting for more. By default half of
    ``batch_bytes_max``."""


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """The next request to one mapper."""

    mapper_index: MapperIndex
    epoch: int
    committed_row_index: ShuffleIndex
    from_row_index: ShuffleIndex
    max_rows: int
    max_bytes: int
    wait_ms: int
    generation: int = 0
    """The generation of the processor, as the reducer's row in the store says."""


@dataclass(frozen=True, slots=True)
class FetchedBatch:
    """One record batch of one mapper. It is never divided, because only the index of its last row is known."""

    mapper_index: MapperIndex
    from_row_index: ShuffleIndex
    """The cursor before its first row: a shuffle index below that of the first row. (Indexes have gaps, where other
    reducers' rows are.)"""
    last_row_index: ShuffleIndex
    batch: pa.RecordBatch
    size_bytes: int
    front: int | None = None
    """The promise of the mapper behind this batch: no later row is below this value of its clock. None if there is no
    promise."""


@dataclass(frozen=True, slots=True)
class ReduceBatch:
    """What is reduced and committed at once: batches of all mappers, and the positions before and after them."""

    number: int
    """The number of the batch, counted from 1 in the life of this instance."""
    epoch: int
    attempt: int
    """The number of the attempt at reducing and committing these rows, counted from 1."""
    parts: tuple[FetchedBatch, ...] = field(repr=False)
    expected: ReducerState
    """The reducer's row that the store must hold when the batch is committed."""
    new: ReducerState
    """The reducer's row that the commit of the batch writes."""
    row_count: int
    size_bytes: int

    def rowset(self) -> pa.Table:
        """All its rows, those of a mapper together and in their order."""
        table = pa.Table.from_batches([part.batch for part in self.parts])
        if len(self.parts) > 1 and table.num_rows < _CHUNK_ROWS_SMALL * len(self.parts):
            return table.combine_chunks()
        return table

    def origin(self, row: int) -> tuple[FetchedBatch, int]:
        """The part that row number ``row`` of the rowset came in, and its number in that part."""
        for part in self.parts:
            if row < part.batch.num_rows:
                return part, row
            row -= part.batch.num_rows
        raise IndexError(f"the batch has {self.row_count} rows")

    def ranges(self) -> list[tuple[MapperIndex, ShuffleIndex, ShuffleIndex]]:
        """(mapper, first, last): no row of this batch lies outside of these shuffle indexes."""
        ranges: dict[MapperIndex, tuple[ShuffleIndex, ShuffleIndex]] = {}
        for part in self.parts:
            first, _ = ranges.get(part.mapper_index, (ShuffleIndex(part.from_row_index + 1), None))
            ranges[part.mapper_index] = (first, part.last_row_index)
        return [(mapper_index, first, last) for mapper_index, (first, last) in ranges.items()]


class ReducerCore:
    """The state of one reducer instance (see the module's text). The caller serialises all calls."""

    def __init__(self, mapper_count: int, limits: FetchLimits) -> None:
        self.mapper_count = mapper_count
        self.limits = limits
        self.epoch = 0
        self.committed_state = ReducerState.initial(mapper_count)
        self._batches_made = 0
        self._share_bytes = max(1, limits.queued_bytes_max // max(1, mapper_count))
        self._next_mapper = 0
        self._reset(self.committed_state)

    def _reset(self, state: ReducerState) -> None:
        self.committed_state = state
        self._cursors = list(state.committed_row_indices)
        self._complete = list(state.committed_row_indices)
        """For each mapper, the shuffle index up to which all rows of this reducer have been fetched."""
        self._fronts = [state.front(MapperIndex(index)) for index in range(self.mapper_count)]
        """For each mapper, the last front that it promised, ahead of the one that the batch in flight makes durable."""
        self._queued: list[deque[FetchedBatch]] = [deque() for _ in range(self.mapper_count)]
        self._queued_bytes = [0] * self.mapper_count
        self._wait_ms = [self.limits.fetch_wait_ms] * self.mapper_count
        """For each mapper, the milliseconds for which the next request waits, unless rows are on their way to a
        commit."""
        self._in_flight: ReduceBatch | None = None
        self._to_rerun = False
        """Whether the batch in flight must be taken and reduced again."""

    # -- restarts -----------------------------------------------------------------------------------------------------

    def restart(self, persisted: ReducerState) -> None:
        """Drop everything and go on from the persisted state."""
        if len(persisted.committed_row_indices) != self.mapper_count:
            raise ValueError(f"a state of {len(persisted.committed_row_indices)} mappers, not {self.mapper_count}")
        self.epoch += 1
        self._reset(persisted)

    def agrees(self, persisted: ReducerState) -> bool:
        """Whether this instance alone can have written ``persisted``: it is what was committed last, or what the batch
        in flight writes."""
        in_flight = self._in_flight
        return persisted == self.committed_state or (in_flight is not None and persisted == in_flight.new)

    # -- fetch --------------------------------------------------------------------------------------------------------

    def cursor(self, mapper_index: MapperIndex) -> ShuffleIndex:
        return self._cursors[mapper_index]

    def complete_up_to(self, mapper_index: MapperIndex) -> ShuffleIndex:
        """The shuffle index up to which every row of this reducer has been fetched."""
        return self._complete[mapper_index]

    def front(self, mapper_index: MapperIndex) -> int | None:
        """The value of the mapper's clock below which no row is that is fetched from now on; None if none is known."""
        return self._fronts[mapper_index]

    def fetch_plan(self, mapper_index: MapperIndex) -> FetchPlan | None:
        """The next request to this mapper, or None while its share of the memory is used up."""
        room_bytes = self._share_bytes - self._queued_bytes[mapper_index]
        if room_bytes <= 0:
            return None
        committed, cursor = self.committed_state[mapper_index], self._cursors[mapper_index]
        settling = cursor > committed
        wait_ms = self._wait_ms[mapper_index]
        return FetchPlan(
            mapper_index=mapper_index,
            epoch=self.epoch,
            committed_row_index=committed,
            from_row_index=cursor,
            max_rows=self.limits.fetch_rows_max,
            max_bytes=min(self.limits.fetch_bytes_max, room_bytes),
            wait_ms=min(wait_ms, SETTLING_WAIT_MS) if settling else wait_ms,
            generation=self.committed_state.generation,
        )

    def fetched(
        self,
        plan: FetchPlan,
        batches: Sequence[tuple[pa.RecordBatch, ShuffleIndex]],
        tails: Sequence[Tail] = (),
        is_early: bool = False,
    ) -> int:
        """Queue a response: its batches, each with the shuffle index of its last row, and the tails. Returns the number
        of rows queued. A response without rows ``is_early`` if the mapper has not waited for them.

        A response to a request of an earlier epoch, or one that does not continue at the cursor, changes nothing.
        """
        mapper_index = plan.mapper_index
        if plan.epoch != self.epoch or plan.from_row_index != self._cursors[mapper_index]:
            return 0
        parts = _parts(plan, batches, tails)
        if tails:
            self._apply_tail(plan, tails[-1])
        for part in parts:
            self._queued[mapper_index].append(part)
            self._queued_bytes[mapper_index] += part.size_bytes
            self._cursors[mapper_index] = part.last_row_index
        if parts:
            self._wait_ms[mapper_index] = self.limits.fetch_wait_ms
        elif plan.from_row_index == plan.committed_row_index and not is_early:
            longest_ms = max(self.limits.fetch_wait_ms, IDLE_WAIT_MS_MAX)
            self._wait_ms[mapper_index] = min(2 * self._wait_ms[mapper_index], longest_ms)
        return sum(part.batch.num_rows for part in parts)

    def _apply_tail(self, plan: FetchPlan, tail: Tail) -> None:
        """Take over what the mapper promises behind a response. An earlier promise that goes further stays true: the
        mapper may have been restarted, and not be that far again."""
        mapper_index = plan.mapper_index
        if tail.generation != plan.generation:
            raise ShuffleError(
                f"mapper {mapper_index} answered for generation {tail.generation}, and was asked for "
                f"{plan.generation}: the answer is dropped",
                mapper=mapper_index,
                generation=tail.generation,
            )
        self._complete[mapper_index] = max(self._complete[mapper_index], tail.complete_up_to)
        self._fronts[mapper_index] = _later(self._fronts[mapper_index], tail.front)

    @property
    def queued_bytes(self) -> int:
        return sum(self._queued_bytes)

    @property
    def queued_rows(self) -> int:
        return sum(part.batch.num_rows for queued in self._queued for part in queued)

    # -- reduce -------------------------------------------------------------------------------------------------------

    @property
    def has_enough(self) -> bool:
        """Whether it is no use to wait for more rows: there are many, or a mapper's share of the memory is full so that
        none can come from it, or a batch has to be reduced again before others."""
        limits = self.limits
        enough_bytes = limits.batch_bytes_max // 2 if limits.enough_bytes is None else limits.enough_bytes
        many = self.queued_bytes >= enough_bytes or self.queued_rows >= limits.batch_rows_max // 2
        return many or self._to_rerun or max(self._queued_bytes, default=0) >= self._share_bytes

    @property
    def in_flight(self) -> ReduceBatch | None:
        return self._in_flight

    def take(self) -> ReduceBatch | None:
        """The next batch to reduce: the one to be reduced again, else what has been fetched, up to the batch limits."""
        if self._in_flight is not None:
            again, self._to_rerun = self._to_rerun, False
            return self._in_flight if again else None
        parts = self._take_parts()
        if not parts:
            return None
        expected = self.committed_state
        # The fronts of exactly these parts: what was promised behind parts that are still queued does not hold here.
        fronts = {part.mapper_index: part.front for part in parts if part.front is not None}
        self._batches_made += 1
        self._in_flight = ReduceBatch(
            number=self._batches_made,
            epoch=self.epoch,
            attempt=1,
            parts=tuple(sorted(parts, key=lambda part: part.mapper_index)),
            expected=expected,
            new=expected.advanced({part.mapper_index: part.last_row_index for part in parts}, fronts),
            row_count=sum(part.batch.num_rows for part in parts),
            size_bytes=sum(part.size_bytes for part in parts),
        )
        return self._in_flight

    def _take_parts(self) -> list[FetchedBatch]:
        """Parts of all mappers in turn, so that no mapper waits for another; rows of one schema only."""
        parts: list[FetchedBatch] = []
        row_count = size_bytes = 0
        turn = [(self._next_mapper + i) % self.mapper_count for i in range(self.mapper_count)]
        if turn:
            self._next_mapper = (self._next_mapper + 1) % self.mapper_count
        while turn:
            for mapper_index in list(turn):
                queued = self._queued[mapper_index]
                if not queued or (parts and not queued[0].batch.schema.equals(parts[0].batch.schema)):
                    turn.remove(mapper_index)
                    continue
                head = queued[0]
                full = (
                    row_count + head.batch.num_rows > self.limits.batch_rows_max
                    or size_bytes + head.size_bytes > self.limits.batch_bytes_max
                )
                # A single part over the limit must pass all the same, alone, or nothing would ever pass again.
                if parts and full:
                    return parts
                queued.popleft()
                self._queued_bytes[mapper_index] -= head.size_bytes
                parts.append(head)
                row_count += head.batch.num_rows
                size_bytes += head.size_bytes
        return parts

    # -- commit -------------------------------------------------------------------------------------------------------

    def is_current(self, batch: ReduceBatch) -> bool:
        """Whether the result of reducing ``batch`` can still be committed."""
        return batch is self._in_flight and not self._to_rerun

    def committed(self, batch: ReduceBatch) -> None:
        """The store has acknowledged the commit of ``batch``, or the reducer's row shows that it has happened."""
        self._check_in_flight(batch)
        self._in_flight, self._to_rerun = None, False
        self.committed_state = batch.new

    def rerun(self, batch: ReduceBatch) -> None:
        """The commit of ``batch`` did not happen: reduce it again."""
        self._check_in_flight(batch)
        self._in_flight, self._to_rerun = replace(batch, attempt=batch.attempt + 1), True

    def settle(self, batch: ReduceBatch, persisted: ReducerState) -> Settled:
        """Decide by the persisted row what became of a commit that was not acknowledged, and act upon it.

        - It is the row the batch writes: the commit happened. (Or another instance committed these very rows: the same
          bytes with the same effect, once.)
        - It is the row the batch expects: the commit has not happened. It may still arrive late; but it and the second
          attempt both require the expected row and both change it, so at most one of them applies, and if it is the
          late one, the second attempt ends here again and finds the first case.
        - Anything else: another instance is alive. Start again from the state that it has written.
        """
        if persisted == batch.new:
            self.committed(batch)
            return Settled.COMMITTED
        if persisted == batch.expected:
            self.rerun(batch)
            return Settled.RERUN
        self.restart(persisted)
        return Settled.SPLIT_BRAIN

    def _check_in_flight(self, batch: ReduceBatch) -> None:
        if batch is not self._in_flight:
            raise ShuffleError(f"batch {batch.number} (attempt {batch.attempt}) is not in flight")


def _later(before: int | None, front: int | None) -> int | None:
    return before if front is None else front if before is None else max(before, front)


def _parts(
    plan: FetchPlan, batches: Sequence[tuple[pa.RecordBatch, ShuffleIndex]], tails: Sequence[Tail]
) -> list[FetchedBatch]:
    parts: list[FetchedBatch] = []
    before = plan.from_row_index
    for at, (batch, last) in enumerate(batches):
        if batch.num_rows == 0:
            continue
        # Every row has an index of its own above the one before, so a batch spans at least as many indexes as rows.
        if last < before + batch.num_rows:
            raise ShuffleError(
                f"mapper {plan.mapper_index} answered {batch.num_rows} rows after shuffle index {before} that end at "
                f"{last}, which is impossible: the answer is dropped",
                mapper=plan.mapper_index,
                position=before,
            )
        front = tails[at].front if tails else None
        parts.append(FetchedBatch(plan.mapper_index, before, last, batch, max(1, batch.nbytes), front))
        before = last
    return parts
