"""The source's side in the driver, against real mappers and a real store, without a Spark session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from shuffle import AggregateReducer, Count, Max
from shuffle.durable.query_lease import holder_row
from shuffle.durable.tables import reducers_group
from shuffle.errors import BadInput, RowsGone, SplitBrain, StoreUnavailable
from shuffle.examples.local import LocalSystem
from shuffle.examples.spark_pipeline import Mappers
from shuffle.examples.workload import SCHEMA, Workload, difference, oracle
from shuffle.jobs.aggregates import Aggregate
from shuffle.spark_connector.options import Options
from shuffle.spark_connector.reduce import ReduceTask, TaskCounts
from shuffle.spark_connector.schemas import spark_schema
from shuffle.spark_connector.sink.staging import QueueTarget, StagedMessage, create_sinks_table, publish
from shuffle.spark_connector.sink.writer import QueueStreamWriter, queue_target
from shuffle.spark_connector.source.offsets import rows_between
from shuffle.spark_connector.source.processor import Processor
from shuffle.spark_connector.source.reader import BatchLimits, DriverSide, ReducerPart
from shuffle.spark_connector.store_handle import StoreHandle
from shuffle.spec.config import load_spec
from shuffle.statestore import StateClient, Transaction

REDUCERS = 3
ALL = BatchLimits(None, None, None)
StartMappers = Callable[[dict[str, Any], int], Mappers]


def append(state: StateClient, queue: str, begin: int, end: int) -> None:
    for partition in range(2):
        state.queue(queue).append(partition, Workload(with_user_share=1.0).rows(begin, end, partition))


def produced(processor: Processor, rows: int) -> list[int]:
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        found = processor.produced()
        if sum(one.last_row_index + 1 for one in found.values()) >= rows:
            return [found[mapper].last_row_index for mapper in range(2)]
        time.sleep(0.05)
    raise AssertionError("the mappers did not get there")


@pytest.fixture
def running(
    request: pytest.FixtureRequest, system: LocalSystem, state: StateClient, start_mappers: StartMappers
) -> tuple[Processor, Mappers, str]:
    name = request.node.name.removeprefix("test_")[:40]
    state.create_queue(name, schema=SCHEMA, partitions=2)
    append(state, name, 0, 5_000)
    spec = {
        "processor": name,
        "input": {"queue": name},
        "mapper": {"class": "examples.activity:ParseLogs", "batch_rows_max": 1_000, "trim_period": "50ms"},
        "reducer": {"class": "examples.activity:CountByUser", "count": REDUCERS},
        "lease_ttl": "1s",
        "metrics": False,
    }
    mappers = start_mappers(spec, 2)
    processor = Processor(StoreHandle(system.address, 20.0), name)
    processor.shape()
    produced(processor, 10_000)
    return processor, mappers, name


def rows_of(processor: Processor, start: list[int], end: list[int]) -> list[pa.Table]:
    """By reducer and mapper."""
    found = []
    for reducer in range(REDUCERS):
        for mapper in range(2):
            rows = processor.rows(reducer, mapper, start[mapper], end[mapper], lambda m=mapper: start[m])
            found.append(pa.Table.from_batches([batch for batch, _ in rows]))
    return found


def test_range_is_the_same_when_read_again_also_from_a_restarted_mapper(
    running: tuple[Processor, Mappers, str],
) -> None:
    processor, mappers, _ = running
    driver = DriverSide(processor, "committed", ALL, commits=True)
    assert driver.initial() == [-1, -1]
    middle, end = [1_700, 900], [4_321, 3_000]
    first = rows_of(processor, [-1, -1], middle)
    driver.commit(middle)
    second = rows_of(processor, middle, end)
    assert sum(table.num_rows for table in first) == rows_between([-1, -1], middle)
    assert sum(table.num_rows for table in second) == rows_between(middle, end)
    mappers.kill_and_restart(0)
    mappers.kill_and_restart(1)
    assert [table.to_pylist() for table in rows_of(processor, middle, end)] == [t.to_pylist() for t in second]
    # Spark goes on from its checkpoint in a new process; an older one than what was committed is refused.
    driver.close()
    again = DriverSide(processor, "committed", ALL, commits=True)
    again.commit(end)
    again.close()
    with (
        closing(DriverSide(processor, "committed", ALL, commits=True)) as old,
        pytest.raises(RowsGone, match="stands at row 1700 of mapper 0, but rows up to 4321 were committed"),
    ):
        old.commit(middle)
    with pytest.raises(RowsGone, match="cannot be read any more"):
        rows_of(processor, middle, end)


def test_latest_skips_what_was_mapped_and_is_repeatable_until_something_is_committed(
    running: tuple[Processor, Mappers, str], state: StateClient
) -> None:
    processor, _, queue = running
    latest = produced(processor, 10_000)
    with closing(DriverSide(processor, "latest", ALL, commits=True)) as first:
        assert first.initial() == latest
    append(state, queue, 5_000, 6_000)
    after = produced(processor, 12_000)
    driver = DriverSide(processor, "latest", ALL, commits=True)
    assert driver.initial() == latest, "the first batch may have been planned from here"
    assert driver.latest(latest, ReadAllAvailable()) == after
    assert sum(table.num_rows for table in rows_of(processor, latest, after)) == 2_000
    driver.close()


def test_running_reducers_are_refused(running: tuple[Processor, Mappers, str], state: StateClient) -> None:
    processor, _, name = running
    lease = state.leases.register(reducers_group(name), "somebody", {"index": "0"}, 60_000)
    with pytest.raises(BadInput, match="has 1 running reducers, which commit the rows"):
        DriverSide(processor, "committed", ALL, commits=True)
    lease.leave()
    with closing(DriverSide(processor, "committed", ALL, commits=True)) as driver:
        start = driver.initial()
        driver.latest(start, ReadAllAvailable())
        # However they came to be started beside a query: it hands out no more rows.
        state.leases.register(reducers_group(name), "somebody", {"index": "0"}, 60_000)
        with pytest.raises(BadInput, match="has 1 running reducers, which commit the rows"):
            driver.latest(start, ReadAllAvailable())


def test_query_that_was_replaced_while_it_was_away_commits_nothing(
    running: tuple[Processor, Mappers, str], state: StateClient
) -> None:
    processor, _, name = running
    driver = DriverSide(processor, "committed", ALL, commits=True)
    start = driver.initial()
    end = driver.latest(start, ReadAllAvailable())
    with state.transaction() as tx:
        tx.write(f"{name}/meta", holder_row(replace(driver.lease.holder, guid="another", query_name="another")))
        tx.commit()
    before = state.scan(f"{name}/reducers").read_all()
    for refused in (lambda: driver.commit(end), lambda: driver.latest(start, ReadAllAvailable()), driver.refuse_others):
        with pytest.raises(SplitBrain, match=r"the query 'another' of the Spark driver .* has taken its place"):
            refused()
    assert state.scan(f"{name}/reducers").read_all() == before
    driver.close()


def test_mapper_that_stays_away_is_waited_for_and_then_named(
    running: tuple[Processor, Mappers, str],
    system: LocalSystem,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shuffle.spark_connector.waiting.REPORT_AFTER_S", 0.1)
    _, mappers, name = running
    impatient = Processor(StoreHandle(system.address, 0.5), name)
    mappers.close()
    time.sleep(1.5)  # Until its lease is over.
    with pytest.raises(StoreUnavailable, match=r"mapper 0 has been away for 0.5 s .* raise the option 'timeout'"):
        list(impatient.rows(0, 0, -1, 10, lambda: -1))
    driver = DriverSide(impatient, "committed", ALL, commits=True)
    start = driver.initial()
    answers = iter(lambda: driver.latest(start, ReadAllAvailable()), None)
    with pytest.raises(StoreUnavailable, match=r"mapper 0 has not answered for 0.5 s"):
        list(answers)
    assert f"waiting: processor {name}: mapper 0 does not answer. This gives up after 0.5 s" in capfd.readouterr().err
    driver.close()


class CountApart(AggregateReducer):
    table = "activity-twins"
    key = ("user", "cluster")
    aggregates: ClassVar[Mapping[str, Aggregate]] = {"last_access": Max("timestamp"), "count": Count()}


def test_reducer_run_by_two_tasks_at_once_counts_every_row_once(
    running: tuple[Processor, Mappers, str], state: StateClient
) -> None:
    """As speculation does it, or a retry while the first attempt is still alive."""
    processor, mappers, _ = running
    given = load_spec(mappers.spec)
    name = "tests.spark.test_positions:CountApart"
    spec = replace(given, reducer=replace(given.reducer, class_name=name, batch_rows_max=500))
    ends = produced(processor, 10_000)

    def run(reducer: int) -> TaskCounts:
        part = ReducerPart(reducer, [(mapper, -1, end, None) for mapper, end in enumerate(ends)])
        return ReduceTask(spec, processor, part).run()

    with ThreadPoolExecutor(2 * REDUCERS) as pool:
        done = list(pool.map(run, [*range(REDUCERS), *range(REDUCERS)]))
    assert sum(one.rows for one in done) == 10_000, "what a task says is what it has committed itself"
    assert sum(one.commits for one in done) > REDUCERS
    rows = [Workload(with_user_share=1.0).rows(0, 5_000, partition) for partition in range(2)]
    assert str(difference(oracle(rows), state.scan("activity-twins").read_all())).startswith("exactly-once: OK")
    assert run(0) == TaskCounts()


REFUSED_ROWS = 20
"""Rows are refused that have the timestamp of one of the first so many."""


class Picky(CountApart):
    table = "activity-picky"

    def reduce(self, rows: pa.Table) -> Transaction | None:
        if pc.any(pc.is_in(rows["timestamp"], value_set=refused())).as_py():
            raise ValueError("cannot take this row")
        return super().reduce(rows)


def refused() -> pa.Array:
    return Workload(with_user_share=1.0).rows(0, REFUSED_ROWS, 0)["timestamp"].combine_chunks().unique()


def test_rows_that_a_task_sets_aside_are_counted_by_it(
    running: tuple[Processor, Mappers, str], state: StateClient
) -> None:
    processor, mappers, name = running
    given = load_spec(mappers.spec)
    options = replace(given.reducer, class_name="tests.spark.test_positions:Picky", on_error="dead_letter")
    ends = produced(processor, 10_000)
    rows = pa.concat_tables([Workload(with_user_share=1.0).rows(0, 5_000, partition) for partition in range(2)])
    bad = pc.sum(pc.is_in(rows["timestamp"], value_set=refused())).as_py()
    assert 0 < bad < 200
    done = [
        ReduceTask(
            replace(given, reducer=options),
            processor,
            ReducerPart(reducer, [(mapper, -1, end, None) for mapper, end in enumerate(ends)]),
        ).run()
        for reducer in range(REDUCERS)
    ]
    assert sum(one.rows for one in done) == 10_000
    assert sum(one.dead_letters for one in done) == bad
    assert state.queue(f"{name}/reducer_dead_letters").bounds() == [(0, bad)]
    assert pc.sum(state.scan(Picky.table).read_all()["count"]).as_py() == 10_000 - bad


def test_rows_staged_by_two_attempts_of_a_task_are_published_once(system: LocalSystem, state: StateClient) -> None:
    state.create_queue("attempts", schema=SCHEMA, partitions=2)
    create_sinks_table(state)
    rows = Workload().rows(0, 1_000)
    target = QueueTarget(StoreHandle(system.address, 20.0), "attempts", ("user",), 60_000, SCHEMA)
    with ThreadPoolExecutor(2) as pool:
        attempts = [pool.submit(target.stage, iter(rows.to_batches()), 0).result()[0] for _ in range(2)]
    assert publish(target, "query", 7, attempts[1])
    assert not publish(target, "query", 7, attempts[0]), "the batch was published before"
    assert not publish(target, "query", 7, attempts[1]), "a repeated commit changes nothing"
    assert sum(end - begin for begin, end in state.queue("attempts").bounds()) == rows.num_rows


def test_queue_of_a_stream_is_created_by_the_first_task_that_has_rows_for_it(
    system: LocalSystem, state: StateClient
) -> None:
    rows = Workload().rows(0, 100)
    given = {"state": system.address, "queue": "made", "partitions": "2", "checkpointLocation": "/nowhere"}
    target = queue_target(Options.check("write stream", given), spark_schema(rows.schema, "the rows"))

    def failing() -> Iterator[pa.RecordBatch]:
        yield from rows.to_batches()
        raise ValueError("a bad row")

    def names() -> set[str]:
        return {queue.name for queue in state.queues()}

    with pytest.raises(ValueError, match="a bad row"):
        target.stage(failing(), 0)
    QueueStreamWriter(target).abort([None], 0)
    assert "made" not in names()
    staged, count = target.stage(iter(rows.to_batches()), 0)
    assert "made" in names()
    QueueStreamWriter(target).commit([StagedMessage("query", staged, count)], 0)
    assert sum(end for _, end in state.queue("made").bounds()) == rows.num_rows
