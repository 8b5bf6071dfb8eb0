"""Offsets, limits and options: what needs no Spark session."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shuffle.errors import BadInput, SchemaMismatch
from shuffle.spark_connector.options import Options
from shuffle.spark_connector.schemas import arrow_schema, check_fits, spark_schema
from shuffle.spark_connector.source.offsets import admit, from_offset, rows_between, to_offset
from shuffle.spark_connector.source.reader import Limits


def test_offset_has_the_mappers_in_the_order_of_their_numbers() -> None:
    offset = to_offset(range(100, 112))
    assert list(json.loads(json.dumps(offset)))[-2:] == ["10", "11"]
    assert from_offset(dict(reversed(offset.items())), 12) == list(range(100, 112))


def test_offset_of_another_processor_is_refused() -> None:
    with pytest.raises(BadInput, match="of 2 mappers and the processor has 3"):
        from_offset({"0": 1, "1": 1}, 3)


@given(
    st.lists(st.tuples(st.integers(-1, 1000), st.integers(-1, 1000)), min_size=1, max_size=8),
    st.one_of(st.none(), st.integers(1, 3000)),
)
def test_batch_goes_as_far_as_it_may_and_no_mapper_goes_back(
    mappers: list[tuple[int, int]], rows_max: int | None
) -> None:
    start, latest = [a for a, _ in mappers], [b for _, b in mappers]
    end = admit(start, latest, rows_max)
    waiting = sum(max(0, b - a) for a, b in mappers)
    assert rows_between(start, end) == (waiting if rows_max is None else min(waiting, rows_max))
    assert all(a <= e <= max(a, b) for a, b, e in zip(start, latest, end, strict=True))


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BadInput, match="minRowsPerTrigger=10 and maxRowsPerTrigger=5 contradict"):
        Limits.of(Options.check("read stream", {"minRowsPerTrigger": "10", "maxrowspertrigger": "5"}))
    with pytest.raises(BadInput, match="'startingOffsets' is one of earliest, latest, committed, not 'lattest'; did"):
        Options.check("read stream", {"startingOffsets": "lattest"}).choice(
            "startingOffsets", ["earliest", "latest", "committed"], "committed"
        )
    with pytest.raises(BadInput, match="'partitionby' is not for this: it is known to write stream and write"):
        Options.check("read", {"partitionBy": "x"})


@pytest.mark.parametrize(("text", "seconds"), [("5s", 5.0), ("200ms", 0.2), ("1.5 min", 90.0), ("1h", 3600.0)])
def test_times_have_units(text: str, seconds: float) -> None:
    assert Options.check("read", {"timeout": text}).seconds("timeout", 1.0) == pytest.approx(seconds)


def test_time_without_a_unit_is_refused_as_in_a_spec() -> None:
    with pytest.raises(BadInput, match="'5' has no unit of time: write 5s or 5ms"):
        Options.check("read", {"timeout": "5"}).seconds("timeout", 1.0)


def test_column_that_spark_has_no_type_for_is_named() -> None:
    with pytest.raises(SchemaMismatch, match="column 'n' has the type uint64"):
        spark_schema(pa.schema([("n", pa.uint64())]), "the queue 'q'")


def test_schema_survives_the_way_to_spark_and_back() -> None:
    schema = pa.schema(
        [
            pa.field("at", pa.timestamp("us", tz="UTC")),
            pa.field("wall", pa.timestamp("us")),
            pa.field("nested", pa.struct([pa.field("list", pa.list_(pa.field("element", pa.string())))])),
        ]
    )
    assert arrow_schema(spark_schema(schema, "x")) == schema
    check_fits(arrow_schema(spark_schema(schema, "x")), schema, "x")
