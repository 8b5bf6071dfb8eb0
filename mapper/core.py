"""The mapper's logic: numberings, window, buckets, and what may be persisted. No I/O, threads, clocks or randomness.

The life of a row in here:

1. ``ingest`` gives it a shuffle index and puts it into a part of a window entry and into its reducer's bucket, after
   checking that the persisted state is still the one this instance knows. Only from then on can it be served.
2. ``get_rows`` serves it, any number of times, until its reducer says that it is committed; then its memory is
   freed. What was never served cannot be committed: a request that says so is refused, unless the reducer's own row in
   the store says the same.
3. Entries at the front of the window with no uncommitted row retire; ``local`` moves past them.
4. ``trim_plan`` says what to write in a transaction so that the persisted state follows; ``trimmed`` records it. What
   is forgotten for good follows what the store says and not what requests say: ``check_claims`` compares them before.

Where reducers are away for long, 3 would never come for the entries they hold, so their rows of those go to the spill
(``spilling``): ``trim_plan`` names them, and the transaction that moves the persisted state past them stores them. From
then on ``spill_read`` says where to find them, and ``get_rows`` returns no rows until they have all been fetched.

After ``restart`` everything goes on from the persisted state: rows are read and mapped again and get the same indexes.
Reducers may by then have committed rows that have not been mapped again yet; they are freed when they come.

``entry_life`` has the states that a window entry passes through meanwhile, as a table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import pyarrow as pa

from shuffle.durable.mapper_state import MapperState
from shuffle.durable.spill_ends import SpillEnd
from shuffle.errors import BadInput, RowsGone, SplitBrain, StaleGeneration, StaleMapper, StoreUnavailable
from shuffle.ids import Guid, InputIndex, MapperIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.limits import MIB
from shuffle.mapper.bucket import Bucket, ServedBatch
from shuffle.mapper.claims import Claims
from shuffle.mapper.entry_life import PERSIST, after
from shuffle.mapper.spill.format import SpillPart
from shuffle.mapper.spill.index import Spill
from shuffle.mapper.spill.policy import ReducerView, Spilling, spill_part
from shuffle.mapper.spill.response import SpillRead
from shuffle.mapper.trim_plan import RetiredRange, TrimPlan
from shuffle.mapper.window import EntryPart, MappedBatch, MappedPart, Window, WindowEntry, WindowSize
from shuffle.messages import GetRows, Tail
from shuffle.spec.config import SpillSpec

OWN_STATES_MAX = 16
"""The number of states that this instance remembers to have written. A fetch of the persisted state may return one from
before a trim that was recorded in the meantime; more than a few such trims do not fit into one fetch."""

DEAD_LETTER_BYTES_MAX = 64 * MIB
"""The most bytes of dead letters in one trim. A transaction has a limit, so more of them take several."""


class MapperCore:
    """The state of one mapper instance (see the module's text). The caller serialises all calls."""

    def __init__(
        self,
        guid: Guid,
        mapper_index: MapperIndex,
        reducer_count: int,
        memory_bytes_max: int,
        spill: SpillSpec | None = None,
        processor: str = "",
    ) -> None:
        """``spill`` says when to spill. Without it nothing is spilled, but rows that were spilled before are served."""
        self.guid = guid
        self.processor = processor
        self.mapper_index = mapper_index
        self.memory_bytes_max = memory_bytes_max
        self.reserved_bytes = 0
        """The bytes of ``memory_bytes_max`` that are not for the window, but for memory shared with reducers
        (``shared_core.MemoryBudget``)."""
        self.schema: pa.Schema | None = None
        """The schema of the mapped rows; None until the first batch was mapped."""
        self.reducer_count = reducer_count
        self._claims = Claims(mapper_index, reducer_count)
        self._is_disputed = False
        """True if a request has called fewer rows committed than an earlier one in the name of the same reducer."""
        self.waiting = [0] * reducer_count
        """For each reducer, the number of its requests that wait for rows at this moment. It is counted by
        ``SharedCore``, which lets them wait."""
        self.spilling = Spilling(reducer_count, memory_bytes_max, spill)
        self.restart(None)

    def restart(
        self, persisted: MapperState | None, committed: Mapping[ReducerIndex, ShuffleIndex] | None = None
    ) -> None:
        """Drop everything and go on from ``persisted``; None is the state of a mapper that never ran.

        ``committed`` is what each reducer's row in the store said then, or later. Rows before the state are gone, and a
        reducer that does not know that it has committed them must not be served as if they had never existed.
        What is in the spill must be passed to ``load_spill``; until then the spill counts as empty.
        """
        self.persisted = persisted or MapperState()
        self._own = deque([self.persisted], maxlen=OWN_STATES_MAX)
        self._attempts: deque[MapperState] = deque(maxlen=OWN_STATES_MAX)
        self._retired: deque[RetiredRange] = deque()
        self._dead_letter_bytes = 0
        self._window = Window()
        self._buckets = [Bucket(ReducerIndex(index)) for index in range(self.reducer_count)]
        self._restart_index = self.persisted.shuffle_unread_row_index
        self.learn_committed(committed or {})
        for reducer_index, row_index in (committed or {}).items():
            if reducer_index < self.reducer_count:
                self._buckets[reducer_index].freed = min(row_index, ShuffleIndex(self._restart_index - 1))
        self.next_input_index = self.persisted.input_unread_row_index
        self.next_shuffle_index = self.persisted.shuffle_unread_row_index
        self.token = self.persisted.continuation_token
        self.front = self.persisted.front
        """The mapper's clock behind the last row that was mapped; None if it has none."""
        self.spilling.restart()

    # Ingestion

    @property
    def wants_input(self) -> bool:
        """Whether there is room for another batch. The one batch that is being mapped may go over the limit."""
        return self.nbytes < self.window_bytes_max

    @property
    def window_bytes_max(self) -> int:
        """The bytes of the memory limit that are left to the window."""
        return self.memory_bytes_max - self.reserved_bytes

    @property
    def nbytes(self) -> int:
        return self._window.nbytes + self._dead_letter_bytes

    def observe(self, state: MapperState | None) -> None:
        """Raise SplitBrain unless ``state``, just read from the store, was written by this instance.

        A commit whose response was lost may show up late, so a state that this instance tried to write counts as its
        own, and is adopted. Should another instance have written the very same state, nothing is lost: equal positions
        mean equal rows before them.
        """
        observed = state or MapperState()
        if observed in self._own:
            return
        if observed in self._attempts:
            self.trimmed(observed)
            # Only the store can tell which attempt it was, and what it has spilled.
            self.forget_spill()
            return
        raise SplitBrain(
            f"mapper {self.mapper_index}: another instance is alive. It has moved the persisted state to "
            f"input row {observed.input_unread_row_index}; this instance left it at "
            f"{self.persisted.input_unread_row_index}",
            mapper_index=self.mapper_index,
            expected=self.persisted.input_unread_row_index,
            found=observed.input_unread_row_index,
        )

    def skip_to(self, token: Token) -> None:
        """The reader moved on without rows, over a gap in its positions."""
        self.token = token

    def ingest(
        self, observed: MapperState | None, rows_in: int, token_after: Token, mapped: MappedBatch
    ) -> list[ReducerIndex]:
        """Take in one mapped batch of ``rows_in`` input rows; returns the reducers that have something new to fetch.

        ``observed`` is the persisted state, read from the store after these rows were read from the input.
        """
        self.observe(observed)
        self.schema = self.schema or mapped.schema
        entry = WindowEntry(
            input_begin=self.next_input_index,
            input_end=InputIndex(self.next_input_index + rows_in),
            shuffle_begin=self.next_shuffle_index,
            shuffle_end=ShuffleIndex(self.next_shuffle_index + mapped.rows_out),
            token_after=token_after,
            dead_letters=mapped.dead_letters,
            ingested_us=mapped.ingested_us,
            front_before=self.front,
            front=mapped.front if mapped.front is not None else self.front,
        )
        parts = [part for rows in mapped.parts if (part := self._uncommitted_part(entry, rows)) is not None]
        self._window.push(entry)
        for part in parts:
            self._buckets[part.reducer_index].push(part)
        self.next_input_index, self.next_shuffle_index = entry.input_end, entry.shuffle_end
        self.token = token_after
        self.front = entry.front
        self._retire_entries()
        return [part.reducer_index for part in parts]

    def _uncommitted_part(self, entry: WindowEntry, mapped: MappedPart) -> EntryPart | None:
        """The entry part of these rows, without those that the reducer had committed before this instance mapped them;
        None if no row is left."""
        assert mapped.rows.num_rows == len(mapped.row_offsets)
        if mapped.rows.num_rows == 0:
            return None
        bucket = self._buckets[mapped.reducer_index]
        part = entry.add_part(mapped.reducer_index, mapped.rows, mapped.row_offsets)
        committed_rows = part.commit(bucket.committed)
        if committed_rows:
            bucket.freed = part.row_index_at(committed_rows - 1)
        if part.is_committed:
            del entry.parts[mapped.reducer_index]
            return None
        return part

    # Serving

    def get_rows(self, request: GetRows) -> list[ServedBatch]:
        """The rows for one GetRows. The steps are those of the protocol:

        1. refuse a request that was meant for another instance, or is of another generation, and one that calls rows
           committed that cannot be;
        2. free what the reducer has committed, move the pointer counts, retire entries at the front;
        3. return the rows after the cursor. They stay in the bucket. While there are rows after the cursor in the
           spill, return none: ``spill_read`` says where those are.
        """
        # 1
        self._check_request(request)
        bucket = self._buckets[request.reducer_index]
        self._claims.check_request(request, bucket)
        self._check_servable(request, bucket)
        # 2
        if request.committed_row_index > bucket.committed:
            bucket.commit(request.committed_row_index, self._window)
            self._retire_entries()
        spill = self.spilling.spills.get(request.reducer_index)
        if spill is not None:
            spill.commit(bucket.committed)
            bucket.freed = max(bucket.freed, spill.freed)
        # 3
        if self.spill_read(request) is not None:
            return []
        rows = bucket.rows_after(
            request.from_row_index, request.to_row_index, request.max_rows, request.max_bytes, request.with_metadata
        )
        served = list(rows)
        self.note_served(request.reducer_index, served)
        return served

    def note_served(self, reducer_index: ReducerIndex, served: Sequence[ServedBatch]) -> None:
        """Record that these rows are about to be sent, whether they came from the bucket or from the spill."""
        if served:
            bucket = self._buckets[reducer_index]
            bucket.served = max(bucket.served, served[-1].last_row_index)

    def tail(self, request: GetRows, served: Sequence[ServedBatch]) -> Tail:
        """Where the reducer stands after ``served``, which has just come from ``get_rows`` or from the spill.

        Its next row is the next one in its bucket, and the rows in between belong to other reducers. While it may have
        rows in the spill, nothing can be promised about what comes after the last row served.
        """
        last = served[-1].last_row_index if served else request.from_row_index
        generation = self.persisted.generation
        spill = self.spilling.spills.get(request.reducer_index)
        is_in_spill = spill is not None and not spill.is_empty and last < spill.end.last_row_index
        if is_in_spill or (not self.spilling.is_known and last < self.persisted.shuffle_unread_row_index - 1):
            return Tail(last, last, None, generation)
        following = self._buckets[request.reducer_index].first_row_index_after(last)
        complete = ShuffleIndex(max(last, (self.next_shuffle_index if following is None else following) - 1))
        front = self.front
        if front is not None and complete < self.next_shuffle_index - 1:
            front = self._window.front_at(complete)
        return Tail(last, complete, front, generation)

    def spill_read(self, request: GetRows) -> SpillRead | None:
        """What to read of the spill in response to ``request``; None if its rows are in the bucket."""
        spill = self.spilling.spills.get(request.reducer_index)
        if spill is None or spill.is_empty or request.from_row_index >= spill.end.last_row_index:
            return None
        cursor = request.from_row_index
        return SpillRead(
            request.reducer_index,
            spill,
            spill.position_after(cursor),
            spill.end.position,
            cursor,
            request.to_row_index,
            request.max_rows,
            request.max_bytes,
            request.with_metadata,
        )

    def _check_request(self, request: GetRows) -> None:
        if request.mapper_id != self.guid:
            raise StaleMapper(
                f"the request is for instance {request.mapper_id} of a mapper, but this is instance {self.guid} of "
                f"mapper {self.mapper_index}: ask discovery again",
                mapper_index=self.mapper_index,
                mapper_id=self.guid,
            )
        if request.processor and request.processor != self.processor:
            raise BadInput(
                f"the request is of processor {request.processor!r}, but this is mapper {self.mapper_index} of "
                f"processor {self.processor!r}: nothing was changed. Ask the mappers of your own processor",
                processor=self.processor,
            )
        if request.generation != self.persisted.generation:
            raise StaleGeneration(
                f"the request is of generation {request.generation} of processor {self.processor!r}, but mapper "
                f"{self.mapper_index} serves generation {self.persisted.generation}: nothing was changed. Read the "
                "reducer's state again",
                mapper_index=self.mapper_index,
                generation=self.persisted.generation,
            )
        if not 0 <= request.reducer_index < self.reducer_count:
            raise BadInput(
                f"there is no reducer {request.reducer_index}: mapper {self.mapper_index} knows {self.reducer_count}",
                reducer_index=request.reducer_index,
            )
        if request.max_rows < 1 or request.max_bytes < 1:
            raise BadInput(f"max_rows={request.max_rows} and max_bytes={request.max_bytes} leave no room for any row")

    def _check_servable(self, request: GetRows, bucket: Bucket) -> None:
        """Raise RowsGone rather than leave out rows that this reducer, by its own request, has not committed.

        For what was in this instance's own memory the check is exact. For what was trimmed before it started, the
        persisted state only says that every reducer has committed all of its rows below it: the reducer's last row may
        be far below. But the end of a range that is requested explicitly (``to_row_index``) was one of its rows, and
        cannot have been trimmed before it was committed.
        """
        if not self.spilling.is_known and request.from_row_index < self.persisted.shuffle_unread_row_index - 1:
            raise StoreUnavailable(
                f"mapper {self.mapper_index} has to read again from the store what it has spilled: ask again soon",
                mapper_index=self.mapper_index,
            )
        if request.committed_row_index < bucket.freed:
            self._is_disputed = True
            raise RowsGone(
                f"reducer {request.reducer_index} says it has committed mapper {self.mapper_index}'s rows up to "
                f"{request.committed_row_index}, but it has told before that it committed {bucket.freed}, and those "
                "rows are gone: another instance of this reducer is alive, or its state was lost. "
                "Read the reducer's state again",
                mapper_index=self.mapper_index,
                reducer_index=request.reducer_index,
                committed_row_index=request.committed_row_index,
                dropped_row_index=bucket.freed,
            )
        to = request.to_row_index
        spill = self.spilling.spills.get(request.reducer_index)
        if spill is not None and not spill.is_empty:
            return  # The spill holds all rows from before the restart, and reading it detects those that are missing.
        if to is not None and request.from_row_index < to < self._restart_index:
            raise RowsGone(
                f"rows ({request.from_row_index}, {to}] of mapper {self.mapper_index} for reducer "
                f"{request.reducer_index} were committed and trimmed: the first row there is has index "
                f"{self._restart_index}",
                mapper_index=self.mapper_index,
                reducer_index=request.reducer_index,
                dropped_row_index=self._restart_index - 1,
            )

    # What is committed, as the store says

    def learn_committed(self, committed: Mapping[ReducerIndex, ShuffleIndex]) -> None:
        """Take note of what the reducers' rows in the store say, or said a moment ago."""
        self._claims.learn(committed)

    def claims(self) -> dict[ReducerIndex, ShuffleIndex]:
        """For each reducer the last row freed because of a claim that the store has not been seen to confirm."""
        return self._claims.unconfirmed(self._buckets, self.spilling.spills)

    def take_dispute(self) -> dict[ReducerIndex, ShuffleIndex]:
        """The claims to compare with the store, if a reducer has denied one since the last call; otherwise none.

        A reducer that has committed less than was claimed in its name cannot get its rows. An entry that holds later
        rows of it is not retired then, so that no trim would ever find the false claim.
        """
        is_disputed, self._is_disputed = self._is_disputed, False
        return self.claims() if is_disputed else {}

    def check_claims(
        self, claims: Mapping[ReducerIndex, ShuffleIndex], committed: Mapping[ReducerIndex, ShuffleIndex]
    ) -> None:
        """Raise FalseClaim if ``committed``, which was read after ``claims`` were made, contradicts one of them."""
        self._claims.learn(committed)
        self._claims.check(claims)

    # Spilling

    def tick(self, now_ms: int) -> None:
        """Look which reducers are stragglers; ``trim_plan`` decides by it. It is called regularly, by the trim."""
        reducers = [
            ReducerView(bucket, self._claims.committed(bucket), self.waiting[bucket.reducer_index] > 0)
            for bucket in self._buckets
        ]
        self.spilling.tick(now_ms, reducers, self.next_shuffle_index, self.nbytes, self.window_bytes_max)

    @property
    def spill_is_due(self) -> bool:
        """Whether there are entries to spill now."""
        return bool(self.spilling.front(self._window, not self.wants_input))

    def load_spill(self, spills: Mapping[ReducerIndex, Spill]) -> None:
        """Take over what the spill held in the read view from which the persisted state was read."""
        self.spilling.load(spills, self._buckets)

    def forget_spill(self) -> None:
        """What is in the spill is not known any more. Until it has been read again, nothing is served from before the
        persisted state."""
        self.spilling.is_known = False

    # Trimming

    @property
    def local(self) -> MapperState:
        """The state that could be persisted by now: the one behind the last entry that has retired."""
        return self._retired[-1].state if self._retired else self.persisted

    def _state_after(self, entry: WindowEntry) -> MapperState:
        generation = self.persisted.generation
        return MapperState(entry.input_end, entry.shuffle_end, entry.token_after, generation, entry.front)

    def _retire_entries(self) -> None:
        for entry in self._window.retire_front():
            state = self._state_after(entry)
            if entry.dead_letters is None:
                # Ranges without dead letters are merged into one, so this queue stays short. Dead letters keep the
                # state they belong to: a plan that ends there may be on its way.
                if self._retired and not self._retired[-1].dead_letters:
                    self._retired[-1].state = state
                else:
                    self._retired.append(RetiredRange(state))
            else:
                dead_letter_bytes = int(entry.dead_letters.get_total_buffer_size())
                self._retired.append(RetiredRange(state, [entry.dead_letters], dead_letter_bytes))
                self._dead_letter_bytes += dead_letter_bytes

    def trim_plan(self) -> TrimPlan | None:
        """What to commit next, or None if the persisted state cannot be advanced.

        It relies on what requests have called committed up to now. Before it is committed, ``check_claims`` must have
        compared ``claims`` with what the store says; what requests say after this does not matter to it.
        """
        dead_letters: list[pa.Table] = []
        dead_letter_bytes = 0
        state = self.persisted
        spill: dict[ReducerIndex, list[SpillPart]] = {}
        for retired in self._retired:
            dead_letter_bytes += retired.dead_letter_bytes
            if dead_letters and dead_letter_bytes > DEAD_LETTER_BYTES_MAX:
                break
            dead_letters.extend(retired.dead_letters)
            state = retired.state
        else:
            for entry in self.spilling.front(self._window, not self.wants_input):
                dead_letter_bytes += entry.overhead_bytes
                if dead_letters and dead_letter_bytes > DEAD_LETTER_BYTES_MAX:
                    break
                dead_letters.extend([] if entry.dead_letters is None else [entry.dead_letters])
                for reducer_index, part in entry.parts.items():
                    spill.setdefault(reducer_index, []).append(spill_part(part))
                state = self._state_after(entry)
        if not self.persisted.is_before(state):
            return None
        # From here on the plan may be committed without this instance ever getting the response.
        if state not in self._attempts:
            self._attempts.append(state)
        freed = {reducer_index: self._buckets[reducer_index].freed for reducer_index in spill}
        table = pa.concat_tables(dead_letters) if dead_letters else None
        return TrimPlan(self.persisted, state, table, spill, self.claims(), freed)

    def trimmed(self, state: MapperState) -> None:
        """``state`` is the persisted one now. The rows before it that the window still held are in the spill."""
        assert self.persisted.is_before(state)
        self.persisted = state
        self._own.append(state)
        for bucket in self._buckets:
            bucket.spill(state.shuffle_unread_row_index, self._window)
        self._retire_entries()
        while self._retired and not state.is_before(self._retired[0].state):
            passed = self._retired.popleft()
            passed.life = after(passed.life, PERSIST)
            self._dead_letter_bytes -= passed.dead_letter_bytes
        while self._attempts and not state.is_before(self._attempts[0]):
            self._attempts.popleft()

    def spilled(self, ends: Mapping[ReducerIndex, SpillEnd]) -> None:
        """The plan that was just recorded by ``trimmed`` has spilled rows, and the spills end at ``ends`` now."""
        self.spilling.record(ends)

    # Status

    @property
    def is_drained(self) -> bool:
        """Whether no mapped row waits for its reducer any more, neither in the window nor in the spill."""
        spills = self.spilling.spills.values()
        return not len(self._window) and self.spilling.is_known and all(spill.is_empty for spill in spills)

    @property
    def window_size(self) -> WindowSize:
        return self._window.size()

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets
