"""Flink for ``perf.compare``: its own virtual environment, made when first needed, and the progress of its job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from perf.yardsticks.compare_peer import Peer
from shuffle.examples.local import PROJECT
from shuffle.examples.workload import RESULT_SCHEMA

PACKAGE = "apache-flink==2.3.0"
HEAP = "-Xmx2g"
INSTALL_TIMEOUT_S = 900
CALL_TIMEOUT_S = 5.0
POLL_S = 0.2
JOB_TIMEOUT_S = 300.0


class NoFlink(Exception):
    """Flink cannot be installed or started on this machine; the message says why."""


def environment_folder() -> Path:
    """The folder of Flink's environment: SHUFFLE_FLINK, or a folder among the build results."""
    return Path(os.environ.get("SHUFFLE_FLINK", PROJECT / "build" / "flink"))


def installed() -> Path:
    """The Python of an environment with Flink, which is made if it does not exist. Its packages conflict with ours."""
    folder = environment_folder()
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if stamp.exists() and stamp.read_text() == PACKAGE:
        return python
    print(f"installing {PACKAGE} (some 800 MB) into {folder} …", file=sys.stderr)
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
        command = [str(python), "-m", "pip", "install", "--quiet", PACKAGE]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        last = (str(error.stderr).strip().splitlines() or [str(error)])[-1]
        raise NoFlink(f"{PACKAGE} cannot be installed: {last}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoFlink(f"{PACKAGE} cannot be installed: {error}") from None
    stamp.write_text(PACKAGE)
    return python


class Flink:
    """Flink's process, and its REST interface for progress."""

    def __init__(self, python: Path, folder: Path, csv: Path) -> None:
        self._port = _free_port()
        self._folder = folder
        command = [str(python), "-m", "perf.yardsticks.flink_job", str(folder), str(csv), str(self._port)]
        self.peer = Peer("flink", command, folder, {"PYTHONPATH": str(PROJECT), "JVM_ARGS": HEAP})

    def run(self, job: str) -> tuple[float, int, float]:
        """Run a job; returns when rows were first seen to be read, how many, and when it had ended (wall clock).

        The end is that of the last checkpoint: only then is everything counted exactly once.
        """
        deadline_s = time.monotonic() + JOB_TIMEOUT_S
        self.peer.send(job=job)
        first: tuple[float, int] | None = None
        while not self.peer.has_response() and time.monotonic() < deadline_s:
            rows = self._rows_read() if first is None else 0
            if rows and first is None:
                first = (time.time(), rows)
            time.sleep(POLL_S)
        end_s = float(self.peer.response(1.0)["end_s"])
        if first is None:
            raise NoFlink("the job ended before it was seen to read: take more --rows")
        return (*first, end_s)

    def _rows_read(self) -> int:
        """The number of rows that the source has read so far; 0 while the cluster of the next job is not up yet."""
        try:
            for job in self._get("/jobs")["jobs"]:
                vertices = self._get(f"/jobs/{job['id']}")["vertices"]
                return max((vertex["metrics"]["read-records"] for vertex in vertices[:1]), default=0)
        except (OSError, urllib.error.URLError, KeyError, ValueError):
            pass
        return 0

    def _get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=CALL_TIMEOUT_S) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def counted(self) -> pa.Table:
        """The result of the last count, from everything it has printed."""
        path = self._folder / "flink-printed.txt"
        self.peer.call(JOB_TIMEOUT_S, job="printed", to=str(path))
        try:
            return last_changes(path)
        finally:
            path.unlink()

    def close(self) -> None:
        self.peer.close()


def last_changes(path: Path) -> pa.Table:
    """The last change of each key among lines like ``2> +U[root, cluster-01, 1767225600142269, 7]``.

    The changes of one key are printed in order, since they are all printed by one thread.
    """
    pattern = (
        r"^(?:\d+> )?(?P<change>\+I|\+U|-U|-D)\[(?P<user>[^,]*), (?P<cluster>[^,]*), (?P<at>\d+), (?P<count>\d+)\]$"
    )
    lines = pc.extract_regex(pa.array(path.read_text().splitlines(), pa.string()), pattern)
    rows = pa.table(dict(zip(("change", "user", "cluster", "at", "count"), lines.flatten(), strict=True))).drop_null()
    rows = rows.filter(pc.not_equal(rows["change"], "-U"))
    columns = ("change", "at", "count")
    # With one thread the order of the rows is kept, and "last" depends on that order.
    last = rows.group_by(["user", "cluster"], use_threads=False).aggregate([(name, "last") for name in columns])
    last = last.filter(pc.not_equal(last["change_last"], "-D"))
    found = [
        last["user"],
        last["cluster"],
        last["at_last"].cast(pa.int64()).cast(pa.timestamp("us")),
        last["count_last"].cast(pa.int64()),
    ]
    return pa.Table.from_arrays(found, schema=RESULT_SCHEMA)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
