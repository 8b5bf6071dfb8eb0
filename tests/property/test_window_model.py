"""Window, buckets and core against a plain list of (shuffle index, reducer), through random events."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shuffle.durable.mapper_state import MapperState
from shuffle.errors import FalseClaim, NotServed, RowsGone, SplitBrain, StoreUnavailable
from shuffle.ids import Guid, MapperIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.mapper.bucket import ServedBatch
from shuffle.mapper.core import MappedBatch, MapperCore
from shuffle.mapper.mapping import cut
from shuffle.mapper.trim_plan import TrimPlan
from shuffle.messages import GetRows
from shuffle.user_code.poison import dead_letters

REDUCERS = 3
SCHEMA = pa.schema([("v", pa.string())])
LIMIT_BYTES = 12_000

InputRow = tuple[int, ...] | None
"""The reducers that the rows made of one input row go to; None is a row that cannot be mapped."""
input_rows = st.one_of(st.none(), st.lists(st.integers(0, REDUCERS - 1), max_size=3).map(tuple))


def letters_of(positions: list[int]) -> pa.Table | None:
    if not positions:
        return None
    return dead_letters(
        processor="p",
        role="mapper",
        worker=0,
        mappers=[0] * len(positions),
        positions=positions,
        reasons=["bad"] * len(positions),
        rows=pa.table({"v": positions}),
    )


def front_at(shuffle_index: int) -> int:
    """The clock of this mapper at a row: it stands still for some rows, and never falls."""
    return shuffle_index // 3 * 10


class WindowModel(RuleBasedStateMachine):
    """The input is endless and drawn as it is read; once drawn a row never changes, as the contract demands."""

    @initialize()
    def begin(self) -> None:
        self.input: list[InputRow] = []
        self.core = MapperCore(Guid("g"), MapperIndex(0), REDUCERS, LIMIT_BYTES)
        self.persisted: MapperState | None = None
        self.letters: list[int] = []
        self.committed = [-1] * REDUCERS
        self.cursor = [-1] * REDUCERS
        self.plan: TrimPlan | None = None
        self.largest_batch_bytes = 0

    def produced(self, upto_input: int) -> list[tuple[int, int]]:
        """The model: (shuffle index, reducer) for all rows made of the first ``upto_input`` input rows."""
        targets = [reducer for row in self.input[:upto_input] if row is not None for reducer in row]
        return list(enumerate(targets))

    def of_reducer(self, reducer: int, after: int, to: int) -> list[int]:
        return [index for index, target in self.produced(to) if target == reducer and index > after]

    @precondition(lambda self: self.core.wants_input)
    @rule(fresh=st.lists(input_rows, min_size=1, max_size=6), count=st.integers(1, 6), large=st.booleans())
    def ingest(self, fresh: list[InputRow], count: int, large: bool) -> None:
        begin = self.core.next_input_index
        if begin + count > len(self.input):
            self.input.extend(fresh)
        rows = self.input[begin : begin + count]
        targets = [reducer for row in rows if row is not None for reducer in row]
        first = self.core.next_shuffle_index
        values = [f"{first + i}:" + "x" * (1000 if large else 1) for i in range(len(targets))]
        table = pa.table([pa.array(values, pa.string())], schema=SCHEMA)
        poison = [begin + i for i, row in enumerate(rows) if row is None]
        parts = cut(table, np.array(targets, np.int64), REDUCERS)
        mapped = MappedBatch(SCHEMA, len(targets), parts, letters_of(poison), front=front_at(first + len(targets)))
        before = self.core.nbytes
        self.core.ingest(self.persisted, len(rows), Token(b"%d" % (begin + len(rows))), mapped)
        self.largest_batch_bytes = max(self.largest_batch_bytes, self.core.nbytes - before)

    @rule(reducer=st.integers(0, REDUCERS - 1), rows_max=st.integers(1, 5), bytes_max=st.sampled_from([1, 50, 1 << 20]))
    def fetch(self, reducer: int, rows_max: int, bytes_max: int) -> None:
        self.ask(reducer, self.committed[reducer], self.cursor[reducer], rows_max, bytes_max)

    def spill_is_known_after(self, cursor: int) -> bool:
        """A trim whose answer was lost may have spilled what is before the persisted state: until the store was asked,
        nobody can say whether there are rows after ``cursor`` there."""
        return self.core.spilling.is_known or cursor >= self.core.persisted.shuffle_unread_row_index - 1

    @rule()
    def spill_is_read_again(self) -> None:
        """As the daemon's trim loop does."""
        if not self.core.spilling.is_known:
            self.load()

    def load(self) -> None:
        """Nothing is ever spilled here; test_spill_model.py is about that."""
        self.core.load_spill({})

    def ask(self, reducer: int, committed: int, cursor: int, rows_max: int, bytes_max: int) -> None:
        request = GetRows(
            Guid("g"), ReducerIndex(reducer), ShuffleIndex(committed), ShuffleIndex(cursor), rows_max, bytes_max
        )
        if not self.spill_is_known_after(cursor):
            with pytest.raises(StoreUnavailable):
                self.core.get_rows(request)
            return
        served = self.get_rows(request)
        found = [int(value.split(":")[0]) for one in served for value in one.rows.column(0).to_pylist()]
        expected = self.of_reducer(reducer, cursor, self.core.next_input_index)
        assert found == expected[: len(found)], "in order, without holes, and never another reducer's"
        assert len(found) <= rows_max
        assert found or not expected, "if there is a row after the cursor, it is served"
        for one in served:
            assert one.rows.column(0)[-1].as_py().startswith(f"{one.last_row_index}:")
        self.check_tail(request, served, expected[len(found) :])
        if sum(one.rows.nbytes for one in served) > bytes_max:
            assert len(found) == 1, "only a single row may exceed the bound"
        if found:
            self.cursor[reducer] = found[-1]

    def check_tail(self, request: GetRows, served: list[ServedBatch], following: list[int]) -> None:
        """What is promised behind an answer: all of it is true, and in the window it is all that can be promised."""
        core = self.core
        tail = core.tail(request, served)
        assert tail.last_row_index == (served[-1].last_row_index if served else request.from_row_index)
        assert tail.generation == request.generation
        assert all(index > tail.complete_up_to for index in following)
        assert tail.complete_up_to < max(core.next_shuffle_index, request.from_row_index + 1)
        if tail.front is not None:
            assert tail.front <= front_at(following[0] if following else core.next_shuffle_index)
        spill = core.spilling.spills.get(request.reducer_index)
        if spill is None or spill.is_empty:
            end = following[0] if following else core.next_shuffle_index
            assert tail.complete_up_to == max(tail.last_row_index, end - 1)
            if not following:
                assert tail.front == core.front

    def get_rows(self, request: GetRows) -> list[ServedBatch]:
        """What an instance has not served itself, the store confirms."""
        try:
            return self.core.get_rows(request)
        except NotServed:
            assert request.committed_row_index > self.core.buckets[request.reducer_index].served
            self.core.learn_committed(self.committed_in_the_store())
            return self.core.get_rows(request)

    def committed_in_the_store(self) -> dict[ReducerIndex, ShuffleIndex]:
        return {ReducerIndex(reducer): ShuffleIndex(last) for reducer, last in enumerate(self.committed)}

    @rule(reducer=st.integers(0, REDUCERS - 1), share=st.floats(0, 1))
    def commit(self, reducer: int, share: float) -> None:
        """The reducer makes some of what it fetched durable; the mapper hears of it with the next fetch."""
        total = self.produced(len(self.input))
        fetched = [
            index
            for index, target in total
            if target == reducer and self.committed[reducer] < index <= self.cursor[reducer]
        ]
        if fetched:
            self.committed[reducer] = fetched[min(int(share * len(fetched)), len(fetched) - 1)]

    @rule(reducer=st.integers(0, REDUCERS - 1), share=st.floats(0, 1))
    def somebody_lies(self, reducer: int, share: float) -> None:
        """In the name of a reducer, rows are called committed that are not: served ones, and others.

        The second is refused at once; the first is found before anything is forgotten for good.
        """
        served = self.core.buckets[reducer].served
        before = self.core.window_size, self.core.local, self.core.claims()
        beyond = max(served, self.committed[reducer]) + 1 + int(share * 10)
        with pytest.raises(NotServed) as refused:
            self.core.get_rows(self.lie(reducer, beyond))
        assert refused.value.committed_row_index == beyond
        assert (self.core.window_size, self.core.local, self.core.claims()) == before, "nothing was changed"
        told = self.committed[reducer] + 1 + int(share * (served - self.committed[reducer]))
        if told > served or not self.spill_is_known_after(told):
            return
        try:
            self.core.get_rows(self.lie(reducer, told))
        except RowsGone:
            return  # Lower than what was told before: nothing was changed.
        if self.core.buckets[reducer].freed > self.committed[reducer]:
            with pytest.raises(FalseClaim) as found:
                self.core.check_claims(self.core.claims(), self.committed_in_the_store())
            assert found.value.committed_row_index == self.committed[reducer] < found.value.claimed_row_index
        self.core.restart(self.persisted, self.committed_in_the_store())
        self.load()
        self.plan = None

    def lie(self, reducer: int, committed: int) -> GetRows:
        return GetRows(Guid("g"), ReducerIndex(reducer), ShuffleIndex(committed), ShuffleIndex(committed), 1, 1)

    @rule(reducer=st.integers(0, REDUCERS - 1))
    def reducer_restarts(self, reducer: int) -> None:
        self.cursor[reducer] = self.committed[reducer]

    @rule(reducer=st.integers(0, REDUCERS - 1))
    def stale_reducer_asks(self, reducer: int) -> None:
        """An instance with an old committed index gets an error, never rows with a hole before them."""
        dropped = self.core.buckets[reducer].freed
        if dropped < 0 or not self.spill_is_known_after(-1):
            return
        with pytest.raises(RowsGone) as error:
            self.core.get_rows(
                GetRows(Guid("g"), ReducerIndex(reducer), ShuffleIndex(-1), ShuffleIndex(-1), 10, 1 << 20)
            )
        assert error.value.dropped_row_index == dropped

    @rule()
    def mapper_restarts(self) -> None:
        self.core.restart(self.persisted)
        self.plan = None

    @precondition(lambda self: self.plan is None)
    @rule()
    def trim_begins(self) -> None:
        self.plan = self.core.trim_plan()

    @precondition(lambda self: self.plan is not None)
    @rule(outcome=st.sampled_from(["committed", "conflict", "unknown, happened", "unknown, did not happen"]))
    def trim_ends(self, outcome: str) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        assert plan.expected == (self.persisted or MapperState())
        self.core.check_claims(plan.claims, self.committed_in_the_store())
        if outcome in ("committed", "unknown, happened"):
            self.persisted = plan.state
            if plan.dead_letters is not None:
                self.letters.extend(plan.dead_letters["position"].to_pylist())
        if outcome == "committed":
            self.core.trimmed(plan.state)
        else:
            self.core.observe(self.persisted)

    @rule()
    def another_instance_is_noticed(self) -> None:
        ahead = MapperState(
            self.core.next_input_index + 1,  # type: ignore[arg-type]
            self.core.next_shuffle_index,
            Token(b"other"),
            front=self.core.front,
        )
        before = self.core.next_input_index
        with pytest.raises(SplitBrain):
            self.core.ingest(ahead, 1, Token(b""), MappedBatch(SCHEMA, 0, []))
        assert self.core.next_input_index == before

    @invariant()
    def fronts_belong_to_their_positions(self) -> None:
        for state in (self.core.persisted, self.core.local):
            right = front_at(state.shuffle_unread_row_index) if state.input_unread_row_index else None
            assert (state.front, state.generation) == (right, 0)

    @invariant()
    def nothing_uncommitted_is_passed(self) -> None:
        for state in (self.core.persisted, self.core.local):
            passed = self.produced(state.input_unread_row_index)
            assert len(passed) == state.shuffle_unread_row_index
            assert all(index <= self.committed[reducer] for index, reducer in passed)
            assert state.continuation_token == (
                b"%d" % state.input_unread_row_index if state.input_unread_row_index else b""
            )

    @invariant()
    def dead_letters_are_exactly_those_passed(self) -> None:
        passed = self.persisted.input_unread_row_index if self.persisted else 0
        assert self.letters == [i for i, row in enumerate(self.input[:passed]) if row is None]

    @invariant()
    def window_adds_up(self) -> None:
        core = self.core
        assert core.window_size.rows == sum(bucket.rows for bucket in core.buckets)
        assert core.nbytes <= LIMIT_BYTES + self.largest_batch_bytes
        pointers = sum(entry.pointer_count for entry in core._window.entries)
        assert pointers == sum(1 for bucket in core.buckets if bucket.rows)
        parts = [part for entry in core._window.entries for part in entry.parts.values()]
        assert core.window_size.nbytes == sum(entry.nbytes for entry in core._window.entries)
        assert sum(part.nbytes for part in parts) == sum(bucket.nbytes for bucket in core.buckets)
        if core._window.entries:
            assert core._window.entries[0].pointer_count > 0

    def teardown(self) -> None:
        """When the faults stop, everything is served, committed and trimmed in a bounded number of rounds."""
        for _ in range(2 * len(self.input) + 2 * REDUCERS + 10):
            self.core.observe(self.persisted)
            self.spill_is_read_again()
            if self.core.wants_input and self.core.next_input_index < len(self.input):
                self.ingest([], 1, False)
            for reducer in range(REDUCERS):
                self.ask(reducer, self.committed[reducer], self.cursor[reducer], 1000, 1 << 20)
                self.committed[reducer] = self.cursor[reducer]
                self.ask(reducer, self.committed[reducer], self.cursor[reducer], 1000, 1 << 20)
            self.plan = self.core.trim_plan()
            if self.plan is not None:
                self.trim_ends("committed")
        assert (self.persisted.input_unread_row_index if self.persisted else 0) == len(self.input)
        assert self.core.nbytes == 0
        self.dead_letters_are_exactly_those_passed()


TestWindowModel = WindowModel.TestCase
TestWindowModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
