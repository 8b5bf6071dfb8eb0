"""Hostile and broken inputs at every port and in every file: nothing dies, hangs, tells or loses anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemons import ROOT, environment

SHORT_INPUTS = 2_000
SHORT_SEED = 1
"""The same inputs each time: whether a change is sound must not depend on the day. New ones are for the long run."""

LONG_INPUTS = 200_000


def run(inputs: int, report: Path, wait_s: float, *more: str) -> subprocess.CompletedProcess[str]:
    arguments = ["--inputs", str(inputs), "--json", str(report), *more]
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=wait_s,
        check=False,
    )


def assert_clean(done: subprocess.CompletedProcess[str], report: Path, inputs: int) -> None:
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    told = json.loads(report.read_text())
    assert sum(target["inputs"] for target in told["targets"].values()) == inputs
    assert told["job_rows"] > 0
    assert told["restarts"] == 0
    for name, target in told["targets"].items():
        accepted = target["results"].get("accepted", 0)
        assert accepted, f"{name}: no input was accepted, so only the first check of each was tried"
        assert accepted < target["inputs"], f"{name}: no input was refused, so none of them was broken"


def test_two_thousand_inputs_find_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert_clean(run(SHORT_INPUTS, report, 170, "--seed", str(SHORT_SEED)), report, SHORT_INPUTS)


@pytest.mark.long
def test_two_hundred_thousand_inputs_find_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert_clean(run(LONG_INPUTS, report, 1750), report, LONG_INPUTS)
