"""Who is a straggler, and what a mapper spills for it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from shuffle.durable.mapper_state import MAPPERS_KEY, MAPPERS_VALUE
from shuffle.durable.spill_ends import SPILLS_KEY, SPILLS_VALUE, SpillEnd
from shuffle.durable.tables import mappers_table, spills_table
from shuffle.errors import RowsGone
from shuffle.ids import Guid, MapperIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.mapper.core import MappedBatch, MapperCore
from shuffle.mapper.mapping import cut
from shuffle.mapper.reader import PartitionReader
from shuffle.mapper.spill.format import encode
from shuffle.mapper.spill.index import Spill
from shuffle.mapper.spill.store import SpillStore
from shuffle.mapper.spill.stragglers import STANDING_AGES, ReducerProgress, Stragglers
from shuffle.mapper.trim import STRAGGLER_CHECK_S, Trimmer
from shuffle.messages import GetRows
from shuffle.spec.config import SpillSpec
from shuffle.statestore import StateClient

AGE_MS = 100
SCHEMA = pa.schema([("v", pa.string())])


def run(positions: list[list[int]], share: float = 0.5, step_ms: int = 50) -> list[set[int]]:
    one = Stragglers(len(positions[0]), share, AGE_MS)
    found = []
    for number, now in enumerate(positions):
        one.tick(number * step_ms, [ReducerProgress(position, position - 1, False, False) for position in now])
        found.append(set(one.current))
    return found


def test_one_that_stands_still_is_a_straggler_after_the_age() -> None:
    late = run([[10 * step, 10 * step, 10 * step, 0] for step in range(6)])
    assert late == [set(), set(), set(), {3}, {3}, {3}]


def test_the_last_of_many_to_commit_is_none() -> None:
    assert not any(run([[10 * step + 3, 10 * step + 2, 10 * step] for step in range(20)]))


def test_one_at_a_tenth_of_the_pace_is_a_straggler() -> None:
    assert run([[100 * step, 100 * step, 10 * step] for step in range(10)])[-1] == {2}


def test_all_away_means_that_nobody_is() -> None:
    ticks = STANDING_AGES * AGE_MS // 50 + 10
    assert not run([[5, 7, 9, 9]] * ticks)[-1]


def test_most_away_means_that_nobody_is() -> None:
    assert not run([[10 * step, 0, 0, 0] for step in range(40)])[-1]


def test_one_is_suspected_at_half_the_age() -> None:
    one = Stragglers(3, 0.5, AGE_MS)
    found = []
    for step in range(4):
        one.tick(
            step * 30, [ReducerProgress(position, position - 1, False, False) for position in (10 * step, 10 * step, 0)]
        )
        found.append((one.is_suspecting, bool(one.current)))
    assert found == [(False, False), (False, False), (False, False), (True, False)]


def test_single_reducer_is_never_a_straggler() -> None:
    assert not any(run([[0]] * 20))


def test_one_that_never_had_rows_does_not_make_the_others_late() -> None:
    """Nobody runs: one has all the rows, and the other none."""
    one = Stragglers(2, 0.5, AGE_MS)
    for number in range(3 * STANDING_AGES):
        one.tick(number * 50, [ReducerProgress(0, -1, False, False), ReducerProgress(10 * number, -1, True, False)])
        assert not one.current
        assert not one.is_suspecting


def test_one_that_never_had_rows_does_not_make_the_others_late_though_it_waits() -> None:
    one = Stragglers(2, 0.5, AGE_MS)
    for number in range(3 * STANDING_AGES):
        one.tick(number * 50, [ReducerProgress(0, -1, False, False), ReducerProgress(10 * number, -1, True, True)])
        assert not one.current


def test_one_that_has_caught_up_counts_as_long_as_it_waits_for_more() -> None:
    one = Stragglers(2, 0.5, AGE_MS)
    found = []
    for number in range(4 * STANDING_AGES):
        waits = number <= 2 * STANDING_AGES
        one.tick(number * 50, [ReducerProgress(0, -1, False, False), ReducerProgress(10 * number, 5, True, waits)])
        found.append(bool(one.current))
    assert found[2 * STANDING_AGES], "it has all its rows, and waits for more"
    assert found[-1], "for a while it counts, though it is silent"
    one.tick(4 * STANDING_AGES * 50 + STANDING_AGES * AGE_MS, one._before)
    assert not one.current, "nobody is there"


def test_nothing_is_spilled_where_no_reducer_has_ever_run() -> None:
    core = core_with(SPEC)
    for number in range(60):
        if core.wants_input:
            ingest(core, [0])
        core.tick(number * 50)
        assert core.trim_plan() is None
    assert not core.wants_input, "the window is full"
    assert not core.spilling.stragglers


def core_with(spec: SpillSpec | None, memory_bytes: int = 20_000) -> MapperCore:
    return MapperCore(Guid("g"), MapperIndex(0), 3, memory_bytes, spec)


def ingest(core: MapperCore, reducers: list[int]) -> None:
    table = pa.table([pa.array(["x" * 500] * len(reducers))], schema=SCHEMA)
    parts = cut(table, np.array(reducers, np.int64), 3)
    core.ingest(core.persisted, 1, Token(b"t%d" % core.next_input_index), MappedBatch(SCHEMA, len(reducers), parts))


def fetch(core: MapperCore, reducer: int, committed: int, cursor: int | None = None) -> int:
    """The index of the last row that was served."""
    at = committed if cursor is None else cursor
    request = GetRows(Guid("g"), ReducerIndex(reducer), ShuffleIndex(committed), ShuffleIndex(at), 100, 1 << 20)
    core.learn_committed({ReducerIndex(reducer): ShuffleIndex(committed)})
    served = core.get_rows(request)
    return served[-1].last_row_index if served else at


def outage(core: MapperCore, entries: int = 8) -> None:
    """Reducer 2 stays away while the others commit all they get."""
    outage_from(core, 0, entries)


def outage_from(core: MapperCore, begin: int, entries: int) -> None:
    """The same, after ``begin`` entries."""
    for number in range(begin, begin + entries):
        ingest(core, [0, 1, 2])
        for reducer in (0, 1):
            fetch(core, reducer, fetch(core, reducer, 3 * (number - 1) + reducer if number else -1))
        core.tick(number * 50)


SPEC = SpillSpec(reducers_done_share=0.5, age_ms=AGE_MS, memory_share=0.3)


def test_rows_of_a_straggler_are_planned_for_the_spill_and_leave_the_window() -> None:
    core = core_with(SPEC)
    outage(core)
    plan = core.trim_plan()
    assert plan is not None
    assert set(plan.spill) == {2}
    spilled = [int(index) for part in plan.spill[ReducerIndex(2)] for index in part.row_indexes]
    assert spilled == [3 * number + 2 for number in range(7)], "all but the last entry"
    assert plan.state.shuffle_unread_row_index == 21
    _, end = encode(plan.spill[ReducerIndex(2)], SpillEnd(), ShuffleIndex(-1), "none", 0)
    before = core.nbytes
    core.trimmed(plan.state)
    core.spilled({ReducerIndex(2): end})
    assert core.nbytes < before / 4
    request = GetRows(Guid("g"), ReducerIndex(2), ShuffleIndex(-1), ShuffleIndex(-1), 100, 1 << 20)
    assert core.get_rows(request) == [], "what is spilled comes first"
    read = core.spill_read(request)
    assert read is not None
    assert (read.position, read.end) == (0, end.position)
    assert fetch(core, 2, -1, cursor=20) == 23, "then what is in the window"


def test_nothing_is_spilled_without_a_straggler() -> None:
    core = core_with(SPEC)
    for number in range(12):
        ingest(core, [0, 1, 2] * 4)
        for reducer in range(3):
            fetch(core, reducer, 12 * (number - 1) + 9 + reducer if number else -1)
        core.tick(number * 50)
        assert not core.spilling.stragglers
        plan = core.trim_plan()
        assert plan is None or not plan.spill


def test_nothing_is_spilled_while_there_is_memory() -> None:
    core = core_with(SPEC, memory_bytes=1 << 20)
    outage(core)
    assert core.spilling.stragglers == {2}
    plan = core.trim_plan()
    assert plan is None or not plan.spill


def test_memory_that_is_shared_with_reducers_does_not_keep_rows_from_being_spilled() -> None:
    core = core_with(replace(SPEC, memory_share=1.0))
    core.reserved_bytes = core.memory_bytes_max // 2
    outage(core)
    assert not core.wants_input
    assert core.nbytes < core.memory_bytes_max
    plan = core.trim_plan()
    assert plan is not None
    assert set(plan.spill) == {2}


def test_nothing_is_spilled_where_the_spec_says_so() -> None:
    core = core_with(SpillSpec(enabled=False, age_ms=AGE_MS, memory_share=0.3))
    outage(core)
    plan = core.trim_plan()
    assert plan is None or not plan.spill


def test_blocked_spill_is_tried_again_later() -> None:
    core = core_with(SPEC)
    outage(core)
    core.spilling.block("DiskFull")
    plan = core.trim_plan()
    assert plan is None or not plan.spill
    core.tick(100_000)
    core.tick(100_050)
    assert core.spilling.blocked is None


def test_restart_knows_what_of_the_spill_was_committed() -> None:
    for committed, is_drained in ((19, False), (20, True)):
        core = core_with(SPEC)
        outage(core)
        plan = core.trim_plan()
        assert plan is not None
        _, end = encode(plan.spill[ReducerIndex(2)], SpillEnd(), ShuffleIndex(-1), "none", 0)
        core.restart(plan.state, {ReducerIndex(2): ShuffleIndex(committed)})
        assert core.is_drained, "nothing is mapped again yet"
        core.forget_spill()
        assert not core.is_drained, "nobody knows"
        core.load_spill({ReducerIndex(2): Spill(end, 0, 0, 0)})
        assert core.is_drained == is_drained
        assert (core.spilling.trims() == {2: end.position}) == is_drained


@pytest.mark.parametrize("was_spilled", [False, True])
def test_rows_that_another_instance_had_committed_are_not_left_out(was_spilled: bool) -> None:
    """Both instances came to the same state: this one meant to spill the rows, the other one had them committed."""
    core = core_with(SPEC)
    outage(core)
    plan = core.trim_plan()
    assert plan is not None
    _, end = encode(plan.spill[ReducerIndex(2)], SpillEnd(), ShuffleIndex(-1), "none", 0)
    core.observe(plan.state)
    core.load_spill({ReducerIndex(2): Spill(end, end.position, end.rows, end.nbytes)} if was_spilled else {})
    with pytest.raises(RowsGone):
        fetch(core, 2, committed=2)
    assert fetch(core, 2, committed=20) == 23, "who knows of the commit goes on"


class TrimmedInput(PartitionReader):
    """Remembers up to where it was trimmed."""

    def __init__(self) -> None:
        self.trimmed = 0

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA

    def read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        return SCHEMA.empty_table(), token

    def trim(self, row_index: int, token: Token) -> None:
        self.trimmed = row_index


def test_input_is_trimmed_once_in_a_period_and_not_with_every_spill(tmp_path: Path) -> None:
    core, reader = core_with(SPEC), TrimmedInput()
    with StateClient.open(tmp_path) as client:
        client.create_table(mappers_table("p"), key=MAPPERS_KEY, value=MAPPERS_VALUE)
        client.create_table(spills_table("p"), key=SPILLS_KEY, value=SPILLS_VALUE)
        spill = SpillStore(client, "p", MapperIndex(0), 3)
        trimmer = Trimmer(client, "p", core, reader, threading.RLock(), spill=spill, period_s=3600.0)
        outage(core, entries=1)
        assert trimmer.pause_s == 3600, "a light window"
        outage_from(core, 1, entries=7)
        assert trimmer.pause_s == STRAGGLER_CHECK_S, "a heavy one"
        for hurry, is_trimmed in ((False, True), (False, False), (True, True)):
            if hurry:
                trimmer.hurry()
            before = reader.trimmed
            core.waiting[:] = [1, 1, 0]
            assert trimmer.trim()
            assert core.persisted.input_unread_row_index == core.next_input_index - 1
            assert reader.trimmed == (core.persisted.input_unread_row_index if is_trimmed else before)
            outage_from(core, core.next_input_index, entries=8)
