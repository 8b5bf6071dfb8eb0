"""Batch: tables at one moment, ranges of queues, atomic writes."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In, LessThan, LessThanOrEqual, StringStartsWith

from shuffle.errors import BadInput, SchemaMismatch
from shuffle.examples.local import LocalSystem
from shuffle.partition import hash_partition
from shuffle.spark_connector import write_stream
from shuffle.spark_connector.filters import key_ranges
from shuffle.statestore import StateClient

KEY = pa.schema([("user", pa.string()), ("day", pa.int32())])
VALUE = pa.schema([("count", pa.int64()), ("seen", pa.timestamp("us", tz="UTC"))])


def activity(users: int, days: int) -> pa.Table:
    rows = [
        {"user": f"user{u:04d}", "day": d, "count": u * d, "seen": dt.datetime(2026, 1, 1, d % 24, tzinfo=dt.UTC)}
        for u in range(users)
        for d in range(days)
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema([*KEY, *VALUE]))


@pytest.fixture
def table(state: StateClient) -> pa.Table:
    if "readings" in {table.name for table in state.tables()}:
        state.drop_table("readings")  # Another test has written to it.
    state.create_table("readings", key=KEY, value=VALUE)
    rows = activity(200, 10)
    with state.transaction() as tx:
        tx.write("readings", rows)
        tx.commit()
    return rows


def read(spark: SparkSession, system: LocalSystem, **options: Any) -> DataFrame:
    return spark.read.format("shuffle").options(state=system.address, **options).load()


def test_table_is_read_whole_in_several_tasks_and_with_its_types(
    spark: SparkSession, system: LocalSystem, table: pa.Table
) -> None:
    frame = read(spark, system, table="readings", splits=4)
    assert frame.rdd.getNumPartitions() >= 2
    assert dict(frame.dtypes) == {"user": "string", "day": "int", "count": "bigint", "seen": "timestamp"}
    assert (
        frame.toArrow()
        .sort_by([("user", "ascending"), ("day", "ascending")])
        .equals(table.cast(frame.toArrow().schema))
    )


def test_table_read_is_of_one_moment_whatever_is_written_meanwhile(
    spark: SparkSession, system: LocalSystem, state: StateClient, table: pa.Table
) -> None:
    before = sum(table["count"].to_pylist())
    planned = read(spark, system, table="readings").select("count").rdd
    assert planned.getNumPartitions() > 1  # Now the tasks are planned, and the moment is taken.
    with state.transaction() as tx:
        row = {"user": "zz", "day": 1, "count": 10**9, "seen": None}
        tx.write("readings", pa.Table.from_pylist([row], schema=table.schema))
        tx.commit()
    assert sum(row[0] for row in planned.collect()) == before
    assert read(spark, system, table="readings").groupBy().sum("count").collect()[0][0] == before + 10**9


def test_table_and_queue_that_were_created_anew_are_read_and_written_by_the_workers_of_earlier_queries(
    spark: SparkSession, system: LocalSystem, state: StateClient
) -> None:
    for columns in (["old"], ["new", "more"]):  # In the second round every worker knows those of the first.
        if "anew" in {table.name for table in state.tables()}:
            state.drop_table("anew")
            state.drop_queue("anew_queue")
        state.create_table("anew", pa.schema([("n", pa.int64())]), pa.schema([(name, pa.int64()) for name in columns]))
        state.create_queue("anew_queue", pa.schema([("n", pa.int64())]), partitions=1)
        rows = spark.range(100).selectExpr("id n", *(f"id {name}" for name in columns)).repartition(2)
        options = {"state": system.address}
        rows.write.format("shuffle").options(**options, table="anew").mode("append").save()
        rows.select("n").write.format("shuffle").options(**options, queue="anew_queue").mode("append").save()
        assert read(spark, system, table="anew").columns == ["n", *columns]
        assert sorted(row.n for row in read(spark, system, table="anew", splits=4).collect()) == list(range(100))
        assert sorted(row.n for row in read(spark, system, queue="anew_queue", splits=4).collect()) == list(range(100))


def test_filters_on_key_columns_narrow_what_is_scanned(
    spark: SparkSession, system: LocalSystem, state: StateClient, table: pa.Table
) -> None:
    handle = state.table_handle("readings")

    def scanned(*filters: Any) -> int:
        with state.snapshot() as snapshot:
            ranges = key_ranges(handle, filters)
            return sum(snapshot.scan_range("readings", one).read_all().num_rows for one in ranges)

    assert scanned(EqualTo(("user",), "user0007")) == 10
    assert scanned(EqualTo(("user",), "user0007"), EqualTo(("day",), 3)) == 1
    assert scanned(In(("user",), ("user0001", "user0002", None)), LessThan(("day",), 4)) == 8
    assert scanned(StringStartsWith(("user",), "user001")) == 100
    assert scanned(GreaterThanOrEqual(("user",), "user0100"), LessThanOrEqual(("user",), "user0101")) == 20
    assert scanned(EqualTo(("user",), None)) == 0
    everything = scanned()
    assert scanned(EqualTo(("count",), 7)) == everything, "not a key column"
    assert scanned(EqualTo(("day",), 3)) == everything, "not a leading key column"
    assert scanned(EqualTo(("user",), 17)) == everything, "a value that the column cannot have is Spark's to judge"
    frame = read(spark, system, table="readings").where("user = 'user0007' and day >= 3 and count > 21")
    assert sorted(row.day for row in frame.collect()) == [4, 5, 6, 7, 8, 9]
    assert frame.rdd.getNumPartitions() <= 8


TYPES = """
    select id, cast(id as tinyint) i8, cast(id as smallint) i16, cast(id as int) i32, id % 2 = 0 as flag,
      cast(id as float) / 3 f32, cast(id as double) / 3 f64, cast(id as decimal(20, 4)) / 7 d, cast(id as string) text,
      cast(cast(id as string) as binary) bytes, date_add(date'2026-03-28', cast(id as int)) day,
      timestamp'2026-03-29 01:30:00' + make_interval(0, 0, 0, 0, cast(id as int)) at,
      timestamp_ntz'2026-03-29 02:30:00' wall, interval '1' day * id span,
      array(id, null) list, named_struct('a', id, 'b', array(cast(id as string))) nested, map('k', id) kv,
      if(id % 3 = 0, null, cast(id as string)) maybe
    from range(50)
"""


def test_every_type_goes_through_a_queue_and_back(spark: SparkSession, system: LocalSystem) -> None:
    frame = spark.sql(TYPES)
    frame.write.format("shuffle").options(state=system.address, queue="types", partitions=2).mode("append").save()
    back = read(spark, system, queue="types")
    assert [(f.name, f.dataType) for f in back.schema] == [(f.name, f.dataType) for f in frame.schema]
    assert sorted(back.collect(), key=lambda row: row.id) == frame.collect()


def test_range_of_a_queue_is_what_was_asked_for(spark: SparkSession, system: LocalSystem, state: StateClient) -> None:
    queue = state.create_queue("ranges", schema=pa.schema([("n", pa.int64())]), partitions=2)
    queue.append(0, pa.table({"n": range(100)}))
    queue.append(1, pa.table({"n": range(1000, 1010)}))
    queue.trim(0, 10)
    whole = read(spark, system, queue="ranges", splits=3)
    assert sorted(row.n for row in whole.collect()) == [*range(queue.bounds()[0][0], 100), *range(1000, 1010)]
    part = read(spark, system, queue="ranges", begin='{"0": 50, "1": 3}', end='{"0": 53}')
    assert sorted(row.n for row in part.collect()) == [50, 51, 52, *range(1003, 1010)]
    with pytest.raises(PySparkException, match="partition 1 of the queue 'ranges' has the rows 0 to 9"):
        read(spark, system, queue="ranges", begin="50").collect()


def test_write_to_a_queue_goes_where_sparks_hash_says(
    spark: SparkSession, system: LocalSystem, state: StateClient
) -> None:
    frame = spark.range(1000).selectExpr("id", "concat('user', id % 17) user").repartition(3)
    options = {"state": system.address, "queue": "hashed", "partitions": "4", "partitionBy": "user"}
    frame.write.format("shuffle").options(**options).mode("append").save()
    queue = state.queue("hashed")
    seen = 0
    for partition in range(4):
        rows, _ = queue.read(partition, 0, max_rows=10_000)
        seen += rows.num_rows
        assert set(hash_partition(rows, ["user"], 4).partition_indexes.tolist()) <= {partition}
        sql = spark.createDataFrame(rows).selectExpr("pmod(xxhash64(user), 4096) * 4 div 4096 p").distinct().collect()
        assert [row.p for row in sql] == ([partition] if rows.num_rows else [])
    assert seen == 1000
    assert state.lookup("spark/sinks", pa.table({"query": ["x"], "queue": ["hashed"]})).num_rows == 0


def test_upsert_into_a_table_is_whole_or_not_at_all(
    spark: SparkSession, system: LocalSystem, state: StateClient
) -> None:
    frame = spark.range(100).selectExpr("id k", "id * 2 v", "cast(id as decimal(10, 2)) d").repartition(4)
    to = {"state": system.address, "table": "upserted"}
    frame.write.format("shuffle").options(key="k", **to).mode("append").save()
    frame.selectExpr("k + 50 k", "0L v", "d").write.format("shuffle").options(**to).mode("append").save()
    rows = {row["k"]: row for row in state.scan("upserted").read_all().to_pylist()}
    assert len(rows) == 150
    assert (rows[49]["v"], rows[50]["v"], rows[149]["d"]) == (98, 0, Decimal("99.00"))
    broken = frame.selectExpr("if(k = 77, null, k) k", "-1L v", "d")
    with pytest.raises(PySparkException, match="key column 'k' is null"):
        broken.write.format("shuffle").options(**to).mode("append").save()
    assert -1 not in {row["v"] for row in state.scan("upserted").read_all().to_pylist()}


def test_write_that_fails_leaves_no_table_and_no_queue_behind(
    spark: SparkSession, system: LocalSystem, state: StateClient
) -> None:
    before = {one.name for one in [*state.tables(), *state.queues()]}
    rows = spark.range(100).coalesce(1)
    mistakes = [
        (rows.selectExpr("if(id = 77, null, id) k", "id v"), {"table": "left", "key": "k"}, "key column 'k' is null"),
        (
            rows.selectExpr("cast(raise_error('a bad row') as long) k", "id v"),
            {"table": "left", "key": "k"},
            "a bad row",
        ),
        (rows.selectExpr("id k", "array(id) v"), {"table": "left", "key": "k"}, "column 'v'"),
        (
            rows.selectExpr("id k", "cast(raise_error('a bad row') as string) v"),
            {"queue": "left", "partitions": "2"},
            "a bad row",
        ),
    ]
    for frame, to, said in mistakes:
        with pytest.raises(PySparkException, match=said):
            frame.write.format("shuffle").options(state=system.address, **to).mode("append").save()
        assert {one.name for one in [*state.tables(), *state.queues()]} == before, said
    # Nothing at all is a success, and what was to be created is there.
    for to in ({"table": "left", "key": "id"}, {"queue": "left-rows", "partitions": "2"}):
        rows.where("id < 0").write.format("shuffle").options(state=system.address, **to).mode("append").save()
    assert state.table("left").key.names == ["id"]
    assert state.queue("left-rows").bounds() == [(0, 0), (0, 0)]


MISTAKES = [
    ({"tabel": "readings"}, "there is no option 'tabel' to read; did you mean 'table'?"),
    ({"table": "readings", "queue": "ranges"}, "'table' and 'queue' contradict each other"),
    ({"table": "reading"}, "there is no table 'reading'; did you mean 'readings'?"),
    ({"table": "readings", "splits": "many"}, "'splits' is a whole number of at least 1, not 'many'"),
    ({"table": "readings", "begin": "0"}, "'begin' goes with 'queue'"),
    ({"table": "readings", "state": "grpc://127.0.0.1:1", "timeout": "200ms"}, "waited for 0.2 s"),
    ({"table": "readings", "state": "http://store:7070/"}, "neither: did you mean 'grpc://store:7070'?"),
    ({"table": "readings", "state": "store:7070"}, "'store:7070' is neither: did you mean 'grpc://store:7070'?"),
    ({"table": "readings", "state": "/nowhere", "timeout": "0s"}, "no daemon serves the state store in /nowhere"),
]


def test_mistakes_in_options_are_told(spark: SparkSession, system: LocalSystem, table: pa.Table) -> None:
    for options, said in MISTAKES:
        with pytest.raises(PySparkException) as error:
            spark.read.format("shuffle").options(**{"state": system.address, **options}).load().collect()
        assert said in str(error.value)


def test_columns_that_do_not_fit_are_refused_by_name(
    spark: SparkSession, system: LocalSystem, state: StateClient, tmp_path: Path
) -> None:
    state.create_queue("typed", schema=pa.schema([("a", pa.int64()), ("b", pa.string())]), partitions=1)
    to = {"state": system.address, "queue": "typed"}
    for columns, said in [
        (["id a", "id b"], "column 'b': it is string there and int64 here"),
        (["id a"], "has a column 'b'"),
        (["id a", "'x' b", "1 c"], "has no column 'c'"),
    ]:
        with pytest.raises(PySparkException, match=said):
            spark.range(3).selectExpr(*columns).write.format("shuffle").options(**to).mode("append").save()
    rate = spark.readStream.format("rate").load().selectExpr("value a", "timestamp b")
    with pytest.raises(SchemaMismatch, match=r"column 'b': it is string there and timestamp\[us, tz=UTC\] here"):
        write_stream(rate, str(tmp_path), **to)
    with pytest.raises(BadInput, match="there is no option 'partitons' to write stream; did you mean 'partitions'"):
        write_stream(rate, str(tmp_path), partitons=3, **to)
    assert not spark.streams.active
    assert state.queue("typed").bounds() == [(0, 0)]
