"""A reducer under load lets rows add up before it reduces them: what ends the wait, without looking at a clock."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa

from shuffle.ids import MapperIndex, ShuffleIndex
from shuffle.reducer.core import FetchLimits, ReducerCore
from shuffle.reducer.shared_core import SharedCore


def loaded_core(batch_bytes_max: int) -> tuple[SharedCore, ReducerCore]:
    """One that has just taken a large batch, so that it is under load."""
    limits = FetchLimits(
        fetch_rows_max=1000,
        fetch_bytes_max=1 << 30,
        fetch_wait_ms=100,
        batch_rows_max=10_000_000,
        batch_bytes_max=batch_bytes_max,
        queued_bytes_max=1 << 40,
    )
    core = ReducerCore(1, limits)
    shared = SharedCore(core)
    queue_rows(shared, core, 4 << 20)
    work = shared.next_batch()
    assert work is not None
    assert shared.committed(work)
    return shared, core


def queue_rows(shared: SharedCore, core: ReducerCore, size_bytes: int) -> None:
    plan = core.fetch_plan(MapperIndex(0))
    assert plan is not None
    rows = size_bytes // 8
    batch = pa.record_batch({"v": pa.array(np.zeros(rows, np.int64))})
    shared.fetched(plan, [(batch, ShuffleIndex(plan.from_row_index + rows))])


def test_reducer_under_load_takes_what_has_added_up_as_one_batch() -> None:
    shared, core = loaded_core(batch_bytes_max=24 << 20)
    for _ in range(3):
        queue_rows(shared, core, 4 << 20)
    assert core.has_enough
    work = shared.next_batch()
    assert work is not None
    assert len(work.parts) == 3


def test_reducer_under_load_does_not_wait_for_a_mapper_that_has_no_room() -> None:
    shared, core = loaded_core(batch_bytes_max=1 << 40)
    queue_rows(shared, core, 1 << 20)
    plan = core.fetch_plan(MapperIndex(0))
    assert plan is not None
    answered = threading.Thread(target=lambda: [shared.fetched(plan, []) for _ in range(100)])
    answered.start()
    work = shared.next_batch()
    answered.join()
    assert work is not None
    assert work.size_bytes == 1 << 20


def test_batch_to_be_reduced_again_is_not_kept_waiting_for_rows() -> None:
    shared, core = loaded_core(batch_bytes_max=1 << 40)
    assert not core.has_enough
    queue_rows(shared, core, 1 << 20)
    work = core.take()
    assert work is not None
    core.rerun(work)
    assert core.has_enough
