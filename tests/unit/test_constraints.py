"""CHECK constraints: what they mean, and how mistakes in them are shown."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from shuffle.errors import BadInput, ConstraintViolated
from shuffle.statestore.codec.check_parser import EXPRESSION_CHARS_MAX
from shuffle.statestore.codec.constraints import Constraint

SCHEMA = pa.schema(
    [
        ("small", pa.int8()),
        ("n", pa.int64()),
        ("big", pa.uint64()),
        ("f", pa.float64()),
        ("s", pa.string()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("ns")),
        ("price", pa.decimal128(10, 2)),
        ("ok", pa.bool_()),
        ("nothing", pa.int64()),
        ("Weird name", pa.int64()),
    ]
)
ROW: dict[str, Any] = {
    "small": 100,
    "n": 5,
    "big": 2**64 - 1,
    "f": 1.5,
    "s": "héllo",
    "raw": b"ab",
    "day": datetime.date(2020, 1, 2),
    "at": datetime.datetime(2020, 1, 2),
    "price": Decimal("1.10"),
    "ok": True,
    "nothing": None,
    "Weird name": 3,
}


def passes(expression: str, **changed: Any) -> bool:
    rows = pa.RecordBatch.from_pylist([ROW | changed], schema=SCHEMA)
    try:
        Constraint("t", "c", expression, SCHEMA).check(rows)
    except ConstraintViolated:
        return False
    return True


@pytest.mark.parametrize(
    "expression",
    [
        *("n > 0", "n >= 5", "n <= 5", "n = 5", "n == 5", "n <> 4", "n != 4", "5 = n", "-n < 0", "n > -1"),
        *(
            "n + 1 = 6",
            "n - 1 = 4",
            "n * 2 = 10",
            "n / 2 = 2",
            "n % 3 = 2",
            "-n % 3 = -2",
            "1 + 2 * 3 = 7",
            "(1 + 2) * 3 = 9",
        ),
        *("7 - 2 - 1 = 4", "small + small = 200", "small * small = 10000", "n + 1.5 = 6.5", "f % 1 = 0.5", "1e2 = 100"),
        *("big > 5", "big > -1", "big > n", "big = 18446744073709551615", "big + 0 = big", "f < big"),
        *(
            "price = 1.1",
            "price * 2 = 2.2",
            "price + n > 6.0",
            "price < f",
            "price > 1",
            "price / 2 > 0",
            "price < big",
        ),
        *("s = 'héllo'", "s > 'a'", "length(s) = 5", "LENGTH(raw) = 2", "raw = 'ab'", "s <> 'it''s'"),
        *("day >= '2020-01-01'", "day = '2020-01-02'", "at > '2020-01-01 12:00:00'", "'2019-12-31' < day"),
        *("ok", "ok = TRUE", "not not ok", "NOT (n = 4)", "ok and n = 5", "n = 4 Or ok", "n = 4 AND n = 4 OR ok"),
        *("n IN (4, 5)", "n not in (1, 2)", "s in ('a', 'héllo')", "n BETWEEN 5 AND 5", "n NOT BETWEEN 6 AND 9"),
        *("n BETWEEN 1 AND 9 AND ok", "nothing IS NULL", "n IS NOT NULL", "NULL IS NULL", '"Weird name" = 3', "TRUE"),
    ],
)
def test_true(expression: str) -> None:
    assert passes(expression)
    assert not passes(f"NOT ({expression})")


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "nothing > 0",
            "nothing = nothing",
            "NOT nothing > 0",
            "nothing IN (1, 2)",
            "n IN (1, NULL)",
            "n NOT IN (1, NULL)",
        ),
        *(
            "nothing + n > 100",
            "n = NULL",
            "NULL",
            "nothing BETWEEN 1 AND 2",
            "ok AND nothing > 0",
            "n = 4 OR nothing > 0",
        ),
        *("n / 0 > 1", "n % 0 > 1", "f / 0 > 1", "price / 0 > 1", "-nothing > 0"),
    ],
)
def test_unknown_passes_and_so_does_its_contrary(expression: str) -> None:
    assert passes(expression)
    assert passes(f"NOT ({expression})")


def test_known_part_decides_beside_an_unknown_one() -> None:
    assert not passes("n = 4 AND nothing > 0")
    assert passes("n = 5 OR nothing > 0")
    assert not passes("n <> 0 AND 10 / n > 3")
    assert passes("n = 0 OR 10 / n > 3", n=0)


def test_overflow_breaks_the_constraint_at_its_row() -> None:
    rows = pa.record_batch({"n": [1] * 50 + [2**62, 1, 2**62]})
    with pytest.raises(ConstraintViolated, match="cannot be computed") as caught:
        Constraint("t", "c", "n * 4 > 0", rows.schema).check(rows)
    assert caught.value.row == 50


def test_first_offending_row_is_shown_with_its_values() -> None:
    rows = pa.record_batch({"balance": [5, None, -1, -2], "owner": ["a", "b", "c", "d"], "other": [0, 0, 0, 0]})
    with pytest.raises(ConstraintViolated, match="balance=-1, owner='c'") as caught:
        Constraint("accounts", "solvent", "balance >= 0 OR owner = 'bank'", rows.schema).check(rows)
    assert (caught.value.table, caught.value.constraint, caught.value.row) == ("accounts", "solvent", 2)
    assert "other" not in str(caught.value)


def test_row_with_a_moment_beyond_python_is_shown_too() -> None:
    rows = pa.record_batch({"at": pa.array([1], pa.timestamp("ns"))})
    with pytest.raises(ConstraintViolated, match=r"1970-01-01 00:00:00\.000000001"):
        Constraint("t", "c", "at > '2020-01-01 00:00:00'", rows.schema).check(rows)


def test_constant_and_empty_batches() -> None:
    rows = pa.record_batch({"n": pa.array([], pa.int64())})
    Constraint("t", "c", "n > 0", rows.schema).check(rows)
    Constraint("t", "c", "FALSE", rows.schema).check(rows)
    assert not passes("1 = 2")


@pytest.mark.parametrize(
    ("expression", "position", "words"),
    [
        ("n >", 4, "value is expected instead of 'the end'"),
        ("", 1, "value is expected"),
        ("n > 1 n", 7, "'n' is not expected"),
        ("zz > 1", 1, "no column 'zz'"),
        ("s > 1", 3, "string and int64"),
        ("n", 1, "int64, not true or false"),
        ("(n > 1", 7, r"'\)' is expected"),
        ("n ~ 1", 3, "'~' cannot be read"),
        ("s = 'abc", 5, "closing quote"),
        ("s + s = 'a'", 3, "cannot be used on string"),
        ("upper(s) = 'A'", 1, "no function 'upper'"),
        ("n AND ok", 3, "int64, which is not true or false"),
        ("NOT n", 1, "int64, which is not"),
        ("day > 'soon'", 7, "not a value of date32"),
        ("n IN ()", 7, "value is expected"),
        ("n NOT 5", 7, "IN or BETWEEN"),
        ("length(n) > 1", 1, "not int64"),
        ("n > 99999999999999999999999", 5, "out of range"),
        ("price % 2 = 0", 7, "decimals"),
        ("price > 1e99", 9, "not a value of decimal128"),
        ("(" * 100 + "ok" + ")" * 100, 31, "deep"),
        ("NOT " * 100 + "ok", 121, "deep"),
        ("-" * 100 + "n > 0", 31, "deep"),
        ("n" + " + n" * 500 + " > 0", 403, "operations inside"),
        (" " * (EXPRESSION_CHARS_MAX + 1), EXPRESSION_CHARS_MAX, "more than"),
        ("n IS 5", 6, "'NULL' is expected"),
    ],
)
def test_mistake_is_shown_at_its_place(expression: str, position: int, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        Constraint("t", "c", expression, SCHEMA)
    assert (caught.value.table, caught.value.constraint, caught.value.position) == ("t", "c", position)


def test_long_chain_of_conditions_is_no_deep_tree() -> None:
    assert passes(" OR ".join(["n = 1"] * 300 + ["ok"]))
    assert passes(" AND ".join(["n = 5"] * 300))


def test_unknown_column_is_named() -> None:
    with pytest.raises(BadInput) as caught:
        Constraint("t", "c", "ok AND zz > 1", SCHEMA)
    assert caught.value.column == "zz"
