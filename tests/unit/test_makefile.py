"""What the Makefile would do, without doing it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("target", ["demo", "check", "test", "test-long", "test-kafka", "perf", "reference", "clean"])
def test_every_target_can_be_read(target: str) -> None:
    found = subprocess.run(["make", "--dry-run", target], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert found.stdout


def test_perf_runs_every_benchmark_that_writes_figures() -> None:
    found = subprocess.run(["make", "--dry-run", "perf"], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    wanted = {path.stem for path in PROJECT.glob("perf/*.py") if "report.parser(" in path.read_text()}
    loop = next(line for line in found.stdout.splitlines() if "for name in" in line)
    named = set(loop.partition("for name in ")[2].partition(";")[0].split())
    assert len(wanted) > 5
    assert named == wanted
