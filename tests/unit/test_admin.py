"""``shuffle state …`` against a real store in a folder."""

from __future__ import annotations

import argparse
import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.errors import BadInput, StoreUnavailable, UnknownTable
from shuffle.statestore import StateClient
from shuffle.statestore.admin import commands
from shuffle.statestore.admin.text import TextRows, json_rows, parse_bound


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("admin") / "state"
    with StateClient.open(folder) as client:
        client.create_table(
            "accounts",
            key=pa.schema([("owner", pa.string()), ("n", pa.int32())]),
            value=pa.schema([("balance", pa.decimal128(12, 2)), ("note", pa.string())]),
            constraints={"solvent": "balance >= 0"},
        )
        client.create_queue("logs", schema=pa.schema([("line", pa.string())]), partitions=2)
        rows = {
            "owner": ["ann", "bob", "bob, jr", "cé"],
            "n": pa.array([1, 2, 3, -4], pa.int32()),
            "balance": pa.array([Decimal("1.50"), None, Decimal(0), Decimal(5)], pa.decimal128(12, 2)),
            "note": ["[bold]", "\x1b[31m", None, "x" * 100],
        }
        with client.transaction() as tx:
            tx.write("accounts", pa.table(rows))
            tx.append("logs", 1, pa.table({"line": ["a", "b"]}))
            tx.commit()
    return str(folder)


def state(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    parser = argparse.ArgumentParser()
    commands.add_parsers(parser)
    assert commands.run(parser.parse_args(arguments)) == 0
    return capsys.readouterr().out


def owners(capsys: pytest.CaptureFixture[str], store: str, *arguments: str) -> list[str]:
    lines = state(capsys, "scan", store, "accounts", "--json", *arguments).splitlines()
    return [json.loads(line)["owner"] for line in lines]


def test_ls_and_describe(capsys: pytest.CaptureFixture[str], store: str) -> None:
    shown = state(capsys, "ls", store)
    assert "accounts" in shown
    assert "owner string, n int32" in shown
    assert "logs" in shown
    listed = json.loads(state(capsys, "ls", store, "--json"))
    assert [table["name"] for table in listed["tables"]] == ["accounts"]
    assert "balance >= 0" in state(capsys, "describe", store, "accounts")
    assert json.loads(state(capsys, "describe", store, "logs", "--json"))["bounds"] == [[0, 0], [0, 2]]


def test_queues_leases_and_stats(capsys: pytest.CaptureFixture[str], store: str) -> None:
    assert json.loads(state(capsys, "queues", store, "--json"))["logs"][1] == {"begin": 0, "end": 2, "rows": 2}
    assert "partition" in state(capsys, "queues", store, "logs")
    assert "no members" in state(capsys, "leases", store)
    assert {"tables", "queues", "total"} <= set(json.loads(state(capsys, "stats", store, "--json")))
    assert "compaction bytes" in state(capsys, "stats", store)


def test_scan_is_aligned_printable_and_cut(capsys: pytest.CaptureFixture[str], store: str) -> None:
    header, rule, *lines = state(capsys, "scan", store, "accounts").splitlines()
    assert header.split() == ["owner*", "n*", "balance", "note"]
    assert len(lines) == 4
    assert "\x1b" not in "".join(lines)
    assert lines[0].endswith("[bold]")
    assert lines[3].endswith("…")
    assert max(map(len, lines)) <= len(rule)


def test_scan_bounds(capsys: pytest.CaptureFixture[str], store: str) -> None:
    assert owners(capsys, store) == ["ann", "bob", "bob, jr", "cé"]
    assert owners(capsys, store, "--reverse", "--limit", "2") == ["cé", "bob, jr"]
    assert owners(capsys, store, "--prefix", "bo") == ["bob", "bob, jr"]
    assert owners(capsys, store, "--prefix", "bob,2") == ["bob"]
    assert owners(capsys, store, "--begin", '"bob, jr",3', "--end", '["cé", -4]') == ["bob, jr"]
    assert owners(capsys, store, "--begin", "zzz") == []


def test_store_that_is_not_there_is_not_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="no state store"):
        state(capsys, "ls", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], store: str) -> None:
    with pytest.raises(UnknownTable, match="'nope'"):
        state(capsys, "describe", store, "nope")
    with pytest.raises(UnknownTable, match="'nope'"):
        state(capsys, "queues", store, "nope")
    with pytest.raises(BadInput, match="'n': 'x' is not a value of int32"):
        state(capsys, "scan", store, "accounts", "--begin", "ann,x")
    with pytest.raises(BadInput, match="either --prefix"):
        state(capsys, "scan", store, "accounts", "--begin", "ann", "--prefix", "a")


def test_widths_of_the_first_batch_stay_and_nothing_of_a_number_is_lost() -> None:
    schema = pa.schema([("k", pa.int64()), ("s", pa.string())])
    rows = TextRows(schema, ["k"])
    assert rows.text(pa.record_batch({"k": [1], "s": ["a"]})) == "k*  s\n--  -\n 1  a\n"
    assert rows.text(pa.record_batch({"k": [123456], "s": ["b"]})) == "123456  b\n"
    assert rows.text(pa.RecordBatch.from_pylist([], schema=schema)) == ""


def test_json_of_values_json_does_not_have() -> None:
    batch = pa.record_batch(
        {"f": [float("nan")], "raw": [b"\x00\xff"], "s": ["\x9b\x7f\x1b"], "at": pa.array([1], pa.timestamp("ns"))}
    )
    text = json_rows(batch)
    assert text.isascii()
    assert json.loads(text) == {
        "f": "nan",
        "raw": "00ff",
        "s": "\x9b\x7f\x1b",
        "at": "1970-01-01 00:00:00.000000001",
    }


def test_bound_of_every_kind_of_key() -> None:
    key = pa.schema([("raw", pa.binary()), ("day", pa.date32()), ("ok", pa.bool_()), ("price", pa.decimal128(5, 2))])
    for text in ("0x00ff,2020-01-02,true,1.50", '["0x00ff", "2020-01-02", true, 1.5]'):
        raw, *others = parse_bound(text, key, "t")
        assert raw == b"\x00\xff"
        assert [str(value.as_py()) for value in others] == ["2020-01-02", "True", "1.50"]
    with pytest.raises(BadInput, match="5 key values"):
        parse_bound("a,b,c,d,e", key, "t")
    with pytest.raises(BadInput, match="JSON"):
        parse_bound("[1", key, "t")
