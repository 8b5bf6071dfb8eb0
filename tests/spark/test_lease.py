"""One query at a time on a processor: who gets the lease, who is refused, and who is replaced."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from shuffle import AggregateReducer, Count
from shuffle.durable.meta import META_KEY, META_VALUE
from shuffle.durable.query_lease import has_lease, refuse_beside_query, stored_holder
from shuffle.durable.tables import query_group
from shuffle.errors import BadInput, SplitBrain
from shuffle.examples.local import LocalSystem
from shuffle.examples.spark_pipeline import Mappers
from shuffle.examples.workload import SCHEMA, Workload
from shuffle.jobs.aggregates import Aggregate
from shuffle.spark_connector import reduce_stream
from shuffle.spark_connector.source.processor import Processor
from shuffle.spark_connector.source.query_lease import QueryLease, begin_task
from shuffle.spark_connector.store_handle import StoreHandle
from shuffle.statestore import StateClient
from tests.waiting import wait_until

TTL_MS = 500
ELSEWHERE = "another machine"

HOLD = """
import sys, time
from shuffle.spark_connector.store_handle import StoreHandle
from shuffle.spark_connector.source.query_lease import QueryLease
from shuffle.spark_connector.source.processor import Processor
QueryLease(Processor(StoreHandle(sys.argv[1], 20.0), sys.argv[2])).take()
print("taken", flush=True)
time.sleep(600)
"""
"""Another driver's process, which ends only if it is killed."""


@pytest.fixture
def processor(request: pytest.FixtureRequest, system: LocalSystem, state: StateClient) -> Processor:
    name = request.node.name.removeprefix("test_")[:40]
    state.create_table(f"{name}/meta", key=META_KEY, value=META_VALUE)
    return Processor(StoreHandle(system.address, 20.0), name)


def test_second_is_refused_by_the_name_of_the_first_until_that_has_ended(
    processor: Processor, state: StateClient, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shuffle.spark_connector.source.query_lease.ENDING_S", 0.2)
    first, second = QueryLease(processor), QueryLease(processor)
    first.take()
    first.check()
    with pytest.raises(BadInput) as refused:
        second.take()
    who = first.holder
    said = f"the query of the Spark driver on {who.host}, pid {who.driver_pid}, since {who.since}"
    assert f"is already read by {said}: one processor has one query" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert f"waiting to see whether {said} has ended" in capfd.readouterr().err
    with pytest.raises(BadInput, match=r"counted by reducers as well\. Stop the query, or run only the mappers"):
        refuse_beside_query(state, processor.name)
    first.release()
    refuse_beside_query(state, processor.name)
    began_s = time.monotonic()
    second.take()
    assert time.monotonic() - began_s < 1, "a place that was given back is free at once"
    second.release()
    assert stored_holder(state, processor.name) is None
    assert not state.leases.members(query_group(processor.name))


def test_driver_that_was_killed_on_this_machine_is_replaced_at_once(
    processor: Processor, system: LocalSystem, state: StateClient
) -> None:
    command = [sys.executable, "-c", HOLD, system.address, processor.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"taken\n"
        held = stored_holder(state, processor.name)
        assert held is not None
        assert (held.pid, held.is_here, held.is_dead) == (other.pid, True, False)
        other.send_signal(signal.SIGKILL)
        wait_until(lambda: held.is_dead, "the process is a zombie, or gone")
        assert has_lease(state, processor.name, held), "its lease has not ended yet"
        refuse_beside_query(state, processor.name)
        own = QueryLease(processor)
        began_s = time.monotonic()
        own.take()
        assert time.monotonic() - began_s < 1
        own.release()


def test_driver_elsewhere_is_replaced_when_its_lease_has_ended_and_not_before(
    processor: Processor, state: StateClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shuffle.spark_connector.source.query_lease.RENEW_S", 0.1)
    monkeypatch.setattr("shuffle.spark_connector.source.query_lease.ABSENT_S", 0.3)
    first = QueryLease(processor, TTL_MS)
    first.holder = replace(first.holder, place=ELSEWHERE)
    first.take()
    with pytest.raises(BadInput, match="is already read by the query of the Spark driver"):
        QueryLease(processor, TTL_MS).take()
    first._stopping.set()  # As if the machine had lost its power: nothing is renewed, and nothing is given back.
    second = QueryLease(processor, TTL_MS)
    second.take()
    assert stored_holder(state, processor.name) == second.holder

    # The first one was only asleep. It may hand out nothing and commit nothing any more.
    with pytest.raises(SplitBrain, match=f"the Spark driver on .*pid {second.holder.driver_pid}.* has taken its place"):
        first.check()
    with state.transaction() as tx, pytest.raises(SplitBrain):
        first.check_in(tx)
    with pytest.raises(SplitBrain):
        begin_task(processor, first.holder.guid, 0)
    begin_task(processor, second.holder.guid, 0)
    first.release()
    second.check()
    second.release()


def test_holder_without_a_lease_after_a_restart_of_the_store_is_waited_for(
    processor: Processor, state: StateClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shuffle.spark_connector.source.query_lease.RENEW_S", 0.1)
    monkeypatch.setattr("shuffle.spark_connector.source.query_lease.ABSENT_S", 1.0)
    monkeypatch.setattr("shuffle.spark_connector.source.query_lease.ENDING_S", 0.3)
    first = QueryLease(processor, TTL_MS)
    first.take()
    assert first._lease is not None
    first._lease.leave()  # What a restarted store does: leases are not durable.
    with pytest.raises(BadInput, match="is already read by"):
        QueryLease(processor, TTL_MS).take()
    first.check()
    first.release()


class CountApart(AggregateReducer):
    table = "activity-alone"
    key = ("user",)
    aggregates: ClassVar[Mapping[str, Aggregate]] = {"count": Count()}


def test_second_query_of_a_session_is_refused_and_starts_once_the_first_was_stopped(
    spark: SparkSession,
    system: LocalSystem,
    state: StateClient,
    start_mappers: Callable[[dict[str, Any], int], Mappers],
    tmp_path: Path,
) -> None:
    rows = Workload(seed=11, with_user_share=1.0).rows(0, 2_000)
    queue = state.create_queue("logs-alone", schema=SCHEMA, partitions=1)
    queue.append(0, rows)
    spec = {
        "processor": "alone",
        "input": {"queue": "logs-alone"},
        "mapper": {"class": "examples.activity:ParseLogs"},
        "reducer": {"class": "tests.spark.test_lease:CountApart", "count": 1},
        "metrics": False,
    }
    mappers = start_mappers(spec, 1)
    first = reduce_stream(spark, str(mappers.spec), str(tmp_path / "first"), name="the first")
    wait_until(lambda: bool(first.recentProgress) or not first.isActive, "the first batch")
    stream = spark.readStream.format("shuffle").options(state=system.address, processor="alone").load()
    copied = stream.writeStream.format("shuffle").options(state=system.address, queue="copied-alone", partitions=1)
    second = copied.option("checkpointLocation", str(tmp_path / "second")).trigger(availableNow=True)
    with pytest.raises(StreamingQueryException) as refused:
        second.start().awaitTermination()
    driver = spark._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[union-attr]
    assert f"read by the query 'the first' (id {first.id}) of the Spark driver on " in str(refused.value)
    assert f", pid {driver}, since 20" in str(refused.value)
    # Reducers of one's own are refused just so.
    reducers = system.run(mappers.spec, "--no-check", "--until-drained")
    assert reducers.wait(60) == 2
    assert f"processor alone is read by the query 'the first' (id {first.id})" in system.log_tail("alone")
    assert first.isActive

    first.stop()
    wait_until(lambda: not state.leases.members(query_group("alone")), "the lease is given back", 5)
    assert stored_holder(state, "alone") is None
    queue.append(0, rows)
    second.start().awaitTermination()
    assert state.queue("copied-alone").bounds() == [(0, rows.num_rows)], "the rows since, and no others"
