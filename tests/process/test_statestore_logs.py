"""The logs of tables in a real daemon: killed at any moment, compacted and moved meanwhile, damaged, read by others."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from shuffle.errors import CorruptData, ShuffleError
from shuffle.statestore import StateClient
from tests.daemons import StoreProcess, run_store, wait_until

KEY = pa.schema([pa.field("k", pa.string(), nullable=False)])
VALUE = pa.schema([("round", pa.int64()), ("check", pa.int64())])
KEYS = 20_000
ROWS = 6_000
LOGS = "shuffle.statestore.engine.table_logs."
KEEPER = "shuffle.statestore.local.log_keeper."
COMPACTING = {LOGS + "COMPACTED_ROWS_MIN": 10_000, LOGS + "COMPACTED_GROWTH": 1, KEEPER + "_CHECK_S": 0.01}
"""Compacts without a pause."""
MOVING = {LOGS + "COMPACTED_ROWS_MIN": 1 << 40, KEEPER + "LOGS_BYTES_MAX": 1, KEEPER + "_CHECK_S": 0.01}
"""Moves every log to RocksDB without a pause."""


def rows_of(number: int) -> pa.Table:
    """What round ``number`` writes: keys that earlier and later rounds write, too."""
    picked = np.random.default_rng(number).choice(KEYS, ROWS, replace=False)
    return pa.table(
        {
            "k": [f"key-{key:06d}" for key in picked.tolist()],
            "round": pa.array(np.full(ROWS, number)),
            "check": pa.array(picked * 1_000 + number),
        }
    )


def expected(rounds: int) -> dict[str, int]:
    newest: dict[str, int] = {}
    for number in range(rounds):
        table = rows_of(number)
        newest.update(zip(table["k"].to_pylist(), table["check"].to_pylist(), strict=True))
    return newest


class Writer(threading.Thread):
    """Commits one round after the other until the store is gone; the last one that it sent may have happened."""

    def __init__(self, address: str, first: int) -> None:
        super().__init__(daemon=True)
        self._address = address
        self.acknowledged = first

    def run(self) -> None:
        try:
            with StateClient.connect(self._address) as client:
                while True:
                    with client.transaction() as tx:
                        tx.write("t", rows_of(self.acknowledged))
                        tx.write("rounds", pa.table({"id": [0], "round": [self.acknowledged]}))
                        tx.commit()
                    self.acknowledged += 1
        except ShuffleError:
            pass


def found_in(client: StateClient) -> tuple[int, dict[str, int]]:
    """The number of rounds that one snapshot shows, and its rows, by a scan and by a lookup."""
    with client.snapshot() as snapshot:
        rounds = [row["round"] + 1 for row in snapshot.scan("rounds").read_all().to_pylist()]
        scanned = snapshot.scan("t").read_all()
        keys = pa.table({"k": [f"key-{key:06d}" for key in range(KEYS)]})
        looked_up = snapshot.lookup("t", keys)
        assert looked_up.to_pylist() == scanned.to_pylist(), "keys of one length: both are in the order of the keys"
    return (rounds or [0])[0], dict(zip(scanned["k"].to_pylist(), scanned["check"].to_pylist(), strict=True))


def create(client: StateClient) -> None:
    client.create_table("t", key=KEY, value=VALUE)
    rounds_key = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    client.create_table("rounds", key=rounds_key, value=pa.schema([("round", pa.int64())]))


@pytest.mark.parametrize("changed", [{}, COMPACTING, MOVING], ids=["growing", "compacting", "moving"])
def test_store_killed_while_logs_change_has_all_that_was_acknowledged(
    tmp_path: Path, changed: dict[str, float]
) -> None:
    rng = random.Random(5)
    acknowledged = 0
    for life in range(4):
        with StoreProcess(tmp_path / "state", changed=changed) as store, StateClient.connect(store.address) as client:
            if not life:
                create(client)
            rounds, rows = found_in(client)
            assert acknowledged <= rounds <= acknowledged + 1
            assert rows == expected(rounds)
            writer = Writer(store.address, rounds)
            writer.start()
            aim = rounds + rng.randint(2, 12)
            wait_until(lambda writer=writer, aim=aim: writer.acknowledged >= aim)
            store.kill()
            writer.join(20)
            acknowledged = writer.acknowledged
    with StateClient.open(str(tmp_path / "state")) as client:
        rounds, rows = found_in(client)
        assert acknowledged <= rounds <= acknowledged + 1
        assert rows == expected(rounds)


def test_snapshots_show_one_round_while_logs_are_compacted_and_moved(tmp_path: Path) -> None:
    changed = {**COMPACTING, KEEPER + "LOGS_BYTES_MAX": 3_000_000}
    with StoreProcess(tmp_path / "state", changed=changed) as store, StateClient.connect(store.address) as client:
        create(client)
        writer = Writer(store.address, 0)
        writer.start()
        seen = set()
        while writer.acknowledged < 25 or len(seen) <= 3:
            assert writer.is_alive()
            rounds, rows = found_in(client)
            assert rows == expected(rounds)
            seen.add(rounds)


def test_damaged_changelog_stops_the_store_and_names_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with StateClient.open(str(folder)) as client:
        create(client)
        with client.transaction() as tx:
            tx.write("t", rows_of(0))
            tx.commit()
    [segment] = (folder / "segments").glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    ran = run_store(folder)
    assert ran.returncode != 0
    assert segment.name in ran.stderr
    assert "Traceback" not in ran.stderr
    with pytest.raises(CorruptData, match=segment.name):
        StateClient.open(str(folder))
    assert segment.read_bytes() == bytes(data)


def test_dropped_table_leaves_no_changelog_behind(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with StateClient.open(str(folder)) as client:
        create(client)
        with client.transaction() as tx:
            tx.write("t", rows_of(0))
            tx.commit()
        assert client.stats()["tables"]["t"]["changelog_bytes"] > 0
        client.drop_table("t")
        wait_until(lambda: not list((folder / "segments").glob("*.seg")))
        create_again = pa.schema([pa.field("k", pa.string(), nullable=False)])
        client.create_table("t", key=create_again, value=VALUE)
        assert client.scan("t").read_all().num_rows == 0
    with StateClient.open(str(folder)) as client:
        assert client.scan("t").read_all().num_rows == 0


def test_rows_deleted_from_a_log_stay_deleted_when_it_is_moved_and_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    gone = rows_of(0).slice(0, 5_000).select(["k"])
    for changed in ({}, MOVING, COMPACTING):
        with StoreProcess(folder, changed=changed) as store, StateClient.connect(store.address) as client:
            if not client.tables():
                create(client)
            with client.transaction() as tx:
                tx.write("t", rows_of(0))
                tx.commit()
            with client.transaction() as tx:
                tx.delete("t", gone)
                tx.commit()
            assert client.scan("t").read_all().num_rows == ROWS - 5_000
            if changed is MOVING:
                wait_until(lambda client=client: not client.stats()["tables"]["t"]["changelog_bytes"])
            assert client.scan("t").read_all().num_rows == ROWS - 5_000
            assert client.lookup("t", gone).num_rows == 0
            store.kill()
    with StateClient.open(str(folder)) as client:
        assert client.scan("t").read_all().num_rows == ROWS - 5_000
