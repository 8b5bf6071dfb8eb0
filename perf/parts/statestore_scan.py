"""``shuffle state scan`` of a large table: how soon it prints, and how much memory it takes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from shuffle.errors import ShuffleError
from shuffle.examples import processes
from shuffle.statestore import StateClient

TABLE = "scanned"
KEY = pa.schema([("id", pa.int64())])
VALUE = pa.schema([("name", pa.string()), ("count", pa.int64())])

_TRANSACTION_ROWS = 50_000
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Scan:
    """One run of the command."""

    lines: int
    first_row_s: float
    """The time in seconds from the start of the process, with that of Python, to the first row of its output."""
    whole_s: float
    rss_peak_bytes: int


def fill(client: StateClient, rows: int) -> None:
    client.create_table(TABLE, key=KEY, value=VALUE)
    for begin in range(0, rows, _TRANSACTION_ROWS):
        ids = np.arange(begin, min(begin + _TRANSACTION_ROWS, rows))
        numbers = pa.array(ids, pa.int64())
        names = pa.array([f"name of row {number}" for number in ids.tolist()])
        with client.transaction() as tx:
            tx.write(TABLE, pa.table({"id": numbers, "name": names, "count": numbers}))
            tx.commit()


def scan(store: str) -> Scan:
    """Run the command against ``store`` (an address or a folder) and read all it prints."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "shuffle.cli", "state", "scan", store, TABLE, "--json"], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        chunk = os.read(descriptor, _READ_BYTES)
        first_row_s = time.monotonic() - begin
        lines = rss_peak_bytes = 0
        while chunk:
            lines += chunk.count(b"\n")
            # Read while the process lives: what the kernel reports of a dead child includes its parent's memory.
            rss_peak_bytes = max(rss_peak_bytes, processes.rss_peak_bytes(process.pid))
            chunk = os.read(descriptor, _READ_BYTES)
        whole_s = time.monotonic() - begin
        if process.wait(30):
            raise ShuffleError(f"`shuffle state scan {store}` ended with {process.returncode}")
        return Scan(lines, first_row_s, whole_s, rss_peak_bytes)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
