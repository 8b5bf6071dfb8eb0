"""The log generator gives the same rows whatever the batches, and the oracle and the comparison can be trusted."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from shuffle.examples.workload import (
    RESULT_SCHEMA,
    SCHEMA,
    Workload,
    batches,
    difference,
    generate,
    oracle,
    partition_rows,
)


@pytest.mark.parametrize("batch_rows", [1, 7, 64, 999, 1000, 5000])
def test_rows_are_the_same_whatever_the_batch_size(batch_rows: int) -> None:
    rows = 200 if batch_rows == 1 else 1000
    whole = generate(rows, seed=3, partition=2).combine_chunks()
    pieces = pa.concat_tables(list(batches(rows, batch_rows, seed=3, partition=2))).combine_chunks()
    assert pieces.equals(whole)


def test_rows_at_a_position_do_not_need_the_rows_before_them() -> None:
    whole = generate(100_000, seed=5).combine_chunks()
    assert Workload(seed=5).rows(70_000, 70_100).equals(whole.slice(70_000, 100).combine_chunks())


def test_rows_are_the_same_in_another_process_with_another_hash_seed() -> None:
    program = "from shuffle.examples.workload import generate; "
    program += "print(hash(generate(1000, seed=9)['message'][999].as_py()) and 0); "
    program += "import hashlib; print(hashlib.sha256(repr(generate(1000, seed=9).to_pylist()).encode()).hexdigest())"
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(answers) == 1


@pytest.mark.parametrize("change", [{"seed": 2}, {"partition": 1}, {"users": 10}, {"skew": "uniform"}])
def test_another_seed_partition_or_shape_gives_other_rows(change: dict[str, object]) -> None:
    assert not generate(1000, **change).equals(generate(1000))


def test_thesis_skew_has_few_lines_with_a_user_and_root_far_ahead() -> None:
    table = generate(200_000)
    share = 1 - table["user"].null_count / table.num_rows
    assert 0.1 <= share <= 0.2
    counts = pc.value_counts(table["user"].drop_null())
    by_user = dict(zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True))
    assert by_user["root"] / sum(by_user.values()) == pytest.approx(0.45, abs=0.02)
    assert by_user["root"] > 50 * by_user["user00006"]
    assert len(by_user) > 1500


def test_uniform_skew_gives_every_user_about_the_same() -> None:
    counts = pc.value_counts(generate(100_000, skew="uniform", users=50, with_user_share=1.0)["user"])
    numbers = np.array(counts.field("counts").to_pylist())
    assert len(numbers) == 50
    assert numbers.min() > 0.85 * 2000
    assert numbers.max() < 1.15 * 2000


def test_all_rows_have_a_user_when_asked_for() -> None:
    assert generate(50_000, with_user_share=1.0)["user"].null_count == 0
    assert generate(50_000, with_user_share=0.0)["user"].null_count == 50_000


def test_a_row_has_about_115_bytes_and_times_rise() -> None:
    table = generate(50_000, with_user_share=1.0)
    assert table.schema.equals(SCHEMA)
    assert 110 <= table.nbytes / table.num_rows <= 120
    times = table["timestamp"].cast(pa.int64()).to_numpy()
    assert (np.diff(times) > -250).all()
    assert times[-1] - times[0] == pytest.approx(50_000 * 250, abs=500)


def test_no_rows_is_an_empty_table_with_the_schema() -> None:
    assert generate(0).schema.equals(SCHEMA)
    assert list(batches(0)) == []
    assert oracle([generate(0)]).equals(RESULT_SCHEMA.empty_table())
    assert oracle([]).schema.equals(RESULT_SCHEMA)


@pytest.mark.parametrize(
    "shape",
    [{"users": 0}, {"users": 1 << 20}, {"clusters": 0}, {"skew": "zipf"}, {"with_user_share": 1.5}],
)
def test_impossible_shapes_are_refused(shape: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(shape))):
        generate(10, **shape)


def test_partition_rows_is_even_and_complete() -> None:
    assert partition_rows(10, 4) == [3, 3, 2, 2]
    assert partition_rows(2, 4) == [1, 1, 0, 0]


def test_oracle_agrees_with_a_loop_over_the_rows() -> None:
    tables = [generate(3000, partition=partition, users=20) for partition in range(3)]
    counts: dict[tuple[str, str], int] = {}
    latest: dict[tuple[str, str], object] = {}
    for table in tables:
        for row in table.to_pylist():
            if row["user"] is None:
                continue
            key = (row["user"], row["cluster"])
            counts[key] = counts.get(key, 0) + 1
            latest[key] = max(latest.get(key, row["timestamp"]), row["timestamp"])
    found = oracle(tables).to_pylist()
    assert {(row["user"], row["cluster"]): row["count"] for row in found} == counts
    assert {(row["user"], row["cluster"]): row["last_access"] for row in found} == latest


def test_oracle_does_not_depend_on_how_the_rows_are_cut() -> None:
    whole = generate(5000)
    assert oracle([whole]).equals(oracle(batches(5000, 321)))


def _changed(table: pa.Table, row: int, count: int) -> pa.Table:
    counts = table["count"].to_pylist()
    counts[row] += count
    return table.set_column(3, "count", pa.array(counts, pa.int64()))


def test_difference_of_equal_tables_in_another_order_is_nothing() -> None:
    expected = oracle([generate(5000)])
    found = difference(expected, expected.sort_by([("count", "descending")]))
    assert found.exact
    assert str(found) == f"exactly-once: OK rows={pc.sum(expected['count']).as_py()} lost=0 duplicated=0"


def test_difference_counts_lost_and_duplicated_apart_so_that_they_cannot_cancel() -> None:
    expected = oracle([generate(5000)])
    found = difference(expected, _changed(_changed(expected, 0, 3), 1, -1))
    assert (found.lost, found.duplicated) == (1, 3)
    assert not found.exact
    assert "FAILED" in str(found)


def test_difference_sees_missing_and_unexpected_keys_and_wrong_times() -> None:
    expected = oracle([generate(5000, users=3)])
    first = expected["count"][0].as_py()
    assert difference(expected, expected.slice(1)).lost == first
    assert difference(expected.slice(1), expected).duplicated == first
    shifted = expected.set_column(2, "last_access", pc.add(expected["last_access"], pa.scalar(1, pa.duration("us"))))
    found = difference(expected, shifted)
    assert found.wrong_last_access == expected.num_rows
    assert not found.exact
