"""Tasks of ``reduce_stream`` that go on behind the end of their micro-batch: every row has its effect once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from shuffle.durable.tables import reducers_table
from shuffle.examples.activity import TABLE, CountByUser
from shuffle.examples.local import LocalSystem
from shuffle.examples.spark_pipeline import Mappers
from shuffle.examples.workload import SCHEMA, Workload, difference, oracle
from shuffle.spark_connector import reduce_stream
from shuffle.spark_connector.reduce import ReduceTask, TaskCounts
from shuffle.spark_connector.source.processor import Processor
from shuffle.spark_connector.source.reader import ReducerPart
from shuffle.spark_connector.store_handle import StoreHandle
from shuffle.spec.config import ProcessorSpec, load_spec
from shuffle.statestore import StateClient, Transaction

ROWS = 20_000
"""The rows of each of the two partitions."""
REDUCERS = 2
StartMappers = Callable[[dict[str, Any], int], Mappers]


def rows_of(partition: int) -> pa.Table:
    return Workload(seed=21, with_user_share=1.0).rows(0, ROWS, partition)


def started(state: StateClient, start_mappers: StartMappers, name: str, memory: str, **reducer: Any) -> Mappers:
    """Mappers of a processor over a new queue that has all rows; the table of an earlier test is dropped."""
    if TABLE in {table.name for table in state.tables()}:
        state.drop_table(TABLE)
    state.create_queue(name, schema=SCHEMA, partitions=2)
    for partition in range(2):
        for begin in range(0, ROWS, 1_000):
            state.queue(name).append(partition, rows_of(partition).slice(begin, 1_000))
    spec = {
        "processor": name,
        "input": {"queue": name},
        "mapper": {
            "class": "examples.activity:ParseLogs",
            "memory": memory,
            "batch_rows_max": 1_000,
            "batch_bytes_max": 262_144,
            "trim_period": "50ms",
        },
        "reducer": {"class": "examples.activity:CountByUser", "count": REDUCERS, "batch_rows_max": 1_000, **reducer},
        "lease_ttl": "1s",
        "metrics": False,
    }
    return start_mappers(spec, 2)


def processor_of(system: LocalSystem, name: str) -> Processor:
    processor = Processor(StoreHandle(system.address, 20.0), name)
    processor.shape()
    deadline_s = time.monotonic() + 30
    while sum(one.last_row_index + 1 for one in processor.produced().values()) < 2 * ROWS:
        assert time.monotonic() < deadline_s, "the mappers did not get there"
        time.sleep(0.05)
    return processor


def exactly_once(state: StateClient) -> bool:
    expected = oracle([rows_of(partition) for partition in range(2)])
    return difference(expected, state.scan(TABLE).read_all()).exact


def run(spec: ProcessorSpec, processor: Processor, reducer: int, end: int, runs_on: bool) -> TaskCounts:
    part = ReducerPart(reducer, [(mapper, -1, end, None) for mapper in range(2)])
    return ReduceTask(spec, processor, part, runs_on=runs_on).run()


def test_task_goes_on_behind_its_micro_batch_only_if_it_may(
    system: LocalSystem, state: StateClient, start_mappers: StartMappers
) -> None:
    mappers = started(state, start_mappers, "goes-on", "64MiB")
    processor, spec = processor_of(system, "goes-on"), load_spec(mappers.spec)
    first = [run(spec, processor, reducer, 499, runs_on=False) for reducer in range(REDUCERS)]
    assert sum(one.rows for one in first) == 2 * 500
    beyond = [run(spec, processor, reducer, 999, runs_on=True) for reducer in range(REDUCERS)]
    assert sum(one.rows for one in beyond) == 2 * ROWS - 2 * 500
    assert exactly_once(state)
    later = [run(spec, processor, reducer, ROWS - 1, runs_on=True) for reducer in range(REDUCERS)]
    assert later == [TaskCounts()] * REDUCERS, "the micro-batches that have these rows find them committed"


def test_task_that_runs_on_ends_with_its_time(
    system: LocalSystem, state: StateClient, start_mappers: StartMappers, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappers = started(state, start_mappers, "ends-in-time", "64MiB")
    processor, spec = processor_of(system, "ends-in-time"), load_spec(mappers.spec)
    monkeypatch.setattr("shuffle.spark_connector.reduce.RUN_ON_S", 0.0)
    assert sum(run(spec, processor, reducer, 499, runs_on=True).rows for reducer in range(REDUCERS)) == 2 * 500


def test_mapper_that_is_restarted_while_a_task_runs_on_does_not_fail_it(
    system: LocalSystem, state: StateClient, start_mappers: StartMappers
) -> None:
    mappers = started(state, start_mappers, "restarted-mapper", "64MiB")
    processor, spec = processor_of(system, "restarted-mapper"), load_spec(mappers.spec)
    stale = processor.produced()
    mappers.kill_and_restart(0)
    part = ReducerPart(0, [(mapper, -1, -1, stale[mapper]) for mapper in range(2)])
    assert ReduceTask(spec, processor, part, runs_on=True).run().rows > 0, "the other mapper has rows"
    for reducer in range(REDUCERS):
        run(spec, processor, reducer, ROWS - 1, runs_on=True)
    assert exactly_once(state)


def test_two_tasks_of_one_reducer_that_run_on_at_once_count_every_row_once(
    system: LocalSystem, state: StateClient, start_mappers: StartMappers
) -> None:
    mappers = started(state, start_mappers, "run-on-twins", "64MiB")
    processor, given = processor_of(system, "run-on-twins"), load_spec(mappers.spec)
    spec = replace(given, reducer=replace(given.reducer, batch_rows_max=500))
    with ThreadPoolExecutor(2 * REDUCERS) as pool:
        twins = [*range(REDUCERS)] * 2
        done = list(pool.map(lambda reducer: run(spec, processor, reducer, 1_999, runs_on=True), twins))
    last = [run(spec, processor, reducer, ROWS - 1, runs_on=True) for reducer in range(REDUCERS)]
    assert sum(one.rows for one in [*done, *last]) == 2 * ROWS, "what a task says is what it has committed itself"
    assert exactly_once(state)


class DiesRunningOn(CountByUser):
    """Kills its Python worker twice: between a commit and the next batch, and with a batch that is not committed."""

    def reduce(self, rows: pa.Table) -> Transaction | None:
        folder = Path(self.config["folder"])
        name = f"{self.spec.index}-{len(list(folder.glob(f'{self.spec.index}-*')))}"
        (folder / name).touch()
        if name in ("0-1", "1-4"):
            os.kill(os.getpid(), signal.SIGKILL)
        tx = super().reduce(rows)
        if name in ("0-3", "1-2"):
            os.kill(os.getpid(), signal.SIGKILL)
        return tx


def test_reduce_stream_without_limits_counts_once_over_killed_workers_and_mappers(
    spark: SparkSession, system: LocalSystem, state: StateClient, start_mappers: StartMappers, tmp_path: Path
) -> None:
    # A window that holds a small part of the input: the mappers go on while the tasks commit.
    seen = tmp_path / "seen"
    seen.mkdir()
    of_reducer = {"class": "tests.spark.test_run_on:DiesRunningOn", "config": {"folder": str(seen)}}
    mappers = started(state, start_mappers, "killed-running-on", "1MiB", **of_reducer)
    query = reduce_stream(
        spark, str(mappers.spec), str(tmp_path / "checkpoint"), trigger={"availableNow": True}, timeout="60s"
    )
    while query.isActive and len(list(seen.iterdir())) < 6:
        query.awaitTermination(0.05)
    mappers.kill_and_restart(1)
    query.awaitTermination()
    assert {"0-1", "0-3", "1-2", "1-4"} <= set(os.listdir(seen)), "every death was died"
    assert exactly_once(state)
    assert state.scan(reducers_table("killed-running-on")).read_all().num_rows == REDUCERS
