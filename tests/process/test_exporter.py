"""``output: {parquet: …}`` as people use it: what reducers emit is in the folder exactly once, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from shuffle.errors import StoreLocked
from shuffle.statestore import StateClient
from shuffle.support import crash_points
from tests.process.test_output import JOB, SCHEMA, fill
from tests.process.test_run_processor import children_of, finished, running
from tests.waiting import WAIT_S, wait_until

ROWS = 24_000
"""In each of two partitions."""

SPEC = """\
processor: job
state: ./job.state
input: {queue: in}
mapper: {class: "echo_job:ByParity", trim_period: 100ms, batch_rows_max: 200}
reducer: {class: "echo_job:Echo", count: 2, batch_rows_max: 100, fetch_rows_max: 100}
output: {parquet: ./out, batch_rows_max: 300, batch_age: 50ms}
"""
POINTS = sorted(point for point in crash_points.POINTS if point.startswith("exporter."))


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "echo_job.py").write_text(JOB)
    path = tmp_path / "job.yaml"
    path.write_text(SPEC)
    return path


def files(spec: Path) -> list[Path]:
    return sorted((spec.parent / "out").glob("*.parquet"))


def exported(spec: Path) -> Counter[int]:
    return Counter(n for path in files(spec) for n in pq.read_table(path)["n"].to_pylist())


def check_order(spec: Path) -> None:
    """The files of a partition follow each other without a hole, and have the rows of one reducer."""
    for partition in range(2):
        ranges = [tuple(map(int, path.stem.split("-")[2:])) for path in files(spec) if f"job-{partition}-" in path.name]
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        for path in files(spec):
            if f"job-{partition}-" in path.name:
                assert {n % 2 for n in pq.read_table(path)["n"].to_pylist()} == {partition}


def test_rows_are_exported_exactly_once_while_everybody_is_killed(spec: Path) -> None:
    expected = fill(spec, ROWS)
    with running("run", str(spec), "--until-drained", "--no-check") as controller:
        for victim in ("exporter 0-1", "reducer 0", "statestore", "exporter 0-1"):
            seen = len(files(spec))
            wait_until(lambda seen=seen: len(files(spec)) > seen + 2)  # type: ignore[misc]
            wait_until(lambda victim=victim: victim in children_of(controller.pid))  # type: ignore[misc]
            os.kill(children_of(controller.pid)[victim], signal.SIGKILL)
        assert exported(spec).total() < expected.total(), "killed in the middle"
        assert controller.wait(3 * WAIT_S) == 0, spec.with_suffix(".out").read_text()
    assert exported(spec) == expected
    check_order(spec)
    with StateClient.open(spec.parent / "job.state") as client:
        assert all(begin == end for begin, end in client.queue("job/outbox").bounds()), "the outbox is trimmed"


def test_rows_reach_a_delta_table_exactly_once_while_everybody_is_killed(spec: Path) -> None:
    spec.write_text(SPEC.partition("output")[0] + "output: {delta: ./table, batch_rows_max: 500, batch_age: 50ms}\n")
    expected = fill(spec, ROWS)
    table = spec.parent / "table"

    def commits() -> int:
        return len(list((table / "_delta_log").glob("*.json")))

    with running("run", str(spec), "--until-drained", "--no-check") as controller:
        for victim in ("exporter 0-1", "reducer 0", "statestore", "exporter 0-1"):
            seen = commits()
            wait_until(lambda seen=seen: commits() > seen + 2)  # type: ignore[misc]
            wait_until(lambda victim=victim: victim in children_of(controller.pid))  # type: ignore[misc]
            os.kill(children_of(controller.pid)[victim], signal.SIGKILL)
        assert controller.wait(3 * WAIT_S) == 0, spec.with_suffix(".out").read_text()
    found = DeltaTable(str(table)).to_pyarrow_table()["n"].to_pylist()
    assert Counter(found) == expected
    assert DeltaTable(str(table)).transaction_version("job/0") == ROWS


def test_rows_reach_an_iceberg_table_exactly_once_while_everybody_is_killed(spec: Path) -> None:
    place = {"type": "sql", "uri": f"sqlite:///{spec.parent}/catalog.db", "warehouse": f"file://{spec.parent}/lake"}
    (spec.parent / "lake").mkdir()
    output = {"iceberg": "job.table", "catalog": place, "batch_rows_max": 2_000, "batch_age": "500ms"}
    spec.write_text(SPEC.partition("output")[0] + f"output: {json.dumps(output)}\n")
    expected = fill(spec, ROWS)

    def commits() -> int:
        return len(list((spec.parent / "lake").rglob("*.metadata.json")))

    with running("run", str(spec), "--until-drained", "--no-check") as controller:
        for victim in ("exporter 0-1", "reducer 0", "statestore", "exporter 0-1"):
            seen = commits()
            wait_until(lambda seen=seen: commits() > seen + 1)  # type: ignore[misc]
            wait_until(lambda victim=victim: victim in children_of(controller.pid))  # type: ignore[misc]
            os.kill(children_of(controller.pid)[victim], signal.SIGKILL)
        assert controller.wait(3 * WAIT_S) == 0, spec.with_suffix(".out").read_text()
    code = f"""
import json
from pyiceberg.catalog import load_catalog
print(json.dumps(load_catalog("default", **{place}).load_table("job.table").scan().to_arrow()["n"].to_pylist()))
"""
    read = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert Counter(json.loads(read.stdout)) == expected


@pytest.mark.parametrize("point", POINTS)
def test_exporter_that_dies_at_any_point_loses_and_doubles_nothing(spec: Path, point: str) -> None:
    outbox(spec, 1_000)
    command = [sys.executable, "-m", "shuffle.reducer.exporter", str(spec), "--index", "0"]
    for nth in (1,) if point in ("exporter.after_claim", "exporter.after_open") else (1, 2):
        environment = {**os.environ, crash_points.ENVIRONMENT: f"{point}:{nth}"}
        died = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
        _, said = died.communicate(timeout=WAIT_S)
        assert died.returncode == -signal.SIGKILL, said.decode()
    ended = subprocess.Popen(command, stderr=subprocess.PIPE)
    wait_until(lambda: exported(spec).total() >= 1_000 and is_listed(spec))
    ended.terminate()
    _, said = ended.communicate(timeout=WAIT_S)
    assert ended.returncode == 0, said.decode()
    assert exported(spec) == Counter(range(1_000))


def is_listed(spec: Path) -> bool:
    """Whether an exporter runs, and handles signals."""
    try:
        with StateClient.open(spec.parent / "job.state") as client:
            return bool(client.leases.members("job/exporters"))
    except StoreLocked:
        return True  # It has the folder open by itself.


def outbox(spec: Path, rows: int) -> None:
    """An outbox as reducers would have filled it."""
    with StateClient.open(spec.parent / "job.state") as client:
        client.create_queue("in", schema=SCHEMA, partitions=2)
        client.create_queue("job/outbox", schema=SCHEMA, partitions=2)
        client.queue("job/outbox").append(0, pa.table([list(range(rows))], schema=SCHEMA))


def test_status_and_screen_show_what_waits_and_a_clean_stop_leaves_nothing(spec: Path) -> None:
    spec.write_text(
        SPEC.replace("batch_age: 50ms", "batch_age: 1h").replace("batch_rows_max: 300", "batch_rows_max: 5000")
    )
    expected = fill(spec, 500)
    with running("run", str(spec), "--no-check") as controller:
        wait_until(lambda: waiting(spec) == expected.total())
        assert files(spec) == [], "a batch may wait for an hour"
        shown = finished("top", str(spec), "--count", "1").stdout
        assert "outbox 1,000 rows" in shown, shown
        status = finished("status", str(spec)).stdout
        assert "exporter 1" in status, status
        os.kill(controller.pid, signal.SIGTERM)
        assert controller.wait(2 * WAIT_S) == 0
    assert exported(spec) == expected, "a clean stop publishes what was committed"


def waiting(spec: Path) -> int | None:
    ended = finished("status", str(spec), "--json")
    if ended.returncode:
        return None
    return sum(exporter["waiting_rows"] for exporter in json.loads(ended.stdout)["exporters"])


def test_exporter_of_a_processor_without_such_an_output_is_refused(spec: Path) -> None:
    spec.write_text(
        SPEC.replace("output: {parquet: ./out, batch_rows_max: 300, batch_age: 50ms}", "output: {queue: q}")
    )
    ended = finished("exporter", str(spec))
    assert ended.returncode == 2
    assert "there is nothing to export" in ended.stderr
    assert finished("exporter", str(spec), "--index", "x").returncode == 2


def test_folder_with_files_of_an_earlier_state_ends_the_run_with_what_to_do(spec: Path) -> None:
    fill(spec, 10)
    (spec.parent / "out").mkdir()
    (spec.parent / "out" / "job-0-000000000000-000000000300.parquet").write_bytes(b"")
    ended = finished("run", str(spec), "--until-drained", "--no-check")
    assert ended.returncode == 1, ended.stderr
    assert "has files of an earlier processor of this name" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_position_can_be_set_by_hand_and_only_within_the_outbox(spec: Path) -> None:
    outbox(spec, 100)
    command = ("exporter", str(spec), "--index", "0")
    with running(*command) as exporter:
        wait_until(lambda: exported(spec).total() == 100)
        os.kill(exporter.pid, signal.SIGTERM)
        assert exporter.wait(WAIT_S) == 0
    with StateClient.open(spec.parent / "job.state") as client:
        client.queue("job/outbox").append(0, pa.table([[7, 8, 9]], schema=SCHEMA))
    refused = finished(*command, "--position", "104")
    assert refused.returncode == 2
    assert "has the rows from 100 up to 103" in refused.stderr
    done = finished(*command, "--position", "102")
    assert done.returncode == 0, done.stderr
    assert "exporter 0 goes on at 102, it was at 100" in done.stdout
    with running(*command) as exporter:
        wait_until(lambda: exported(spec).total() == 101)
        os.kill(exporter.pid, signal.SIGTERM)
        assert exporter.wait(WAIT_S) == 0
    assert exported(spec) == Counter([*range(100), 9])


def test_emitted_rows_get_other_columns_once_the_outbox_and_its_exports_are_dropped(spec: Path) -> None:
    expected = fill(spec, 200)
    run = ("run", str(spec), "--until-drained", "--no-check")
    assert finished(*run).returncode == 0
    job = spec.parent / "echo_job.py"
    job.write_text(job.read_text().replace("self.emit(tx, rows)", 'self.emit(tx, rows.append_column("m", rows["n"]))'))
    with StateClient.open(spec.parent / "job.state") as client:
        client.queue("in").append(0, pa.table([[1_000, 1_001]], schema=SCHEMA))
    dropped = finished("state", "drop", str(spec.parent / "job.state"), "job/outbox", "job/exports", "--yes")
    assert dropped.returncode == 0, dropped.stderr
    spec.write_text(SPEC.replace("./out", "./wide"))
    ended = finished(*run)
    assert ended.returncode == 0, ended.stderr
    assert exported(spec) == expected, "what was there stays as it is"
    wide = [row for path in (spec.parent / "wide").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert sorted(row["n"] for row in wide) == [1_000, 1_001]
    assert all(row["m"] == row["n"] for row in wide)
