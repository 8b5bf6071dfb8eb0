"""The table of the life of a window entry: what it allows, that all of it occurs, and that the picture shows it."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest

from shuffle.durable.spill_ends import SpillEnd
from shuffle.ids import Guid, MapperIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.mapper import core, window
from shuffle.mapper.core import MapperCore
from shuffle.mapper.entry_life import EVENTS, TRANSITIONS, Life, after
from shuffle.mapper.mapping import cut
from shuffle.mapper.window import MappedBatch
from shuffle.messages import GetRows
from shuffle.spec.config import SpillSpec
from tests.sim.coverage import EXPECTED
from tools.entry_life import PAGE, page


@pytest.mark.parametrize(("life", "event"), list(itertools.product(Life, EVENTS)))
def test_entry_moves_on_by_the_table_and_not_otherwise(life: Life, event: str) -> None:
    if (life, event) in TRANSITIONS:
        assert after(life, event) is TRANSITIONS[life, event]
    else:
        with pytest.raises(AssertionError, match=f"{life.value} cannot {event}"):
            after(life, event)


def test_every_state_is_reached_and_all_but_the_last_are_left() -> None:
    reached = {Life.HELD, *TRANSITIONS.values()}
    left = {life for life, _ in TRANSITIONS}
    assert reached == set(Life)
    assert left == set(Life) - {Life.PERSISTED}


def test_picture_in_the_documentation_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tools.entry_life`"


SCHEMA = pa.schema([("v", pa.int64())])
LATE, EARLY = ReducerIndex(0), ReducerIndex(1)


class Played:
    """A mapper of two reducers, with rows for both of them, that spills for one that stays away."""

    def __init__(self) -> None:
        spec = SpillSpec(reducers_done_share=0.3, age_ms=1, memory_share=0.01)
        self.core = MapperCore(Guid("g"), MapperIndex(0), 2, 30_000, spec)
        self.early = -1

    def feed(self, *reducers: int, rows_in: int = 1) -> None:
        rows = pa.table([pa.array(range(len(reducers)), pa.int64())], schema=SCHEMA)
        parts = cut(rows, np.array(reducers, np.int64), 2)
        self.core.ingest(self.core.persisted, rows_in, Token(b"t"), MappedBatch(SCHEMA, len(reducers), parts))

    def ask(self, reducer: ReducerIndex, committed: int, cursor: int) -> None:
        self.core.learn_committed({reducer: ShuffleIndex(committed)})
        self.core.get_rows(GetRows(Guid("g"), reducer, ShuffleIndex(committed), ShuffleIndex(cursor), 100, 1 << 20))

    def trim(self) -> bool:
        plan = self.core.trim_plan()
        if plan is None:
            return False
        self.core.trimmed(plan.state)
        rows = {reducer: sum(part.rows.num_rows for part in parts) for reducer, parts in plan.spill.items()}
        last = ShuffleIndex(plan.state.shuffle_unread_row_index - 1)
        self.core.spilled({reducer: SpillEnd(1, last, count, 1, 1, 1) for reducer, count in rows.items()})
        return bool(rows)

    def early_goes_on(self) -> None:
        self.ask(EARLY, self.early, self.early)
        self.early = self.core.next_shuffle_index - 1
        self.ask(EARLY, self.early, self.early)


def play(is_late_served: bool) -> None:
    one = Played()
    one.feed()  # There is nothing to wait for.
    one.trim()
    one.feed(LATE)
    one.feed(LATE, EARLY)
    one.feed(EARLY)
    if is_late_served:
        one.ask(LATE, -1, -1)
        one.ask(LATE, -1, -1)
    for ms in range(0, 400, 20):
        one.feed(LATE, EARLY)
        one.early_goes_on()
        one.core.tick(ms)
        if one.core.spill_is_due:
            break
    assert one.trim(), "rows were spilled"
    one.early_goes_on()


def test_every_transition_of_the_table_occurs_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[Life, str]] = set()

    def watched(life: Life, event: str) -> Life:
        seen.add((life, event))
        return after(life, event)

    monkeypatch.setattr(window, "after", watched)
    monkeypatch.setattr(core, "after", watched)
    play(is_late_served=False)
    play(is_late_served=True)
    assert seen == set(TRANSITIONS)


def test_every_transition_must_occur_in_a_long_run_of_the_simulation() -> None:
    wanted = {f"a window entry that was {life.value} did {event}" for life, event in TRANSITIONS}
    assert wanted == {mark for mark in EXPECTED if mark.startswith("a window entry")}
