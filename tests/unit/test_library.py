"""The declarative mapper and reducer, over the real embedded state store."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import shuffle
from shuffle import AggregateReducer, Count, HashMapper, Last, Max, Min, Sum
from shuffle.api import WorkerSpec
from shuffle.config_schema import check_config
from shuffle.errors import BadInput, NullKey, SchemaMismatch, SpecError
from shuffle.ids import Guid
from shuffle.jobs import aggregate_reducer
from shuffle.jobs.aggregates import Aggregate
from shuffle.partition import hash_partition
from shuffle.statestore import StateClient

SPEC = WorkerSpec("activity", 0, Guid("g"), 2, 3)
LOGS = pa.schema([("user", pa.string()), ("cluster", pa.string()), ("bytes", pa.int64())])


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateClient]:
    with StateClient.open(str(tmp_path / "state")) as client:
        yield client


def log_rows() -> pa.Table:
    rows = [("a", "x", 1), (None, "x", 2), ("b", "y", 30), ("c", None, 40), ("d", "x", None)]
    return pa.Table.from_pylist([dict(zip(LOGS.names, row, strict=True)) for row in rows], schema=LOGS)


def reducer_of(state: StateClient, key: list[str], aggregates: Mapping[str, Aggregate]) -> AggregateReducer:
    declared = type("Declared", (AggregateReducer,), {"table": "t", "key": key, "aggregates": aggregates})
    made: AggregateReducer = declared({}, SPEC, state)
    return made


def fold(reducer: AggregateReducer, *batches: pa.Table) -> list[dict[str, Any]]:
    for batch in batches:
        tx = reducer.reduce(batch)
        assert tx is not None
        tx.commit()
    found: list[dict[str, Any]] = reducer.state.scan("t").read_all().to_pylist()
    return found


# HashMapper -----------------------------------------------------------------------------------------------------------


class ParseLogs(HashMapper):
    key = ("user", "cluster")
    columns = ("user", "bytes")
    not_null = ("user",)

    def where(self, rows: pa.Table) -> pa.Array:
        return pc.less(rows["bytes"], 40)


def test_hash_mapper_filters_projects_and_partitions_by_columns_it_does_not_pass_on(state: StateClient) -> None:
    mapped = ParseLogs({}, SPEC, state, LOGS).map(log_rows())
    assert mapped.rows.to_pylist() == [{"user": "a", "bytes": 1}, {"user": "b", "bytes": 30}]
    whole = hash_partition(log_rows(), ["user", "cluster"], 3).partition_indexes
    assert mapped.partition_indexes.tolist() == [whole[0], whole[2]]


def test_hash_mapper_passes_everything_on_unless_told_otherwise(state: StateClient) -> None:
    mapper = type("All", (HashMapper,), {"key": ["user"]})({}, SPEC, state, LOGS)
    assert mapper.map(log_rows()).rows.equals(log_rows())


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({}, "needs its key columns"),
        ({"key": "user"}, r"must be a list of columns: \['user'\]"),
        ({"key": ["usr"]}, "Bad.key: .* 'usr'; did you mean 'user'"),
        ({"key": ["user"], "columns": ["bites"]}, "Bad.columns: .* did you mean 'bytes'"),
        ({"key": ["user"], "not_null": ["zone"]}, "Bad.not_null: .* there are: user, cluster, bytes"),
    ],
)
def test_hash_mapper_refuses_a_wrong_declaration(state: StateClient, attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        type("Bad", (HashMapper,), attributes)({}, SPEC, state, LOGS)


# AggregateReducer -----------------------------------------------------------------------------------------------------


def test_every_aggregate_over_several_batches_equals_one_pass_over_all_rows(state: StateClient) -> None:
    generator = np.random.default_rng(3)
    count = 3000
    rows = pa.table(
        {
            "user": [f"u{code}" for code in generator.integers(0, 200, count)],
            "cluster": pa.array([f"c{code}" for code in generator.integers(0, 3, count)]).dictionary_encode(),
            "ts": pa.array(generator.permutation(count), pa.timestamp("us"), mask=generator.random(count) < 0.1),
            "bytes": pa.array(generator.integers(-1000, 1000, count), pa.int32(), mask=generator.random(count) < 0.5),
            "text": pa.array([f"t{code:04}" for code in generator.integers(0, 5000, count)]),
        }
    )
    aggregates = {
        "count": Count(),
        "sized": Count("bytes"),
        "total": Sum("bytes"),
        "first": Min("text"),
        "last_access": Max("ts"),
        "latest": Last("text", by="ts"),
        "arrived": Last("bytes"),
    }
    cuts = [0, 1, 50, 51, 1200, 3000]
    batches = [rows.slice(begin, end - begin) for begin, end in itertools.pairwise(cuts)]
    got = fold(reducer_of(state, ["user", "cluster"], aggregates), *batches)
    expected: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows.to_pylist():
        fold_one(expected.setdefault((row["user"], row["cluster"]), {"count": 0, "sized": 0}), row)
    assert len(got) == len(expected)
    for stored in got:
        wanted = expected[stored["user"], stored["cluster"]]
        assert {name: stored[name] for name in aggregates} == {name: wanted.get(name) for name in aggregates}


def fold_one(entry: dict[str, Any], row: dict[str, Any]) -> None:
    """The same, one row after the other, in plain Python."""
    entry["count"] += 1
    entry["arrived"] = row["bytes"]
    entry["first"] = min(entry.get("first", row["text"]), row["text"])
    if row["bytes"] is not None:
        entry["sized"] += 1
        entry["total"] = entry.get("total", 0) + row["bytes"]
    if row["ts"] is not None and ("last_access" not in entry or row["ts"] >= entry["last_access"]):
        entry["last_access"], entry["latest"] = row["ts"], row["text"]


VALUES: dict[pa.DataType, list[Any]] = {
    pa.int8(): [3, -4, None],
    pa.uint64(): [2**63 + 1, 5, None],
    pa.float32(): [1.5, float("inf"), -0.5],
    pa.bool_(): [True, False, None],
    pa.large_string(): ["b", "", "ü"],
    pa.binary(): [b"\xff", b"", None],
    pa.date32(): [10, -3, None],
    pa.timestamp("ms", tz="UTC"): [5, 1, None],
    pa.decimal128(10, 2): [Decimal("1.25"), Decimal("-7.00"), None],
}


@pytest.mark.parametrize("kind", VALUES, ids=str)
def test_min_max_and_last_of_every_type(state: StateClient, kind: pa.DataType) -> None:
    values = pa.array(VALUES[kind], kind)
    rows = pa.table({"k": pa.array([1] * 3), "v": values, "n": [1, 3, 2]})
    aggregates = {"low": Min("v"), "high": Max("v"), "latest": Last("v", by="n"), "same": Last("n", by="v")}
    # One row at a time goes through merge; all in one batch goes through group_by.
    single = fold(reducer_of(state, ["k"], aggregates), *[rows.slice(row, 1) for row in range(3)])[0]
    ordered = sorted(value for value in values.to_pylist() if value is not None)
    assert (single["low"], single["high"]) == (ordered[0], ordered[-1])
    assert single["latest"] == values.to_pylist()[1]
    state.drop_table("t")
    assert fold(reducer_of(state, ["k"], aggregates), rows)[0] == single


def test_a_null_group_stays_null_until_there_is_a_value(state: StateClient) -> None:
    reducer = reducer_of(state, ["k"], {"s": Sum("v"), "lo": Min("v"), "l": Last("v", by="n"), "c": Count("v")})
    schema = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("n", pa.int64())])
    nothing = pa.Table.from_pylist([{"k": 1, "v": None, "n": None}], schema=schema)
    assert fold(reducer, nothing, nothing) == [{"k": 1, "s": None, "lo": None, "l": None, "l_by": None, "c": 0}]
    some = pa.Table.from_pylist([{"k": 1, "v": 4, "n": 2}], schema=schema)
    assert fold(reducer, some, nothing) == [{"k": 1, "s": 4, "lo": 4, "l": 4, "l_by": 2, "c": 1}]


def test_of_equal_orders_the_later_arrived_is_last(state: StateClient) -> None:
    reducer = reducer_of(state, ["k"], {"l": Last("v", by="n")})
    rows = pa.table({"k": [1, 1, 1], "v": ["a", "b", "c"], "n": [5, 5, 4]})
    assert fold(reducer, rows)[0]["l"] == "b"
    assert fold(reducer, pa.table({"k": [1], "v": ["d"], "n": [5]}))[0]["l"] == "d"
    assert fold(reducer, pa.table({"k": [1], "v": ["e"], "n": [4]}))[0]["l"] == "d"


@pytest.mark.parametrize("batches", [[[2**62, 2**62]], [[2**62], [2**62]], [[-(2**63)], [-1]]])
def test_an_integer_sum_that_does_not_fit_is_an_error(state: StateClient, batches: list[list[int]]) -> None:
    reducer = reducer_of(state, ["k"], {"s": Sum("v")})
    with pytest.raises(BadInput, match="'s' does not fit into int64"):
        fold(reducer, *[pa.table({"k": [1] * len(values), "v": values}) for values in batches])


def test_large_integers_of_opposite_sign_add_up(state: StateClient) -> None:
    reducer = reducer_of(state, ["k"], {"s": Sum("v")})
    assert fold(reducer, pa.table({"k": [1] * 3, "v": [2**62, 2**62, -(2**62)]})) == [{"k": 1, "s": 2**62}]


def test_decimal_sums_are_exact_up_to_38_digits_and_an_error_beyond(state: StateClient) -> None:
    reducer = reducer_of(state, ["k"], {"s": Sum("v")})
    kind = pa.decimal128(38, 2)
    half = pa.table({"k": [1, 1], "v": pa.array([Decimal(4 * 10**35), Decimal("0.01")], kind)})
    assert fold(reducer, half, half)[0]["s"] == Decimal("8" + "0" * 35 + ".02")
    with pytest.raises(BadInput, match="does not fit into decimal128"):
        fold(reducer, half)
    with pytest.raises(BadInput, match="does not fit into decimal128"):
        fold(reducer, pa.table({"k": [2] * 3, "v": pa.array([Decimal(5 * 10**35)] * 3, kind)}))


def test_float_keys_that_the_table_holds_equal_are_one_group(state: StateClient) -> None:
    keys = [0.0, -0.0, float("nan"), -float("nan"), 1.0]
    got = fold(reducer_of(state, ["k"], {"n": Count()}), pa.table({"k": keys}), pa.table({"k": keys[1:]}))
    assert [row["n"] for row in got] == [3, 2, 4]


def test_nothing_is_written_for_no_rows_and_a_failed_reduce_leaves_no_trace(state: StateClient) -> None:
    reducer = reducer_of(state, ["k"], {"n": Count()})
    assert reducer.reduce(pa.table({"k": pa.array([], pa.string())})) is None
    with pytest.raises(NullKey, match=r"'k' of Declared is null in row 1 of 2; .*not_null = \['k'\]"):
        reducer.reduce(pa.table({"k": ["a", None]}))
    assert fold(reducer, pa.table({"k": ["a"]})) == [{"k": "a", "n": 1}]


@pytest.mark.parametrize(("keys_min", "memory"), [(1, 1 << 20), (8, 1 << 20), (1, 20_000), (1_000, 1 << 20)])
def test_state_in_memory_is_exact_whatever_was_committed_aborted_and_forgotten(
    state: StateClient, monkeypatch: pytest.MonkeyPatch, keys_min: int, memory: int
) -> None:
    monkeypatch.setattr(aggregate_reducer, "HELD_KEYS_MIN", keys_min)
    monkeypatch.setattr(aggregate_reducer, "SMALL_BATCHES_MAX", 3)
    generator = np.random.default_rng(11)
    reducer = reducer_of(state, ["user", "cluster"], {"count": Count(), "arrived": Last("n")})
    type(reducer).state_memory = memory
    expected: dict[tuple[str, str], list[int]] = {}
    for step in range(120):
        users = generator.integers(0, 60, int(generator.choice([1, 8, 200])))
        rows = pa.table({"user": [f"u{code % 20}" for code in users], "cluster": [f"c{code // 20}" for code in users]})
        rows = rows.append_column("n", pa.array(np.arange(step * 1000, step * 1000 + len(users))))
        if generator.random() < 0.1:
            reducer.forget()
        tx = reducer.reduce(rows)
        assert tx is not None
        if generator.random() < 0.2:
            tx.abort()
            continue
        tx.commit()
        for row in rows.to_pylist():
            before = expected.get((row["user"], row["cluster"]), [0, 0])
            expected[row["user"], row["cluster"]] = [before[0] + 1, row["n"]]
    found = state.scan("t").read_all().to_pylist()
    assert {(row["user"], row["cluster"]): [row["count"], row["arrived"]] for row in found} == expected


def test_state_is_not_looked_up_again_until_a_commit_is_not_acknowledged(
    state: StateClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregate_reducer, "HELD_KEYS_MIN", 1)
    reducer = reducer_of(state, ["user"], {"count": Count()})
    rows = pa.table({"user": ["a", "b"]})
    fold(reducer, rows)
    others = rows.append_column("count", pa.array([10, 10]))
    write(state, others)
    assert [row["count"] for row in fold(reducer, rows)] == [2, 2]
    write(state, others)
    tx = reducer.reduce(rows)
    assert tx is not None
    tx.abort()
    assert [row["count"] for row in fold(reducer, rows)] == [11, 11]
    write(state, others)
    reducer.forget()
    assert [row["count"] for row in fold(reducer, rows)] == [11, 11]


def test_state_of_many_keys_grows_in_memory_with_nulls_and_every_fixed_type(state: StateClient) -> None:
    """Batches of thousands of keys: the table is logged, and the reducer keeps its rows."""
    generator = np.random.default_rng(3)
    kinds = {"a": pa.float64(), "b": pa.int64(), "c": pa.timestamp("us"), "d": pa.decimal128(22, 2)}
    aggregates = {"n": Count(), "a": Sum("a"), "b": Max("b"), "c": Min("c"), "d": Sum("d")}
    reducer = reducer_of(state, ["k"], aggregates)
    expected: dict[int, list[Any]] = {}
    for _ in range(6):
        keys = generator.integers(0, 9_000, 6_000)
        numbers = generator.integers(1, 100, len(keys))
        column = pa.array(numbers, mask=generator.random(len(keys)) < 0.3)
        rows = pa.table({"k": keys, **{name: column.cast(kind) for name, kind in kinds.items()}})
        tx = reducer.reduce(rows)
        assert tx is not None
        tx.commit()
        for key, value in zip(keys.tolist(), column.to_pylist(), strict=True):
            entry = expected.setdefault(key, [0, None, None])
            entry[0] += 1
            if value is not None:
                entry[1] = (entry[1] or 0) + value
                entry[2] = max(entry[2] or 0, value)
    found = state.scan("t").read_all().select(["k", "n", "a", "b", "d"]).to_pylist()
    shown = {row["k"]: [row["n"], row["a"], row["b"]] for row in found}
    assert shown == expected
    assert all(row["d"] == row["a"] for row in found)


def write(state: StateClient, rows: pa.Table) -> None:
    with state.transaction() as tx:
        tx.write("t", rows)
        tx.commit()


def test_rows_without_a_needed_column_or_with_text_to_sum_are_refused(state: StateClient) -> None:
    with pytest.raises(SchemaMismatch, match="'time'; did you mean 'timestamp'"):
        reducer_of(state, ["k"], {"m": Max("time")}).reduce(pa.table({"k": [1], "timestamp": [1]}))
    with pytest.raises(SchemaMismatch, match="cannot sum column 'v': it is string"):
        reducer_of(state, ["k"], {"s": Sum("v")}).reduce(pa.table({"k": [1], "v": ["x"]}))
    with pytest.raises(SpecError, match="two columns 'l_by'"):
        reducer_of(state, ["k"], {"l": Last("v", by="v"), "l_by": Max("v")}).reduce(pa.table({"k": [1], "v": [1]}))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"table": "t", "aggregates": {"n": Count()}}, "key columns"),
        ({"key": ["k"], "aggregates": {"n": Count()}}, "name of its table"),
        ({"key": ["k"], "table": "t"}, "needs aggregates"),
        ({"key": ["k"], "table": "t", "aggregates": {"n": Count}}, "no aggregate; write it with parentheses"),
    ],
)
def test_aggregate_reducer_refuses_a_wrong_declaration(
    state: StateClient, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        type("Bad", (AggregateReducer,), attributes)({}, SPEC, state)


# Configuration --------------------------------------------------------------------------------------------------------


class Configured:
    config_schema: ClassVar[dict[str, Any]] = {
        "cluster": str,
        "limit": (int, 100),
        "ratio": (float, 0.5),
        "debug": (bool, False),
        "zone": (str, None),
    }


def test_config_gets_its_defaults_and_keeps_what_is_right() -> None:
    given = {"cluster": "x", "ratio": 2, "debug": True, "zone": None}
    checked = check_config(Configured, given)
    assert checked == {"cluster": "x", "limit": 100, "ratio": 2.0, "debug": True, "zone": None}
    assert check_config(Configured, checked) == checked
    assert check_config(object, {"anything": 1}) == {"anything": 1}
    assert check_config(object, None) == {}


def test_config_mistakes_are_all_named_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        check_config(Configured, {"clutser": "x", "limit": True, "ratio": "high", "height": 1})
    assert caught.value.problems == [
        "'cluster' is missing: it must be a text",
        "'limit' must be a whole number, not True",
        "'ratio' must be a number, not 'high'",
        "unknown key 'clutser'; did you mean 'cluster'?",
        "unknown key 'height'; there are: cluster, debug, limit, ratio, zone",
    ]


# The package ----------------------------------------------------------------------------------------------------------


def test_the_user_api_is_there_and_importing_it_stays_light() -> None:
    for name in shuffle.__all__:
        assert getattr(shuffle, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Maper'"):
        _ = shuffle.Maper
    heavy = ["grpc", "rocksdict", "pyspark", "polars", "pandas", "pyarrow.flight"]
    code = f"import json, sys, shuffle; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []
