"""Where a row goes, as Spark SQL itself computes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from shuffle.limits import KEY_GROUPS_DEFAULT
from shuffle.partition import hash_partition, key_group_range, key_groups
from shuffle.partition.xxhash64 import xxhash64

pytestmark = pytest.mark.spark

INT_EDGES = [0, 1, -1, 127, -128]
FLOAT_EDGES = [0.0, -0.0, 1.5, -1.5, math.inf, -math.inf, math.nan, 1e-45, 3.4e38]
TEXTS = [
    "",
    "a",
    "abc",
    "abcd",
    "abcdefg",
    "abcdefgh",
    "ü" * 7,
    "日本語",
    "x" * 31,
    "y" * 32,
    "z" * 33,
    "w" * 200,
    "\0",
]
INNER = pa.struct([("n", pa.int64()), ("t", pa.string()), ("l", pa.list_(pa.int32()))])

COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "bool": (pa.bool_(), [True, False]),
    "int8": (pa.int8(), INT_EDGES),
    "int16": (pa.int16(), [*INT_EDGES, 32767, -32768]),
    "int32": (pa.int32(), [*INT_EDGES, 2**31 - 1, -(2**31)]),
    "int64": (pa.int64(), [*INT_EDGES, 2**63 - 1, -(2**63), 2**32]),
    "float32": (pa.float32(), FLOAT_EDGES),
    "float64": (pa.float64(), [*FLOAT_EDGES, 5e-324, 1.7e308]),
    "string": (pa.string(), TEXTS),
    "binary": (pa.binary(), [*[text.encode() for text in TEXTS], b"\xff\xfe\x00", bytes(range(256))]),
    "date32": (pa.date32(), [0, 1, -1, 20_000, -700_000]),
    "timestamp": (pa.timestamp("us", tz="UTC"), [0, 1, -1, 1_700_000_000_123_456, -62_135_596_800_000_000]),
    "timestamp_ntz": (pa.timestamp("us"), [0, 1, -1, 1_700_000_000_123_456]),
    "duration": (pa.duration("us"), [0, 1, -1, 86_400_000_000, 2**62]),
    "decimal_9": (pa.decimal128(9, 2), [Decimal("0.00"), Decimal("1.25"), Decimal("-9999999.99")]),
    "decimal_18": (pa.decimal128(18, 0), [Decimal(0), Decimal(10**18 - 1), Decimal(-(10**18) + 1)]),
    "decimal_19": (pa.decimal128(19, 0), [Decimal(value) for value in (0, 127, 128, -128, -129, 255, 256, -(10**18))]),
    "decimal_38": (pa.decimal128(38, 6), [Decimal(10**31), Decimal(-(10**31)), Decimal("0.000001"), Decimal(-1)]),
    "struct": (
        INNER,
        [{"n": 1, "t": "a", "l": [1, 2]}, {"n": None, "t": "b", "l": None}, {"n": 2, "t": None, "l": []}],
    ),
    "list": (pa.list_(pa.string()), [[], ["a"], ["a", None, "b"], [None], ["", ""]]),
    "list_of_lists": (pa.list_(pa.list_(pa.int64())), [[[1], [2, 3]], [[], None], []]),
    "list_of_structs": (pa.list_(INNER), [[{"n": 1, "t": "x", "l": [7]}, None], []]),
}


@pytest.fixture(autouse=True)
def _in_utc(spark: SparkSession) -> Iterator[None]:
    """Spark takes Arrow's times without a zone for wall clock times of its session."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    yield
    spark.conf.set("spark.sql.session.timeZone", str(before))


def edge_values(name: str, count: int) -> pa.Array:
    """The edge values of a type, a null among them, repeated up to ``count`` rows."""
    kind, values = COLUMNS[name]
    with_null = [*values, None]
    return pa.array([with_null[position % len(with_null)] for position in range(count)], kind)


def in_spark(spark: SparkSession, rows: pa.Table, expression: str) -> list[int]:
    return [int(row[0]) for row in spark.createDataFrame(rows).selectExpr(expression).collect()]


def test_every_type_hashes_as_in_spark(spark: SparkSession) -> None:
    rows = pa.table({name: edge_values(name, 40) for name in COLUMNS})
    hashed = spark.createDataFrame(rows).selectExpr(*[f"xxhash64({name}) as {name}" for name in COLUMNS]).collect()
    for name in COLUMNS:
        assert xxhash64([rows[name]]).tolist() == [row[name] for row in hashed], name


def test_every_column_chained_to_every_other_hashes_as_in_spark(spark: SparkSession) -> None:
    """Lengths without a common divisor, so that the nulls of the columns meet in all combinations."""
    rows = pa.table({name: edge_values(name, 120) for name in COLUMNS})
    names = list(COLUMNS)
    expression = f"xxhash64({', '.join(names)})"
    assert xxhash64(rows.columns).tolist() == in_spark(spark, rows, expression)
    backwards = list(reversed(names))
    expression = f"xxhash64({', '.join(backwards)})"
    assert xxhash64(rows.select(backwards).columns).tolist() == in_spark(spark, rows, expression)


def test_a_time_of_day_hashes_as_in_spark(spark: SparkSession) -> None:
    row = spark.sql("SELECT xxhash64(TIME'00:00:00'), xxhash64(TIME'23:59:59.999999')").collect()[0]
    micros = pa.array([0, 86_399_999_999], pa.time64("us"))
    assert xxhash64([micros]).tolist() == [row[0], row[1]]


def test_many_random_strings_hash_as_in_spark(spark: SparkSession) -> None:
    generator = np.random.default_rng(7)
    lengths = generator.integers(0, 80, 20_000)
    texts = ["".join(map(chr, generator.integers(32, 500, length))) for length in lengths]
    users = [f"user-{code}" if code else None for code in generator.integers(0, 500, 20_000)]
    clusters = [f"cluster-{code}" if code else None for code in generator.integers(0, 5, 20_000)]
    rows = pa.table({"user": users, "cluster": clusters, "text": texts})
    assert xxhash64([rows["user"], rows["cluster"]]).tolist() == in_spark(spark, rows, "xxhash64(user, cluster)")
    assert xxhash64(rows.columns).tolist() == in_spark(spark, rows, "xxhash64(user, cluster, text)")


@pytest.mark.parametrize("max_parallelism", [1, 7, 1000, KEY_GROUPS_DEFAULT])
def test_key_groups_and_reducers_are_what_spark_computes(spark: SparkSession, max_parallelism: int) -> None:
    rows = pa.table({name: edge_values(name, 200) for name in ("string", "int64", "float64")})
    by = ["string", "int64", "float64"]
    in_sql = f"pmod(xxhash64({', '.join(by)}), {max_parallelism})"
    groups = in_spark(spark, rows, in_sql)
    assert key_groups(rows, by, max_parallelism).tolist() == groups
    reducers = min(5, max_parallelism)
    expected = in_spark(spark, rows, f"{in_sql} * {reducers} div {max_parallelism}")
    partitioned = hash_partition(rows, by, reducers, max_parallelism).partition_indexes
    assert partitioned.tolist() == expected
    ranges = [key_group_range(reducer, reducers, max_parallelism) for reducer in range(reducers)]
    assert all(group in ranges[reducer] for group, reducer in zip(groups, expected, strict=True))
