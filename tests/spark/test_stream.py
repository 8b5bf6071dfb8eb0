"""Streaming: a processor's rows through Spark, and its reducers as Spark tasks; with restarts in between."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from shuffle.examples.activity import TABLE, CountByUser
from shuffle.examples.generate import fill
from shuffle.examples.local import LocalSystem
from shuffle.examples.spark_pipeline import Mappers
from shuffle.examples.workload import Workload, difference, oracle
from shuffle.partition import hash_partition
from shuffle.spark_connector import reduce_stream
from shuffle.statestore import StateClient, Transaction

ROWS = 60_000
PARTITIONS = 2
REDUCERS = 3

StartMappers = Callable[[dict[str, Any], int], Mappers]


def spec_of(processor: str, queue: str, **reducer: Any) -> dict[str, Any]:
    return {
        "processor": processor,
        "input": {"queue": queue},
        # A window that holds a small part of the input: rows are read only as others are committed.
        "mapper": {
            "class": "examples.activity:ParseLogs",
            "memory": "1MiB",
            "batch_rows_max": 2_000,
            "batch_bytes_max": 262_144,
            "trim_period": "100ms",
        },
        "reducer": {"class": "examples.activity:CountByUser", "count": REDUCERS, **reducer},
        "lease_ttl": "1s",
        "metrics": False,
    }


def generated(state: StateClient, queue: str, seed: int) -> list[pa.Table]:
    rows: list[pa.Table] = []
    fill(
        state,
        queue,
        Workload(seed=seed, with_user_share=0.5),
        ROWS,
        PARTITIONS,
        batch_rows=10_000,
        on_batch=lambda _, batch: rows.append(batch),
    )
    return rows


def test_source_gives_every_row_once_over_restarts_of_query_and_mapper(
    spark: SparkSession, system: LocalSystem, state: StateClient, start_mappers: StartMappers, tmp_path: Path
) -> None:
    rows = generated(state, "logs-source", seed=1)
    wanted = pa.concat_tables(rows)
    wanted = wanted.filter(pc.is_valid(wanted["user"]))
    began = dt.datetime.now(dt.UTC)
    mappers = start_mappers(spec_of("sourced", "logs-source"), PARTITIONS)
    stream = (
        spark.readStream.format("shuffle")
        .options(spec=str(mappers.spec), maxRowsPerTrigger=9_000)
        .option("metadataColumns", "mapper, reducer, shuffle_index, ingestion_time")
        .load()
    )
    metadata = ["_mapper", "_reducer", "_shuffle_index", "_ingestion_time"]
    assert stream.columns == ["timestamp", "cluster", "user", "method", "message", *metadata]
    to = stream.writeStream.format("shuffle").options(
        state=system.address, queue="copied", partitions=2, checkpointLocation=str(tmp_path / "checkpoint")
    )
    query = to.start()
    while len(query.recentProgress) < 3:
        query.awaitTermination(0.2)
    query.stop()
    mappers.kill_and_restart(0)
    query = to.trigger(availableNow=True).start()
    query.awaitTermination()
    progress = query.recentProgress
    assert max(p["numInputRows"] for p in progress) <= 9_000
    assert list(json.loads(progress[-1]["sources"][0]["endOffset"])) == ["0", "1"]

    copied = pa.concat_tables([state.queue("copied").read(p, 0, max_rows=ROWS)[0] for p in range(2)])
    assert copied.num_rows == wanted.num_rows
    columns = wanted.column_names
    order = [(name, "ascending") for name in columns]
    assert (
        copied.select(columns)
        .sort_by(order)
        .equals(wanted.sort_by(order).combine_chunks().cast(copied.select(columns).schema))
    )
    where = hash_partition(copied, ["user", "cluster"], REDUCERS).partition_indexes
    assert where.tolist() == copied["_reducer"].to_pylist()
    for mapper in range(PARTITIONS):
        indexes = copied.filter(pc.equal(copied["_mapper"], mapper))["_shuffle_index"].to_pylist()
        assert sorted(indexes) == list(range(len(indexes))), "every shuffle index once"
    times = pc.min_max(copied["_ingestion_time"]).as_py()
    assert began <= times["min"] <= times["max"] <= dt.datetime.now(dt.UTC)

    # Mappers have been told, so that they trim: what is left in the queue is at most the last batches.
    mine = state.scan("sourced/reducers").read_all()
    assert len(set(mine["committed_row_indices"].to_pylist())) == 1
    assert sum(begin for begin, _ in state.queue("logs-source").bounds()) > 0

    with pytest.raises(PySparkException, match="'maxrowspertriger' to read stream; did you mean 'maxRowsPerTrigger'"):
        spark.readStream.format("shuffle").options(spec=str(mappers.spec), maxRowsPerTriger=1).load()
    with pytest.raises(PySparkException, match="knows no 'shufle_index'; did you mean 'shuffle_index'"):
        spark.readStream.format("shuffle").options(spec=str(mappers.spec), metadataColumns="shufle_index").load()
    with pytest.raises(PySparkException, match="'spec' and 'processor' contradict each other"):
        spark.readStream.format("shuffle").options(spec=str(mappers.spec), processor="x").load()
    with pytest.raises(PySparkException, match=r"there is no processor 'sorced' .*sourced"):
        spark.readStream.format("shuffle").options(state=system.address, processor="sorced", timeout="0s").load()


class DiesOnce(CountByUser):
    """Kills its own Python worker in the middle of a batch, twice: before it commits, and after. Emits every row."""

    def reduce(self, rows: pa.Table) -> Transaction | None:
        folder = Path(self.config["folder"])
        if self.spec.index == 1 and not (folder / "before").exists():
            (folder / "before").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.spec.index == 2:
            if (folder / "first").exists() and not (folder / "after").exists():
                (folder / "after").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            (folder / "first").touch()
        tx = super().reduce(rows)
        assert tx is not None
        tx.append("emitted", self.spec.index, rows)
        self.emit(tx, rows)
        return tx


def test_reduce_stream_counts_exactly_once_over_killed_workers_and_mappers(
    spark: SparkSession, system: LocalSystem, state: StateClient, start_mappers: StartMappers, tmp_path: Path
) -> None:
    if TABLE in {table.name for table in state.tables()}:
        state.drop_table(TABLE)  # Other tests of this store count into it, too.
    rows = generated(state, "logs-reduced", seed=2)
    reducer = {
        "class": "tests.spark.test_stream:DiesOnce",
        "config": {"folder": str(tmp_path)},
        "batch_rows_max": 2_000,
    }
    state.create_queue("emitted", schema=rows[0].schema, partitions=REDUCERS)
    state.create_queue("output", schema=rows[0].schema, partitions=REDUCERS)
    spec = spec_of("reduced", "logs-reduced", **reducer) | {"output": {"queue": "output"}}
    mappers = start_mappers(spec, PARTITIONS)
    to = {"state": system.address, "queue": "received", "partitions": "1"}
    query = reduce_stream(
        spark,
        str(mappers.spec),
        str(tmp_path / "checkpoint"),
        trigger={"availableNow": True},
        then=lambda emitted: emitted.writeStream.format("shuffle").options(**to),
        emit="emitted",
        maxRowsPerTrigger=20_000,
    )
    while query.isActive and not query.recentProgress:
        query.awaitTermination(0.05)
    mappers.kill_and_restart(0)
    query.awaitTermination()
    assert {"before", "after"} <= set(os.listdir(tmp_path))
    assert str(difference(oracle(rows), state.scan(TABLE).read_all())).startswith("exactly-once: OK")
    received = state.queue("received").read(0, 0, max_rows=ROWS)[0]
    wanted = pa.concat_tables(rows)
    wanted = wanted.filter(pc.is_valid(wanted["user"])).cast(received.schema)
    order = [(name, "ascending") for name in wanted.column_names]
    assert received.sort_by(order).equals(wanted.sort_by(order).combine_chunks())
    output = [state.queue("output").read(p, 0, max_rows=ROWS)[0] for p in range(REDUCERS)]
    assert pa.concat_tables(output).cast(received.schema).sort_by(order).equals(wanted.sort_by(order).combine_chunks())
    left = sum(end - begin for begin, end in state.queue("emitted").bounds())
    assert left < wanted.num_rows, "what was handed over is trimmed"
    with pytest.raises(PySparkException, match="the queue 'received' has 1 partitions and the processor 3 reducers"):
        reduce_stream(spark, str(mappers.spec), str(tmp_path / "other"), emit="received").awaitTermination()
