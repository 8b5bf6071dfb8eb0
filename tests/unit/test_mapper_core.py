from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from shuffle.durable.mapper_state import MapperState
from shuffle.durable.spill_ends import SpillEnd
from shuffle.errors import BadInput, FalseClaim, NotServed, RowsGone, SplitBrain, StaleGeneration, StaleMapper
from shuffle.ids import Guid, InputIndex, MapperIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.mapper.core import MappedBatch, MapperCore
from shuffle.mapper.mapping import cut
from shuffle.mapper.spill.index import Spill
from shuffle.messages import GetRows
from shuffle.user_code.poison import dead_letters

GUID = Guid("this-one")
SCHEMA = pa.schema([("v", pa.int64())])


def core(reducers: int = 2, memory_bytes_max: int = 1 << 30) -> MapperCore:
    return MapperCore(GUID, MapperIndex(3), reducers, memory_bytes_max)


def mapped(
    values: list[int], reducers: list[int], reducer_count: int = 2, letters: pa.Table | None = None
) -> MappedBatch:
    rows = pa.table([pa.array(values, pa.int64())], schema=SCHEMA)
    return MappedBatch(SCHEMA, len(values), cut(rows, np.array(reducers, np.int32), reducer_count), letters)


def feed(one: MapperCore, values: list[int], reducers: list[int], rows_in: int | None = None) -> list[ReducerIndex]:
    """One batch, with its values as shuffle indexes so that tests can see them."""
    rows_in = len(values) if rows_in is None else rows_in
    token = Token(b"%d" % (one.next_input_index + rows_in))
    return one.ingest(one.persisted, rows_in, token, mapped(values, reducers))


def ask(
    one: MapperCore, reducer: int, committed: int = -1, cursor: int | None = None, to: int | None = None
) -> list[int]:
    cursor = committed if cursor is None else cursor
    one.learn_committed({ReducerIndex(reducer): ShuffleIndex(committed)})
    served = one.get_rows(request(reducer, committed, cursor, to))
    return [value for batch in served for value in batch.rows.column(0).to_pylist()]


def request(
    reducer: int, committed: int, cursor: int, to: int | None = None, guid: Guid = GUID, rows: int = 1000
) -> GetRows:
    return GetRows(
        mapper_id=guid,
        reducer_index=ReducerIndex(reducer),
        committed_row_index=ShuffleIndex(committed),
        from_row_index=ShuffleIndex(cursor),
        max_rows=rows,
        max_bytes=1 << 20,
        to_row_index=None if to is None else ShuffleIndex(to),
    )


def state(input_index: int, shuffle_index: int, token: bytes) -> MapperState:
    return MapperState(InputIndex(input_index), ShuffleIndex(shuffle_index), Token(token))


def letters(*positions: int) -> pa.Table:
    rows = pa.table({"v": list(positions)})
    return dead_letters(
        processor="p",
        role="mapper",
        worker=3,
        mappers=[3] * len(positions),
        positions=positions,
        reasons=["bad"] * len(positions),
        rows=rows,
    )


def test_ingest_names_the_reducers_with_new_rows() -> None:
    one = core(3)
    assert one.ingest(None, 2, Token(b"2"), mapped([0, 1], [2, 0], 3)) == [0, 2]
    assert one.ingest(None, 2, Token(b"4"), mapped([], [], 3)) == []


def test_rows_of_a_reducer_in_order_and_again() -> None:
    one = core()
    feed(one, [0, 1, 2], [0, 1, 0])
    feed(one, [3, 4], [1, 0])
    assert ask(one, 0) == [0, 2, 4]
    assert ask(one, 0, cursor=0) == [2, 4]
    assert ask(one, 0) == [0, 2, 4]
    assert ask(one, 1) == [1, 3]


def test_another_guid_is_refused_and_commits_nothing() -> None:
    one = core()
    feed(one, [0], [0])
    with pytest.raises(StaleMapper) as error:
        one.get_rows(request(0, 0, 0, guid=Guid("old-one")))
    assert error.value.mapper_id == GUID
    assert one.window_size.rows == 1


def test_unknown_reducer_and_empty_bounds_are_refused() -> None:
    one = core()
    for wrong in (request(2, -1, -1), request(-1, -1, -1), request(0, -1, -1, rows=0)):
        with pytest.raises(BadInput):
            one.get_rows(wrong)


def test_committed_rows_retire_entries_and_move_the_local_state() -> None:
    one = core()
    feed(one, [0, 1], [0, 1])
    feed(one, [2, 3], [0, 0])
    ask(one, 0, committed=3)
    assert one.local == MapperState()
    ask(one, 1, committed=1)
    assert one.local == state(4, 4, b"4")
    assert one.nbytes == 0


def test_slow_reducer_holds_memory_for_its_own_rows_only() -> None:
    one = core()
    rows = 10_000
    feed(one, list(range(rows)), [1] + [0] * (rows - 1))
    for _ in range(5):
        begin = one.next_shuffle_index
        feed(one, list(range(begin, begin + rows)), [0] * rows)
    full = one.nbytes
    assert ask(one, 0, committed=one.next_shuffle_index - 1) == []
    assert one.local == MapperState(), "reducer 1 has not committed its one row"
    assert one.nbytes < full / 50
    assert ask(one, 1) == [0]


def test_reading_stops_at_the_memory_limit_and_goes_on_after_a_commit() -> None:
    one = core(memory_bytes_max=50_000)
    batches = 0
    while one.wants_input:
        begin = one.next_shuffle_index
        feed(one, list(range(begin, begin + 1000)), [0] * 1000)
        batches += 1
    assert one.nbytes < 50_000 + 20_000, "the limit plus one batch"
    assert batches == 4
    ask(one, 0, committed=999)
    assert one.wants_input


def test_filtered_rows_retire_at_once() -> None:
    one = core()
    feed(one, [], [], rows_in=100)
    assert one.local == state(100, 0, b"100")
    feed(one, [0], [0])
    feed(one, [], [], rows_in=100)
    assert one.local == state(100, 0, b"100")
    ask(one, 0, committed=0)
    assert one.local == state(201, 1, b"201")


def test_split_brain_before_exposure() -> None:
    one = core()
    feed(one, [0], [0])
    with pytest.raises(SplitBrain):
        one.ingest(state(7, 7, b"7"), 1, Token(b"2"), mapped([1], [0]))
    assert ask(one, 0) == [0], "the rows of the refused batch must not be seen"
    assert one.next_shuffle_index == 1


def test_trim_moves_the_persisted_state_once_it_is_committed() -> None:
    one = core()
    assert one.trim_plan() is None
    feed(one, [0, 1], [0, 0])
    assert one.trim_plan() is None
    ask(one, 0, committed=0)
    assert one.trim_plan() is None, "half an entry cannot be trimmed"
    ask(one, 0, committed=1)
    plan = one.trim_plan()
    assert plan is not None
    assert (plan.expected, plan.state, plan.dead_letters) == (MapperState(), state(2, 2, b"2"), None)
    assert one.persisted == MapperState()
    one.trimmed(plan.state)
    assert one.persisted == plan.state
    assert one.trim_plan() is None


def test_state_fetched_before_a_trim_of_our_own_is_not_split_brain() -> None:
    one = core()
    feed(one, [0], [0])
    ask(one, 0, committed=0)
    fetched = one.persisted
    plan = one.trim_plan()
    assert plan is not None
    one.trimmed(plan.state)
    assert one.ingest(fetched, 1, Token(b"2"), mapped([1], [0])) == [0]


def test_state_of_a_commit_whose_answer_was_lost_is_adopted() -> None:
    one = core()
    feed(one, [0], [0])
    ask(one, 0, committed=0)
    plan = one.trim_plan()
    assert plan is not None
    one.observe(MapperState())
    assert one.persisted == MapperState()
    one.observe(plan.state)
    assert one.persisted == plan.state
    assert one.trim_plan() is None


def test_restarted_mapper_serves_from_the_persisted_state() -> None:
    one = core()
    one.restart(state(10, 20, b"10"))
    assert (one.next_input_index, one.next_shuffle_index, one.token) == (10, 20, b"10")
    feed(one, [20, 21], [0, 1])
    assert ask(one, 0, committed=5) == [20], "its last row may be far below the persisted state"
    assert ask(one, 1, committed=19) == [21]


def test_rows_committed_before_they_were_mapped_again_are_dropped() -> None:
    one = core()
    one.restart(state(0, 0, b""))
    assert ask(one, 0, committed=5) == [], "nothing is mapped yet; the mapper is catching up"
    feed(one, [0, 1, 2, 3], [0, 0, 1, 0])
    assert ask(one, 0, committed=5) == []
    assert one.window_size.rows == 1
    feed(one, [4, 5, 6], [0, 0, 0])
    assert ask(one, 0, committed=5) == [6]
    assert ask(one, 1, committed=2) == []
    assert one.local.shuffle_unread_row_index == 4


def test_cursor_ahead_of_what_is_mapped_again_waits_for_it() -> None:
    one = core()
    one.restart(state(0, 0, b""))
    feed(one, [0, 1], [0, 0])
    assert ask(one, 0, committed=0, cursor=3) == []
    feed(one, [2, 3, 4], [0, 0, 0])
    assert ask(one, 0, committed=0, cursor=3) == [4]
    assert ask(one, 0, committed=0) == [1, 2, 3, 4], "fetched is not committed"


def test_committed_index_below_what_was_dropped_is_an_error() -> None:
    one = core()
    feed(one, [0, 1, 2], [0, 1, 0])
    ask(one, 0, committed=2)
    with pytest.raises(RowsGone) as error:
        ask(one, 0, committed=0)
    assert (error.value.dropped_row_index, error.value.reducer_index) == (2, 0)
    assert ask(one, 1) == [1], "the other reducer is not concerned"


def test_committed_index_told_ahead_does_not_make_older_rows_an_error_until_they_are_dropped() -> None:
    one = core()
    one.restart(state(0, 0, b""))
    ask(one, 0, committed=5)
    feed(one, [0, 1], [0, 0])
    with pytest.raises(RowsGone):
        ask(one, 0, committed=0)


def test_reducer_that_is_behind_what_it_had_committed_before_a_restart_is_told() -> None:
    one = core()
    one.restart(state(10, 20, b"10"), {ReducerIndex(0): ShuffleIndex(15), ReducerIndex(1): ShuffleIndex(40)})
    feed(one, [20, 21], [0, 1])
    with pytest.raises(RowsGone):
        ask(one, 0, committed=14)
    assert ask(one, 0, committed=15) == [20]
    with pytest.raises(RowsGone):
        ask(one, 1, committed=18)
    assert ask(one, 1, committed=19) == [21], "rows of after the state are there, committed or not"


def test_named_range_below_a_restart_is_an_error() -> None:
    one = core()
    one.restart(state(10, 20, b"10"))
    feed(one, [20], [0])
    with pytest.raises(RowsGone):
        ask(one, 0, committed=5, to=15)
    assert ask(one, 0, committed=5, to=20) == [20]
    assert ask(one, 0, committed=5, cursor=15, to=15) == [], "an empty range asks for nothing"


def test_dead_letters_go_with_the_state_that_passes_them() -> None:
    one = core()
    one.ingest(None, 3, Token(b"3"), mapped([0, 1], [0, 1], letters=letters(2)))
    one.ingest(None, 1, Token(b"4"), mapped([], [], letters=letters(3)))
    assert one.trim_plan() is None
    ask(one, 0, committed=0)
    ask(one, 1, committed=1)
    plan = one.trim_plan()
    assert plan is not None
    assert plan.dead_letters is not None
    assert plan.dead_letters["position"].to_pylist() == [2, 3]
    assert plan.state == state(4, 2, b"4")
    assert one.nbytes > 0, "they are in memory until they are durable"
    one.trimmed(plan.state)
    assert one.nbytes == 0
    assert one.trim_plan() is None


def test_dead_letters_of_a_plan_under_way_are_not_planned_again() -> None:
    one = core()
    one.ingest(None, 1, Token(b"1"), mapped([], [], letters=letters(0)))
    plan = one.trim_plan()
    assert plan is not None
    feed(one, [], [], rows_in=5)
    one.trimmed(plan.state)
    later = one.trim_plan()
    assert later is not None
    assert (later.expected, later.state, later.dead_letters) == (plan.state, state(6, 0, b"6"), None)


def test_many_dead_letters_take_several_trims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shuffle.mapper.core.DEAD_LETTER_BYTES_MAX", 1)
    one = core()
    for position in range(3):
        one.ingest(one.persisted, 1, Token(b"%d" % (position + 1)), mapped([], [], letters=letters(position)))
    found = []
    while (plan := one.trim_plan()) is not None:
        assert plan.dead_letters is not None
        found.append(plan.dead_letters["position"].to_pylist())
        one.trimmed(plan.state)
    assert found == [[0], [1], [2]]


def test_restart_forgets_everything_that_is_not_durable() -> None:
    one = core()
    one.ingest(None, 2, Token(b"2"), mapped([0], [0], letters=letters(1)))
    ask(one, 0, committed=0)
    one.restart(None)
    assert one.trim_plan() is None
    assert (one.nbytes, one.next_input_index) == (0, 0)
    assert ask(one, 0, committed=-1) == []


def test_rows_in_the_window_or_in_the_spill_are_not_drained() -> None:
    one = core()
    feed(one, [0], [1])
    assert not one.is_drained
    ask(one, 1, committed=0)
    assert one.is_drained
    one.restart(state(1, 1, b"1"))
    end = SpillEnd(position=1, last_row_index=ShuffleIndex(0), rows=1, nbytes=8)
    one.load_spill({ReducerIndex(1): Spill(end, 0, 0, 0)})
    assert not one.is_drained, "it is in the spill"
    ask(one, 1, committed=0)
    assert one.is_drained
    one.forget_spill()
    assert not one.is_drained, "nobody knows"


# What is committed: the word of requests, and that of the store


def test_claim_beyond_what_was_served_is_refused_and_changes_nothing() -> None:
    one = core()
    feed(one, [0, 1, 2, 3], [0, 1, 0, 0])
    one.get_rows(request(0, -1, -1, rows=2))
    for claimed in (3, 1 << 62):
        with pytest.raises(NotServed) as refused:
            one.get_rows(request(0, claimed, claimed))
        fields = (refused.value.mapper_index, refused.value.reducer_index, refused.value.served_row_index)
        assert fields == (3, 0, 2)
        assert refused.value.committed_row_index == claimed
    assert one.window_size.rows == 4
    assert one.claims() == {}
    assert ask(one, 0) == [0, 2, 3]


def test_claim_beyond_what_was_served_is_believed_if_the_store_says_it_too() -> None:
    one = core()
    feed(one, [0, 1, 2], [0, 1, 0])
    one.learn_committed({ReducerIndex(0): ShuffleIndex(2)})
    assert one.get_rows(request(0, 2, 2)) == []
    assert one.window_size.rows == 1
    one.restart(None, {ReducerIndex(1): ShuffleIndex(1)})
    feed(one, [0, 1, 2], [0, 1, 0])
    one.get_rows(request(0, 2, 2))
    one.get_rows(request(1, 1, 1))
    assert one.window_size.rows == 0


def test_what_was_served_before_a_restart_was_not_served() -> None:
    one = core()
    feed(one, [0], [0])
    one.get_rows(request(0, -1, -1))
    one.restart(None)
    feed(one, [0], [0])
    with pytest.raises(NotServed):
        one.get_rows(request(0, 0, 0))


def test_false_claim_is_found_before_anything_is_forgotten_for_good() -> None:
    one = core()
    feed(one, [0, 1, 2], [0, 1, 0])
    for reducer, claimed in ((0, 2), (1, 1)):
        one.get_rows(request(reducer, -1, -1))
        one.get_rows(request(reducer, claimed, claimed))
    plan = one.trim_plan()
    assert plan is not None
    assert plan.claims == {0: 2, 1: 1}
    with pytest.raises(FalseClaim) as found:
        one.check_claims(plan.claims, {ReducerIndex(0): ShuffleIndex(0), ReducerIndex(1): ShuffleIndex(1)})
    fields = (found.value.reducer_index, found.value.claimed_row_index, found.value.committed_row_index)
    assert fields == (0, 2, 0)
    one.check_claims(plan.claims, {ReducerIndex(0): ShuffleIndex(2), ReducerIndex(1): ShuffleIndex(1)})
    assert one.claims() == {}, "what the store has confirmed it is not asked again"


def test_claim_that_its_reducer_denies_is_compared_with_the_store_without_a_trim() -> None:
    """The entry is held by a later row, which the reducer cannot get: no trim would ever look at the claim."""
    one = core(1)
    feed(one, [0, 1], [0, 0])
    one.get_rows(request(0, -1, -1))
    one.get_rows(request(0, 0, 1))
    assert one.trim_plan() is None
    assert one.take_dispute() == {}
    with pytest.raises(RowsGone):
        one.get_rows(request(0, -1, -1))
    disputed = one.take_dispute()
    assert disputed == {0: 0}
    assert one.take_dispute() == {}, "it is settled by one look at the store"
    with pytest.raises(FalseClaim):
        one.check_claims(disputed, {})


def test_claims_that_come_after_the_plan_do_not_matter_to_it() -> None:
    one = core(1)
    feed(one, [0], [0])
    feed(one, [1], [0])
    one.get_rows(request(0, -1, -1))
    one.get_rows(request(0, 0, 0))
    plan = one.trim_plan()
    one.get_rows(request(0, 1, 1))
    assert plan is not None
    assert plan.state.shuffle_unread_row_index == 1
    one.check_claims(plan.claims, {ReducerIndex(0): ShuffleIndex(0)})


def test_request_of_another_processor_is_refused_and_changes_nothing() -> None:
    one = MapperCore(GUID, MapperIndex(3), 2, 1 << 30, processor="p")
    feed(one, [0], [0])
    with pytest.raises(BadInput, match="of processor"):
        one.get_rows(replace(request(0, -1, -1), processor="q"))
    assert one.buckets[0].served == -1
    assert one.get_rows(replace(request(0, -1, -1), processor="p"))
    assert one.get_rows(replace(request(0, -1, -1), processor="")), "a client that does not say whose it is"


def test_request_of_another_generation_is_refused_and_changes_nothing() -> None:
    one = core()
    feed(one, [0, 1], [0, 0])
    assert ask(one, 0) == [0, 1]
    with pytest.raises(StaleGeneration, match="Read the reducer's state again") as error:
        one.get_rows(replace(request(0, 1, 1), generation=1))
    assert error.value.generation == 0
    assert ask(one, 0) == [0, 1], "what it called committed is still there"


def test_state_of_another_generation_is_another_instances() -> None:
    one = core()
    feed(one, [0], [0])
    with pytest.raises(SplitBrain):
        one.observe(MapperState(generation=1))


def test_front_of_an_answer_is_that_of_the_entries_it_has_exhausted() -> None:
    one = core()
    for front, reducers in ((10, [0, 1]), (20, [0, 0]), (30, [1])):
        first = one.next_shuffle_index
        values = list(range(first, first + len(reducers)))
        one.ingest(one.persisted, len(values), Token(b"%d" % first), replace(mapped(values, reducers), front=front))

    def tail(reducer: int, rows: int) -> tuple[int, int, int | None]:
        asked = request(reducer, -1, -1, rows=rows)
        made = one.tail(asked, one.get_rows(asked))
        return made.last_row_index, made.complete_up_to, made.front

    assert tail(0, 1) == (0, 1, 10)
    assert tail(0, 2) == (2, 2, 10), "one row of the second entry is still to come"
    assert tail(0, 3) == (3, 4, 30), "nothing is left but a row of the other reducer"
    assert tail(1, 1) == (1, 3, 20)
    assert tail(1, 2) == (4, 4, 30)
