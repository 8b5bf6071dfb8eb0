"""The demo, with its kills, in small; and what it does when it is interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shuffle.examples.processes import process_tree

ROOT = Path(__file__).resolve().parents[2]


def start_demo(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.demo", *options],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_demo_kills_a_mapper_and_a_reducer_and_is_exact(tmp_path: Path) -> None:
    process = start_demo(tmp_path, "--rows", "1000000", "--seed", "11")
    output, errors = process.communicate(timeout=170)
    assert process.returncode == 0, output + errors
    assert re.search(r"^exactly-once: OK rows=\d+ lost=0 duplicated=0$", output, re.MULTILINE)
    assert output.count("kill -9 mapper 1") >= 1
    assert output.count("kill -9 reducer 0") >= 1
    assert re.search(r"^rows per second: [\d,]+", output, re.MULTILINE)
    assert re.search(r"^bytes written per byte shuffled: [\d.]+", output, re.MULTILINE)
    assert list(tmp_path.iterdir()) == [], "the demo left something behind"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_interrupted_during_the_run_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    process = start_demo(tmp_path, "--rows", "300000", "--no-kill")
    descendants: set[int] = set()
    deadline = time.monotonic() + 60
    while len(descendants) < 5 and time.monotonic() < deadline:  # the store, the controller and some workers
        descendants = set(process_tree(process.pid)[1:])
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert list(tmp_path.iterdir()) == []
    assert not [pid for pid in descendants if _is_ours(pid)]


def _is_ours(pid: int) -> bool:
    try:
        return b"shuffle.run.launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False
