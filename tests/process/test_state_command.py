"""``shuffle state …`` as an admin types it: against a daemon at work, and against a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from shuffle.statestore import StateClient
from tests.daemons import StoreProcess, environment


def state(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shuffle.cli", "state", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=False,
    )


def test_admin_looks_at_a_daemon_at_work(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with StoreProcess(folder) as daemon, StateClient.connect(daemon.address) as client:
        client.create_table("accounts", key=pa.schema([("n", pa.int64())]), value=pa.schema([("v", pa.string())]))
        client.create_queue("logs", schema=pa.schema([("x", pa.int64())]), partitions=1)
        with client.transaction() as tx:
            tx.write("accounts", pa.table({"n": range(100), "v": [f"v{n}" for n in range(100)]}))
            tx.append("logs", 0, pa.table({"x": [1, 2, 3]}))
            tx.commit()
        client.leases.register("workers", "w1", {"address": "grpc://h:1"}, ttl_ms=60_000)
        scanned = state("scan", daemon.address, "accounts", "--begin", "98", "--json")
        assert [json.loads(line) for line in scanned.stdout.splitlines()] == [
            {"n": 98, "v": "v98"},
            {"n": 99, "v": "v99"},
        ]
        # The folder leads to the daemon that serves it.
        assert json.loads(state("queues", str(folder), "--json").stdout)["logs"][0]["rows"] == 3
        assert "w1" in state("leases", daemon.address).stdout
        stats = json.loads(state("stats", daemon.address, "--json").stdout)
        assert stats["tables"]["accounts"]["rows_written"] == 100
    listed = state("ls", str(folder))
    assert listed.returncode == 0
    assert "accounts" in listed.stdout


def test_pandas_is_loaded_neither_by_the_daemon_nor_by_the_command(tmp_path: Path) -> None:
    """pyarrow would, with the first array that it makes: 50 MB and 0.3 s."""
    with StoreProcess(tmp_path / "state") as daemon, StateClient.connect(daemon.address) as client:
        client.create_table("accounts", key=pa.schema([("n", pa.int64())]), value=pa.schema([("v", pa.string())]))
        with client.transaction() as tx:
            tx.write("accounts", pa.table({"n": range(100), "v": [f"v{n}" for n in range(100)]}))
            tx.commit()
        assert "pandas" not in Path(f"/proc/{daemon.pid}/maps").read_text()
        command = [sys.executable, "-X", "importtime", "-m", "shuffle.cli", "state", "scan", daemon.address, "accounts"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), check=True)
    assert "pyarrow" in done.stderr
    assert "pandas.core" not in done.stderr


def test_mistake_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    with StateClient.open(tmp_path / "state"):
        pass
    for arguments in (("describe", str(tmp_path / "state"), "nope"), ("ls", str(tmp_path / "none"))):
        done = state(*arguments)
        assert done.returncode != 0
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert "Traceback" not in done.stderr
