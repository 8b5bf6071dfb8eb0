"""The parts of ``perf.failures`` that count and draw: the input's oracle, rates between samples, and the pictures."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from perf.common import pictures
from perf.common.paced import INPUT_SCHEMA, PacedInput
from perf.common.sampling import Series
from perf.failures import Outage, mapper_figures, others_ratio
from shuffle.errors import ShuffleError
from shuffle.examples.workload import RESULT_SCHEMA, Workload, difference, oracle
from shuffle.statestore import StateClient


def counter(rate_before: float, rate_during: float) -> Series:
    """Sampled at 0, 1 … 40; the rate changes at 20."""
    series = Series()
    for second in range(41):
        series.add(float(second), {"rows": min(second, 20) * rate_before + max(0, second - 20) * rate_during})
    return series


def test_oracle_of_paced_input_counts_every_append(tmp_path: Path) -> None:
    with StateClient.open(str(tmp_path / "state")) as state:
        paced = PacedInput(state, "logs", Workload(with_user_share=0.5), partitions=2, append_rows=50)
        with paced:
            paced.append_while(lambda partition: paced.appended_rows(partition) < 50 * (5 if partition else 9))
            deadline = time.monotonic() + 60
            while [paced.appended_rows(0), paced.appended_rows(1)] != [450, 250]:
                assert paced.failure is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
        queue = state.queue("logs")
        rows = [queue.read(partition, 0, max_rows=1000)[0] for partition in (0, 1)]
    assert rows[0].schema.equals(INPUT_SCHEMA)
    expected = oracle([rows.drop_columns(["appended_ns"]) for rows in rows])
    assert difference(expected, paced.oracle()).exact
    assert paced.oracle().schema.equals(RESULT_SCHEMA)
    stamps = rows[0]["appended_ns"].to_numpy()
    assert (np.diff(stamps) >= 0).all()


def test_nothing_is_appended_while_the_paced_input_rests(tmp_path: Path) -> None:
    with StateClient.open(str(tmp_path / "state")) as state:
        with PacedInput(state, "logs", Workload(), partitions=2, append_rows=20) as paced:
            for _ in range(20):
                paced.append_while(lambda partition: True)
                before = paced.appended_rows(0)
                while paced.appended_rows(0) == before:
                    time.sleep(0.001)
                paced.rest()
                # What the oracle is told is all there is, also of appends that were under way.
                ends = [end for _, end in state.queue("logs").bounds()]
                assert ends == [paced.appended_rows(0), paced.appended_rows(1)]


def test_others_ratio_leaves_out_the_one_that_is_down() -> None:
    outage = Outage("mapper", 1, before_s=0.0, begin_s=20.0, end_s=40.0, after_s=60.0)
    workers = [counter(100, 90), counter(100, 0), counter(300, 310)]
    assert others_ratio(workers, "rows", outage) == pytest.approx(1.0)
    assert others_ratio([*workers, counter(100, 0)], "rows", outage) == pytest.approx(0.8)


def test_catch_up_ends_when_the_lag_is_what_it_was() -> None:
    outage = Outage("mapper", 0, before_s=0.0, begin_s=10.0, end_s=20.0, after_s=40.0)
    times = np.array([1.0, 9.0, 22.0, 23.0, 24.5, 25.0])
    lags = np.array([0.1, 0.7, 12.0, 5.0, 0.7, 0.1])
    others = (np.array([1.0, 15.0]), np.array([0.1, 0.2]))
    window = Series()
    for second in range(41):
        window.add(float(second), {"window_bytes": float("nan") if 10 <= second < 22 else 2e6})
    found = mapper_figures(outage, [(times, lags), others], [window, window])
    assert (found["first_read_s"], found["catch_up_s"], found["lag_s_max"]) == (2.0, 4.5, 12.0)
    assert (found["others_lag_s_max"], found["window_mb_max"]) == (0.2, 2.0)
    with pytest.raises(ShuffleError, match="did not catch up"):
        mapper_figures(outage, [(times[:4], lags[:4]), others], [window, window])


def test_pictures_of_failures_are_drawn_and_are_small(tmp_path: Path) -> None:
    seconds = 120
    outage = {"index": 0, "before_s": 0.0, "begin_s": 20.0, "end_s": 80.0, "after_s": 119.0}
    series = {
        "kind": "failures",
        "mapper_catch_up_s": 2.5,
        "outages": [{"role": "mapper", **outage}, {"role": "reducer", **outage}],
        "reducer_mb_per_s": [[1.0 + n % 3 for n in range(seconds)]] * 4,
        "window_mb": [[None if 20 <= n < 80 else n % 7 for n in range(seconds)]] * 8,
        "read_lag_s": [[0.1 + n % 5 / 100 for n in range(seconds)]] * 8,
    }
    written = pictures.draw(series, tmp_path)
    assert len(written) == 6
    for path in written:
        text = path.read_text()
        assert "time, s" in text
        assert len(text) < 100_000
    again = {path.name: path.read_bytes() for path in written}
    assert {path.name: path.read_bytes() for path in pictures.draw(series, tmp_path)} == again


def test_file_without_series_is_told_apart(tmp_path: Path) -> None:
    result = tmp_path / "out.json"
    result.write_text('{"bars": {}}')
    with pytest.raises(ShuffleError, match="nothing to draw"):
        pictures.main([str(result)])
    result.write_text("not json")
    with pytest.raises(ShuffleError, match="not what a benchmark writes"):
        pictures.main([str(result)])
