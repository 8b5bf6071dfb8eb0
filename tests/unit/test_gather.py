"""A reducer under load lets rows add up before it reduces them: what ends the wait, without looking at a clock."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa

from shuffle.ids import MapperIndex, ShuffleIndex
from shuffle.reducer.core import Limits, ReducerCore
from shuffle.reducer.shared_core import Pipeline


def full_pipeline(batch_bytes_max: int) -> tuple[Pipeline, ReducerCore]:
    """One that has just taken a large work, so that it is under load."""
    limits = Limits(
        fetch_rows_max=1000,
        fetch_bytes_max=1 << 30,
        fetch_wait_ms=100,
        batch_rows_max=10_000_000,
        batch_bytes_max=batch_bytes_max,
        queued_bytes_max=1 << 40,
    )
    core = ReducerCore(1, limits)
    pipeline = Pipeline(core)
    queue_rows(pipeline, core, 4 << 20)
    work = pipeline.next_work()
    assert work is not None
    assert pipeline.committed(work)
    return pipeline, core


def queue_rows(pipeline: Pipeline, core: ReducerCore, size_bytes: int) -> None:
    plan = core.fetch_plan(MapperIndex(0))
    assert plan is not None
    rows = size_bytes // 8
    batch = pa.record_batch({"v": pa.array(np.zeros(rows, np.int64))})
    pipeline.fetched(plan, [(batch, ShuffleIndex(plan.from_row_index + rows))])


def test_reducer_under_load_takes_what_has_added_up_as_one_work() -> None:
    pipeline, core = full_pipeline(batch_bytes_max=24 << 20)
    for _ in range(3):
        queue_rows(pipeline, core, 4 << 20)
    assert core.has_enough
    work = pipeline.next_work()
    assert work is not None
    assert len(work.parts) == 3


def test_reducer_under_load_does_not_wait_for_a_mapper_that_has_no_room() -> None:
    pipeline, core = full_pipeline(batch_bytes_max=1 << 40)
    queue_rows(pipeline, core, 1 << 20)
    plan = core.fetch_plan(MapperIndex(0))
    assert plan is not None
    answered = threading.Thread(target=lambda: [pipeline.fetched(plan, []) for _ in range(100)])
    answered.start()
    work = pipeline.next_work()
    answered.join()
    assert work is not None
    assert work.size_bytes == 1 << 20


def test_works_to_be_reduced_again_are_not_kept_waiting_for_rows() -> None:
    pipeline, core = full_pipeline(batch_bytes_max=1 << 40)
    assert not core.has_enough
    queue_rows(pipeline, core, 1 << 20)
    work = core.take()
    assert work is not None
    core.rerun(work)
    assert core.has_enough
