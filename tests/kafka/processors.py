"""Whole processors as processes: ``shuffle run`` on a spec, what it has counted, and which processes are its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shuffle.errors import ShuffleError
from shuffle.statestore import StateClient
from shuffle.statestore.wire.announcement import served_at
from tests.waiting import WAIT_S

ROOT = Path(__file__).resolve().parents[2]

Totals = dict[str, tuple[int, int]]
"""For each user how many rows, and the sum of their numbers."""


def orders(begin: int, end: int) -> list[dict[str, Any]]:
    return [{"user": f"user-{n * 7919 % 101}", "n": n} for n in range(begin, end)]


def as_json(rows: Iterable[Mapping[str, Any]]) -> list[bytes]:
    return [json.dumps(row).encode() for row in rows]


def expected(rows: Iterable[Mapping[str, Any]]) -> Totals:
    counts: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    for row in rows:
        counts[row["user"]] += 1
        sums[row["user"]] += row["n"]
    return {user: (counts[user], sums[user]) for user in counts}


def totals(spec: Path) -> Totals:
    """What is in the table now."""
    with StateClient.open(spec.parent / "orders.state") as client:
        if "totals" not in {table.name for table in client.tables()}:
            return {}
        rows = client.scan("totals").read_all().to_pylist()
    return {row["user"]: (row["rows"], row["total"]) for row in rows}


def row_count(spec: Path) -> int:
    """How many rows a run has counted; -1 while its store cannot be asked. Nobody else may open the folder then."""
    if served_at(spec.parent / "orders.state") is None:
        return -1
    try:
        return sum(rows for rows, _ in totals(spec).values())
    except ShuffleError:
        return -1


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def shuffle(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shuffle.cli", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=3 * WAIT_S,
        check=False,
    )


def drained(spec: Path) -> subprocess.CompletedProcess[str]:
    return shuffle("run", str(spec), "--until-drained", "--no-screen")


@contextmanager
def running(spec: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``shuffle run`` until the end of the block; SIGTERM then."""
    with spec.with_suffix(".out").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "shuffle.cli", "run", str(spec), "--no-screen"],
            env=environment(),
            stdout=output,
            stderr=output,
        )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(WAIT_S)


def said(spec: Path) -> str:
    return spec.with_suffix(".out").read_text(errors="replace")


def workers(controller: int, role: str) -> list[int]:
    """The processes of a role that a controller has started."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        # launch PARENT ROLE …
        names = {role.encode(), f"shuffle.{role}".encode()}
        if b"shuffle.run.launch" in command and str(controller).encode() in command and names & set(command):
            found.append(int(folder.name))
    return found
