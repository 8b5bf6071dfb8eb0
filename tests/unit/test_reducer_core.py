"""ReducerCore and ReducerState: one step at a time. All of it together is in tests/property."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from shuffle.durable.reducer_state import ReducerState
from shuffle.errors import CorruptData, ShuffleError, SpecError
from shuffle.ids import MapperIndex, ReducerIndex, ShuffleIndex
from shuffle.reducer.core import (
    IDLE_WAIT_MS_MAX,
    SETTLING_WAIT_MS,
    FetchLimits,
    FetchPlan,
    ReduceBatch,
    ReducerCore,
    Settled,
)

M0, M1 = MapperIndex(0), MapperIndex(1)


def limits(**changes: int) -> FetchLimits:
    values = {
        "fetch_rows_max": 100,
        "fetch_bytes_max": 10_000,
        "fetch_wait_ms": 500,
        "batch_rows_max": 10,
        "batch_bytes_max": 100_000,
        "queued_bytes_max": 100_000,
    }
    return FetchLimits(**(values | changes))


def state(*indices: int) -> ReducerState:
    return ReducerState(tuple(ShuffleIndex(index) for index in indices))


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"v": pa.array(values, pa.int64())})


def plan(core: ReducerCore, mapper: MapperIndex = M0) -> FetchPlan:
    found = core.fetch_plan(mapper)
    assert found is not None
    return found


def fetch(core: ReducerCore, mapper: MapperIndex, *batches: tuple[list[int], int]) -> int:
    return core.fetched(plan(core, mapper), [(batch(*values), ShuffleIndex(last)) for values, last in batches])


def take(core: ReducerCore) -> ReduceBatch:
    work = core.take()
    assert work is not None
    return work


def values(work: ReduceBatch) -> list[int]:
    return list(work.rowset()["v"].to_pylist())


# ---- state ----------------------------------------------------------------------------------------------------------


def test_state_is_eight_bytes_a_mapper_and_comes_back() -> None:
    one = state(-1, 0, 2**40)
    assert len(one.encode()) == 24
    assert one.encode()[:8] == b"\xff" * 8
    assert ReducerState.decode(one.encode(), 3) == one
    row = one.to_row(ReducerIndex(4))
    assert row["reducer_index"].to_pylist() == [4]
    assert ReducerState.from_rows(row, 3) == one


def test_state_without_a_row_is_nothing_committed() -> None:
    assert ReducerState.from_rows(state(1).to_row(ReducerIndex(0)).slice(0, 0), 2) == state(-1, -1)


def test_state_of_another_number_of_mappers_is_refused() -> None:
    with pytest.raises(SpecError, match="of 2 mappers and the input has 3"):
        ReducerState.decode(state(1, 2).encode(), 3)


@pytest.mark.parametrize("encoded", [b"1234567", state(-2).encode()])
def test_state_that_nobody_wrote_is_corrupt(encoded: bytes) -> None:
    with pytest.raises(CorruptData):
        ReducerState.decode(encoded, 1)


def test_state_never_goes_back() -> None:
    assert state(3, 5).advanced({M1: ShuffleIndex(9)}) == state(3, 9)
    with pytest.raises(ValueError, match="mapper 0: committed would fall from 3 to 2"):
        state(3).advanced({M0: ShuffleIndex(2)})


# ---- fetch ----------------------------------------------------------------------------------------------------------


def test_mappers_are_told_what_is_committed_and_asked_after_the_cursor() -> None:
    core = ReducerCore(2, limits())
    core.restart(state(4, -1))
    fetch(core, M0, ([1, 2], 9))
    asked = plan(core)
    assert (asked.committed_row_index, asked.from_row_index) == (4, 9)
    work = take(core)
    assert plan(core).committed_row_index == 4, "reduced is not committed"
    core.committed(work)
    assert plan(core).committed_row_index == 9


def test_the_poll_is_short_while_a_commit_is_owed_to_the_mapper() -> None:
    core = ReducerCore(2, limits())
    assert plan(core).wait_ms == 500
    fetch(core, M0, ([1], 0))
    assert plan(core, M0).wait_ms == SETTLING_WAIT_MS
    assert plan(core, M1).wait_ms == 500
    core.committed(take(core))
    assert plan(core, M0).wait_ms == 500


def test_the_poll_grows_longer_while_a_mapper_has_no_rows_and_short_again_with_the_first() -> None:
    core = ReducerCore(2, limits())
    waits = []
    for _ in range(5):
        waits.append(plan(core, M0).wait_ms)
        core.fetched(plan(core, M0), [])
    assert waits == [500, 1_000, 2_000, IDLE_WAIT_MS_MAX, IDLE_WAIT_MS_MAX]
    assert plan(core, M1).wait_ms == 500, "each mapper for itself"
    fetch(core, M0, ([1], 0))
    core.fetched(plan(core, M0), [])
    core.committed(take(core))
    assert plan(core, M0).wait_ms == 500, "a response that was cut short because a commit was owed does not count"


def test_the_poll_is_never_shorter_than_the_spec_says() -> None:
    core = ReducerCore(1, limits(fetch_wait_ms=30_000))
    core.fetched(plan(core, M0), [])
    assert plan(core, M0).wait_ms == 30_000


def test_a_fast_mapper_fills_its_own_share_only() -> None:
    core = ReducerCore(2, limits(queued_bytes_max=40))
    assert plan(core).max_bytes == 20
    fetch(core, M0, ([1], 0), ([2], 1))
    assert plan(core).max_bytes == 4
    fetch(core, M0, ([3], 2))
    assert core.fetch_plan(M0) is None
    assert plan(core, M1).max_bytes == 20
    assert (core.queued_bytes, core.queued_rows) == (24, 3)
    take(core)
    assert plan(core).max_bytes == 20


def test_an_answer_of_another_epoch_or_another_cursor_is_ignored() -> None:
    core = ReducerCore(1, limits())
    old = plan(core)
    fetch(core, M0, ([1], 0))
    assert core.fetched(old, [(batch(1), ShuffleIndex(0))]) == 0, "twice"
    core.restart(state(-1))
    assert core.fetched(old, [(batch(1), ShuffleIndex(0))]) == 0, "before the restart"
    assert core.take() is None
    assert fetch(core, M0, ([1], 0)) == 1


def test_an_answer_with_more_rows_than_indexes_is_refused_whole() -> None:
    core = ReducerCore(1, limits())
    with pytest.raises(ShuffleError, match="mapper 0 answered 3 rows after shuffle index 0 that end at 2"):
        fetch(core, M0, ([1], 0), ([2, 3, 4], 2))
    assert core.cursor(M0) == -1
    assert core.queued_rows == 0


# ---- take -----------------------------------------------------------------------------------------------------------


def test_work_is_whatever_is_there_from_all_mappers_up_to_the_limit() -> None:
    core = ReducerCore(2, limits(batch_rows_max=5))
    fetch(core, M1, ([10], 7))
    work = take(core)
    assert (values(work), work.expected, work.new) == ([10], state(-1, -1), state(-1, 7))
    core.committed(work)
    fetch(core, M0, ([1, 2], 1), ([3, 4], 3), ([5], 4))
    fetch(core, M1, ([11], 8), ([12], 9))
    work = take(core)
    assert values(work) == [1, 2, 11, 12] or values(work) == [1, 2, 3, 4, 11]
    assert work.row_count <= 5
    core.committed(work)
    rest = take(core)
    assert sorted(values(work) + values(rest)) == [1, 2, 3, 4, 5, 11, 12]
    assert rest.new == state(4, 9)


def test_a_single_batch_over_the_limit_passes_alone() -> None:
    core = ReducerCore(1, limits(batch_rows_max=2))
    fetch(core, M0, ([1, 2, 3], 5), ([4], 6))
    work = take(core)
    assert values(work) == [1, 2, 3]
    core.committed(work)
    assert values(take(core)) == [4]


def test_rows_of_another_schema_wait_for_the_next_batch() -> None:
    core = ReducerCore(2, limits())
    fetch(core, M0, ([1], 0))
    core.fetched(plan(core, M1), [(pa.record_batch({"w": ["x"]}), ShuffleIndex(0))])
    first = take(core)
    core.committed(first)
    second = take(core)
    assert {first.rowset().schema.names[0], second.rowset().schema.names[0]} == {"v", "w"}


def test_one_batch_is_in_flight_at_a_time_and_the_next_expects_what_it_writes() -> None:
    core = ReducerCore(1, limits(batch_rows_max=1))
    fetch(core, M0, ([1], 0), ([2], 1))
    first = take(core)
    assert core.in_flight is first
    assert core.take() is None
    core.committed(first)
    assert core.in_flight is None
    with pytest.raises(ShuffleError, match=r"batch 1 \(attempt 1\) is not in flight"):
        core.committed(first)
    assert take(core).expected == first.new == state(0)


def test_origin_and_ranges_name_the_part_of_a_row() -> None:
    core = ReducerCore(2, limits())
    core.restart(state(4, -1))
    fetch(core, M0, ([1, 2], 9), ([3], 12))
    fetch(core, M1, ([4], 3))
    work = take(core)
    part, place = work.origin(2)
    assert (part.mapper_index, part.from_row_index, part.last_row_index, place) == (0, 9, 12, 0)
    assert work.origin(3)[0].mapper_index == 1
    assert work.ranges() == [(0, 5, 12), (1, 0, 3)]
    with pytest.raises(IndexError):
        work.origin(4)


# ---- settle ---------------------------------------------------------------------------------------------------------


def test_settle_when_the_commit_had_happened() -> None:
    core = ReducerCore(1, limits())
    fetch(core, M0, ([1], 3))
    assert core.settle(take(core), state(3)) is Settled.COMMITTED
    assert core.committed_state == state(3)
    assert core.in_flight is None


def test_settle_when_it_had_not_runs_the_same_rows_again_before_any_others() -> None:
    core = ReducerCore(1, limits(batch_rows_max=1))
    fetch(core, M0, ([1], 0), ([2], 1))
    first = take(core)
    assert core.settle(first, state(-1)) is Settled.RERUN
    assert not core.is_current(first)
    again = take(core)
    assert (values(again), again.attempt, again.expected) == ([1], 2, first.expected)
    assert core.is_current(again)
    assert core.take() is None
    core.committed(again)
    assert values(take(core)) == [2]


def test_batch_to_be_reduced_again_is_not_current_before_it_is_taken() -> None:
    core = ReducerCore(1, limits())
    fetch(core, M0, ([1], 0))
    core.rerun(take(core))
    waiting = core.in_flight
    assert waiting is not None
    assert not core.is_current(waiting)
    assert take(core) is waiting


def test_settle_when_another_instance_moved_the_row_starts_from_there() -> None:
    core = ReducerCore(1, limits())
    fetch(core, M0, ([1], 3), ([2], 4))
    work = take(core)
    assert core.settle(work, state(7)) is Settled.SPLIT_BRAIN
    assert not core.is_current(work)
    assert core.take() is None
    assert (plan(core).committed_row_index, plan(core).from_row_index) == (7, 7)


def test_agrees_with_its_own_commits_only() -> None:
    core = ReducerCore(1, limits())
    fetch(core, M0, ([1], 3))
    take(core)
    assert core.agrees(state(-1))
    assert core.agrees(state(3))
    assert not core.agrees(state(2))


def test_row_has_a_generation_and_fronts_and_a_commit_compares_them() -> None:
    one = ReducerState((ShuffleIndex(4), ShuffleIndex(-1)), 3, (-7, None))
    assert ReducerState.from_rows(one.to_row(ReducerIndex(0)), 2) == one
    assert one != replace(one, generation=0)
    assert one != replace(one, fronts=None)
    moved = one.advanced({MapperIndex(1): ShuffleIndex(2)}, {MapperIndex(0): -9, MapperIndex(1): 5})
    assert (moved.generation, moved.fronts) == (3, (-7, 5)), "a front never falls"
    with pytest.raises(CorruptData):
        ReducerState.decode(one.encode(), 2, 0, b"12345678")
