"""The parts of ``perf.compare``, ``perf.growth`` and ``perf.write_amplification`` that count, read and draw."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from perf import compare, growth
from perf.common import compare_pictures, pictures
from perf.common.keyed_rows import KeyedRows
from perf.common.orders import Orders
from perf.common.progress import Buckets
from perf.common.questions import ACTIVITY, ORDERS
from perf.common.workload_files import in_turn, write_forms
from perf.parts.growth_load import INPUT_BYTES_PER_S, Load, extrapolated
from perf.yardsticks.compare_peer import Peer, PeerFailed
from perf.yardsticks.compare_systems import Run
from perf.yardsticks.flink import last_changes
from perf.yardsticks.realtime_source import NoJavac, compiled
from shuffle.errors import ShuffleError
from shuffle.examples.workload import RESULT_SCHEMA, SCHEMA, Workload, oracle
from tests.waiting import wait_until

WORKLOAD = Workload(with_user_share=1.0, users=50)


def test_every_form_of_the_input_holds_the_same_rows(tmp_path: Path) -> None:
    given = write_forms(tmp_path / "forms", WORKLOAD, 1000, 2, 100, 300, ["parquet", "csv", "arrow"])
    rows = pa.concat_tables(batch for _, batch in in_turn(WORKLOAD, 1000, 2, 100))
    assert given.size_bytes == pytest.approx(rows.nbytes, rel=0.05)
    assert len(list(given.parquet.iterdir())) == len(list(given.csv.iterdir())) == 4
    columns = [field.name for field in SCHEMA]
    types = {**{name: pa.string() for name in columns}, "timestamp": pa.int64()}
    lines = [
        csv.read_csv(
            path, csv.ReadOptions(column_names=columns), convert_options=csv.ConvertOptions(column_types=types)
        )
        for path in sorted(given.csv.iterdir())
    ]
    for found in (pq.read_table(given.parquet), pa.concat_tables(lines).cast(SCHEMA)):
        assert found.equals(rows)
    arrow = [pa.ipc.open_file(path).read_all() for path in given.arrow]
    assert pa.concat_tables(arrow).sort_by("timestamp").equals(rows.sort_by("timestamp"))
    ACTIVITY.check(given.expected, oracle([rows]), "the oracle")


def test_a_wrong_result_does_not_count() -> None:
    expected = oracle([WORKLOAD.rows(0, 100)])
    with pytest.raises(ShuffleError, match=r"the result of Spark is wrong.*lost=\d+ duplicated=0"):
        ACTIVITY.check(expected, expected.slice(1), "Spark")


def test_orders_are_counted_independently_and_a_wrong_sum_does_not_count() -> None:
    batches = list(Orders(1, 500).batches(2000, 300))
    assert sum(batch.num_rows for batch in batches) == 2000
    rows = pa.concat_tables(batches)
    assert {len(name) for name in rows["customer"].to_pylist()} == {20}
    assert 60 <= rows.nbytes / 2000 <= 115
    expected = ORDERS.oracle_sum(map(ORDERS.oracle_part, batches))
    counted = rows.group_by("customer").aggregate([([], "count_all"), ("amount", "sum")])
    counted = counted.select(["customer", "count_all", "amount_sum"]).rename_columns(ORDERS.result.names)
    ORDERS.check(expected, counted, "Arrow")
    with pytest.raises(ShuffleError, match=r"result of Spark is wrong.* rows, and not the"):
        ORDERS.check(expected, counted.slice(1), "Spark")
    more = counted.set_column(
        2, "spent", pa.array([counted["spent"][0].as_py() + 1, *counted["spent"].to_pylist()[1:]])
    )
    with pytest.raises(ShuffleError, match="'spent' is wrong for 1 of"):
        ORDERS.check(expected, more, "Flink")


def test_last_printed_change_of_a_key_is_its_result(tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    printed.write_text(
        "1> +I[root, cluster-01, 5, 1]\n2> +I[cron, cluster-00, 7, 2]\n1> -U[root, cluster-01, 5, 1]\n"
        "1> +U[root, cluster-01, 9, 3]\n2> -D[cron, cluster-00, 7, 2]\n"
    )
    found = last_changes(printed, RESULT_SCHEMA)
    assert found.schema == RESULT_SCHEMA
    assert found.to_pydict()["user"] == ["root"]
    assert found.to_pydict()["count"] == [3]
    assert found["last_access"].cast(pa.int64()).to_pylist() == [9]


def test_rows_are_committed_only_when_their_own_reducer_says_so() -> None:
    buckets = Buckets(2, 3, ["key"])
    batches = [(mapper, KeyedRows(1, 100).rows(0, 500, mapper)) for mapper in range(2)]
    for mapper, batch in batches:
        buckets.add(mapper, batch)
    buckets.close()

    def row(reducer: int, *last: int) -> dict[str, object]:
        return {"reducer_index": reducer, "committed_row_indices": np.array(last, dtype="<i8").tobytes()}

    assert buckets.rows == 1000
    one = buckets.committed(pa.Table.from_pylist([row(0, 499, -1)]))
    assert 0 < one < 500
    assert buckets.committed(pa.Table.from_pylist([row(reducer, 499, 499) for reducer in range(3)])) == 1000


def run_of(mb_per_s: float, cpu_s_per_gb: float) -> Run:
    return Run(1_000_000, 100 / mb_per_s, cpu_s_per_gb / 10, 10**8, 10**6, 10**8, 100.0, 1.0)


def test_bars_are_ratios_of_medians_of_the_systems_there_were(tmp_path: Path) -> None:
    runs: compare.Runs = {
        (compare.COUNT, compare.OURS): [run_of(300, 5), run_of(100, 10), run_of(200, 6)],
        (compare.COUNT, compare.SPARK): [run_of(50, 30), run_of(40, 24), run_of(20, 20)],
    }
    assert compare.bars(runs) == pytest.approx({"count_vs_spark": 5.0, "cpu_vs_spark": 0.25})
    found = compare.summary(runs, {"count, Spark": 20.0})
    assert {row["system"]: row["start_up_s"] for row in found} == {"Spark": 20.0, "this project": None}
    assert compare.table(found).row_count == 2
    drawn = pictures.draw({"kind": "compare", "systems": found}, tmp_path)
    assert [path.name for path in drawn] == ["compare-count.svg"]


def test_large_state_has_bars_of_its_own() -> None:
    runs: compare.Runs = {
        (compare.LARGE, compare.OURS): [run_of(40, 5)],
        (compare.LARGE, compare.FLINK): [run_of(10, 5)],
    }
    assert compare.bars(runs) == pytest.approx({"large_state_vs_flink": 4.0, "large_state_written": 0.01})


def test_jobs_are_chosen_by_name() -> None:
    assert compare.chosen("large_state,count") == ("count", "large_state")
    with pytest.raises(argparse.ArgumentTypeError, match="there is no job 'counts'"):
        compare.chosen("counts")


def batch_of(number: int, rows: int) -> dict[str, object]:
    times = {"addBatch": 5000, "triggerExecution": 5500}
    return {"timestamp": f"2026-01-01T00:00:{6 * number:02d}Z", "durationMs": times, "numInputRows": rows}


def test_clock_of_real_time_mode_leaves_out_the_first_batch_and_the_one_in_which_rows_ended() -> None:
    from perf.yardsticks.spark_realtime import timed

    batches = [batch_of(0, 10), batch_of(1, 100), batch_of(2, 110), batch_of(3, 30), batch_of(4, 0)]
    found = timed(batches)  # type: ignore[arg-type]
    assert found["rows"] == 210
    assert found["end_s"] - found["begin_s"] == pytest.approx(12)
    with pytest.raises(ValueError, match="needs three batches"):
        timed(batches[:2])  # type: ignore[arg-type]


@pytest.mark.skipif(shutil.which("javac") is None, reason="needs a JDK")
def test_source_for_real_time_mode_compiles_against_the_installed_spark(tmp_path: Path) -> None:
    assert list(compiled(tmp_path).rglob("RealTimeRows.class"))


def test_without_javac_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoJavac, match="there is no javac"):
        compiled(tmp_path)


def cost_of(axis: str, value: int, store_s: float) -> growth.Cost:
    cpu_s = {"store": store_s, "mapper": 1.0, "reducer": 1.0}
    memory = {"store": 1e8, "mapper": 1e8, "reducer": 1e8}
    return growth.Cost(growth.Point(axis, value), 1_000_000, 10**8, 10**6, 1.0, cpu_s, 10, memory, 1000)


def test_growth_names_the_role_that_bends_the_curve(tmp_path: Path) -> None:
    costs = [cost_of("keys", 1000, 0.5), cost_of("keys", 10_000_000, 3.0)]
    assert growth.bends(costs).startswith("the store: 100% of what 10,000,000 costs more than 1,000")
    assert growth.bends(costs[:1] * 2) == "flat"
    series = {"kind": "growth", "curves": {"keys": [cost.as_details() for cost in costs]}}
    assert [path.name for path in pictures.draw(series, tmp_path)] == ["growth.svg"]


def test_extrapolation_is_in_proportion_to_the_input() -> None:
    cpu_s = {"store": 0.1, "mapper": 0.9, "reducer": 0.5}
    memory = {"store": 1e8, "mapper": 1e8, "reducer": 2e8}
    load = Load(int(INPUT_BYTES_PER_S / 10), 3_000_000, 300_000, cpu_s, memory, 3, 1_000_000)
    found = extrapolated(load)
    assert found["cores"] == pytest.approx(15)
    assert found["cores_of_one_mapper"] == pytest.approx(0.02)
    assert found["network_shuffle_mb_per_s"] == pytest.approx(350)
    assert found["memory_gb"] == pytest.approx(45 + 2 + 0.1)


def test_picture_of_write_amplification_names_what_for(tmp_path: Path) -> None:
    kinds = {"log": 3.0, "log_pages": 1.0, "flush": 0.0}
    scenario = {"bytes_per_byte": 0.04, "written_mb": 4.0, "kinds_mb": kinds}
    series = {"kind": "write_amplification", "scenarios": {"no state": scenario}}
    (path,) = pictures.draw(series, tmp_path)
    assert "log 75%, log pages 25%" in path.read_text()
    assert compare_pictures.draw_and_report is pictures.draw_and_report


ECHO = """
import sys
from perf.yardsticks.compare_peer import serve
def handler(request):
    print("to the log, not to the replies")
    if request["job"] == "fail":
        raise ValueError("cannot do that")
    return {"done": request["job"]}
sys.exit(serve(handler))
"""


def started_peer(folder: Path, code: str) -> Peer:
    root = str(Path(__file__).resolve().parent.parent.parent)
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    return Peer("echo", [sys.executable, "-c", code], folder, {"PYTHONPATH": path})


def test_peer_answers_goes_on_after_an_error_and_ends_with_its_input(tmp_path: Path) -> None:
    peer = started_peer(tmp_path, ECHO)
    try:
        with pytest.raises(PeerFailed, match="echo: ValueError: cannot do that"):
            peer.call(30, job="fail")
        assert peer.call(30, job="count") == {"done": "count"}
        assert "to the log" in peer.log_tail()
    finally:
        peer.close()
    with pytest.raises(PeerFailed, match="has ended"):
        peer.call(30, job="count")


WITH_CHILD = """
import subprocess, sys
from pathlib import Path
from perf.yardsticks.compare_peer import serve
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
def handler(request):
    return {"pid": child.pid, "stat": Path(f"/proc/{child.pid}/stat").read_text()}
sys.exit(serve(handler))
"""


def is_stopped(stat: str) -> bool:
    return stat.split()[2] == "T"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing stands still")
@pytest.mark.parametrize("killed", [False, True])
def test_what_a_peer_has_started_stands_still_between_requests_and_ends_with_it(tmp_path: Path, killed: bool) -> None:
    peer = started_peer(tmp_path, WITH_CHILD)
    try:
        for _ in range(2):
            response = peer.call(30, job="look")
            child = Path(f"/proc/{response['pid']}")
            assert not is_stopped(response["stat"])
            wait_until(lambda child=child: is_stopped((child / "stat").read_text()))  # type: ignore[misc]
        if killed:
            os.kill(peer.pid, signal.SIGTERM)
    finally:
        peer.close()
    wait_until(lambda: not child.exists())
