"""The mapper's core with a spill against the same plain list: whatever is spilled, reducers get the same rows."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from shuffle.durable.mapper_state import MapperState
from shuffle.durable.spill_ends import SpillEnd
from shuffle.errors import RowsGone, StoreUnavailable
from shuffle.ids import Guid, MapperIndex, ReducerIndex, ShuffleIndex
from shuffle.mapper.core import MapperCore
from shuffle.mapper.spill.format import SPILL_SCHEMA, decode_batch, decode_heads, encode
from shuffle.mapper.spill.index import Spill
from shuffle.mapper.spill.response import SpillResponse
from shuffle.mapper.trim_plan import TrimPlan
from shuffle.messages import GetRows
from shuffle.spec.config import SpillSpec
from tests.property.test_window_model import LIMIT_BYTES, REDUCERS, InputRow, WindowModel, input_rows

outcomes = st.sampled_from(["committed", "conflict", "unknown, happened", "unknown, did not happen"])
SPEC = SpillSpec(reducers_done_share=0.3, age_ms=1, memory_share=0.1)


class SpillModel(WindowModel):
    """The store is a list of spilled batches for each reducer, and what was trimmed off its front."""

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.core = MapperCore(Guid("g"), MapperIndex(0), REDUCERS, LIMIT_BYTES, SPEC)
        self.now_ms = 0
        self.stored = [SPILL_SCHEMA.empty_table() for _ in range(REDUCERS)]
        self.ends = [SpillEnd() for _ in range(REDUCERS)]
        self.begins = [0] * REDUCERS
        self.ends_after: dict[ReducerIndex, SpillEnd] = {}
        self.tables: dict[ReducerIndex, pa.Table] = {}

    @rule(ms=st.integers(1, 20))
    def tick(self, ms: int) -> None:
        self.now_ms += ms
        self.core.tick(self.now_ms)

    @rule(
        away=st.integers(0, REDUCERS - 1),
        rounds=st.integers(3, 6),
        fresh=st.lists(input_rows, min_size=3, max_size=6),
        outcome=st.one_of(st.just("committed"), outcomes),
    )
    def one_stays_away_and_the_others_go_on(self, away: int, rounds: int, fresh: list[InputRow], outcome: str) -> None:
        for _ in range(rounds):
            if self.core.wants_input:
                self.ingest([(0, 1, 2), *fresh], 3, True)
            for reducer in set(range(REDUCERS)) - {away}:
                self.ask(reducer, self.committed[reducer], self.cursor[reducer], 100, 1 << 20)
                self.committed[reducer] = self.cursor[reducer]
                self.ask(reducer, self.committed[reducer], self.cursor[reducer], 100, 1 << 20)
            self.tick(3)
            if self.plan is None:
                self.trim_begins()
            if self.plan is not None:
                self.trim_ends(outcome)

    def load(self) -> None:
        spills = {}
        for reducer, end in enumerate(self.ends):
            begin = self.begins[reducer]
            if begin < end.position:
                first = self.stored[reducer].slice(begin, 1)
                spills[ReducerIndex(reducer)] = Spill(
                    end, begin, first["rows_before"][0].as_py(), first["bytes_before"][0].as_py()
                )
            elif end.position:
                spills[ReducerIndex(reducer)] = Spill(end, end.position, end.rows, end.nbytes)
        self.core.load_spill(spills)

    def ask(self, reducer: int, committed: int, cursor: int, rows_max: int, bytes_max: int) -> None:
        request = GetRows(
            Guid("g"), ReducerIndex(reducer), ShuffleIndex(committed), ShuffleIndex(cursor), rows_max, bytes_max
        )
        try:
            served = self.get_rows(request)
        except StoreUnavailable:
            assert not self.core.spilling.is_known
            self.load()
            served = self.get_rows(request)
        read = self.core.spill_read(request)
        if read is not None:
            assert not served
            assert read.position >= self.begins[reducer]
            answer = SpillResponse(read, 1 << 20)
            found = self.stored[reducer].slice(read.position, read.end - read.position)
            heads = decode_heads(found, read.position)
            for at, head in enumerate(heads):
                if head.last_row_index > read.cursor and not answer.add(decode_batch(found, at, head)):
                    break
            read.spill.learn(heads[: at + 1])
            served = answer.served
            self.core.note_served(ReducerIndex(reducer), served)
        found_rows = [int(value.split(":")[0]) for one in served for value in one.rows.column(0).to_pylist()]
        expected = self.of_reducer(reducer, cursor, self.core.next_input_index)
        assert found_rows == expected[: len(found_rows)], "in order, without holes, and never another reducer's"
        assert len(found_rows) <= rows_max
        assert found_rows or not expected, "if there is a row after the cursor, it is served"
        self.check_tail(request, served, expected[len(found_rows) :])
        for one in served:
            assert one.rows.column(0)[-1].as_py().startswith(f"{one.last_row_index}:")
        if found_rows:
            self.cursor[reducer] = found_rows[-1]

    @rule()
    def mapper_restarts(self) -> None:
        self.core.restart(self.persisted)
        self.load()
        self.plan = None

    @precondition(lambda self: self.plan is None)
    @rule()
    def trim_begins(self) -> None:
        if not self.core.spilling.is_known:
            self.load()
        self.plan = self.core.trim_plan()

    def prepare(self, plan: TrimPlan) -> None:
        self.ends_after, self.tables = {}, {}
        before = self.core.spilling.ends(list(plan.spill))
        for reducer, parts in plan.spill.items():
            assert before[reducer] == self.ends[reducer]
            freed = plan.freed[reducer]
            self.tables[reducer], self.ends_after[reducer] = encode(parts, before[reducer], freed, "lz4", 1)

    @precondition(lambda self: self.plan is not None)
    @rule(outcome=outcomes)
    def trim_ends(self, outcome: str) -> None:
        plan, self.plan = self.plan, None
        assert isinstance(plan, TrimPlan)
        assert plan.expected == (self.persisted or MapperState())
        self.core.check_claims(plan.claims, self.committed_in_the_store())
        self.prepare(plan)
        if outcome in ("committed", "unknown, happened"):
            self.persisted = plan.state
            for reducer, table in self.tables.items():
                self.stored[reducer] = pa.concat_tables([self.stored[reducer], table])
                self.ends[reducer] = self.ends_after[reducer]
            if plan.dead_letters is not None:
                self.letters.extend(plan.dead_letters["position"].to_pylist())
        if outcome == "committed":
            self.core.trimmed(plan.state)
            self.core.spilled(self.ends_after)
        else:
            self.core.observe(self.persisted)

    @rule()
    def spill_is_trimmed(self) -> None:
        positions = self.core.spilling.trims()
        for reducer, position in positions.items():
            passed = self.stored[reducer].slice(0, position)["last_row_index"].to_pylist()
            assert all(last <= self.committed[reducer] for last in passed), "only what is committed is trimmed"
            self.begins[reducer] = max(self.begins[reducer], position)
        self.core.spilling.trimmed(positions)

    @rule(reducer=st.integers(0, REDUCERS - 1))
    def reader_that_lost_its_place_asks(self, reducer: int) -> None:
        """Of a reducer whose committed rows were trimmed from the spill: an error, never rows with a hole."""
        if not self.begins[reducer] or not self.core.spilling.is_known:
            return
        if self.core.spilling.spills[ReducerIndex(reducer)].is_empty and self.core.buckets[reducer].freed < 0:
            return  # The instance was restarted since, and all of the spill was committed before: it cannot know.
        with pytest.raises(RowsGone):
            self.ask(reducer, -1, -1, 10, 1 << 20)

    @rule(reducer=st.integers(0, REDUCERS - 1))
    def stale_reducer_asks(self, reducer: int) -> None:
        if not self.core.spilling.is_known:
            self.load()
        super().stale_reducer_asks(reducer)

    @invariant()
    def nothing_uncommitted_is_passed(self) -> None:
        """What the persisted state has passed is committed, or is in the spill, once."""
        passed = self.produced(self.core.persisted.input_unread_row_index)
        assert len(passed) == self.core.persisted.shuffle_unread_row_index
        for reducer in range(REDUCERS):
            found = self.stored[reducer].slice(self.begins[reducer])
            indexes = [
                int(index)
                for at, head in enumerate(decode_heads(found, self.begins[reducer]))
                for index in decode_batch(found, at, head).row_indexes
            ]
            assert indexes == sorted(set(indexes)), "no row is in the spill twice"
            waiting = [index for index, target in passed if target == reducer and index > self.committed[reducer]]
            assert set(waiting) <= set(indexes), "each is in the spill"
            assert all(index < self.core.persisted.shuffle_unread_row_index for index in indexes) or self.plan is None


TestSpillModel = SpillModel.TestCase
TestSpillModel.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
