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
import pyarrow.csv as csv

from perf.yardsticks.compare_peer import Peer
from shuffle.examples.local import PROJECT

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

    def __init__(self, python: Path, folder: Path) -> None:
        self._port = _free_port()
        self._printed = _in_memory(folder) / f"{folder.name}-flink-printed.txt"
        command = [str(python), "-m", "perf.yardsticks.flink_job", str(folder), str(self._printed), str(self._port)]
        self.peer = Peer("flink", command, folder, {"PYTHONPATH": str(PROJECT), "JVM_ARGS": HEAP})

    def run(self, job: str, question: str, lines: Path, parallelism: int) -> tuple[float, int, float]:
        """Run a job; returns when rows were first seen to be read, how many, and when it had ended (wall clock).

        The end is that of the last checkpoint: only then is everything counted exactly once.
        """
        deadline_s = time.monotonic() + JOB_TIMEOUT_S
        self.peer.send(job=job, question=question, csv=str(lines), parallelism=parallelism)
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

    def counted(self, result: pa.Schema) -> pa.Table:
        """The result of the last count, from everything it has printed."""
        self.peer.call(JOB_TIMEOUT_S, job="printed")
        try:
            return last_changes(self._printed, result)
        finally:
            self._printed.unlink()

    def close(self) -> None:
        self.peer.close()
        self._printed.unlink(missing_ok=True)


def last_changes(path: Path, result: pa.Schema) -> pa.Table:
    """The last change of each key among lines like ``2> +U[root, cluster-01, 1767225600142269, 7]``.

    The key are the columns of ``result`` that are text; times are in microseconds. The changes of one key are printed
    in order, since they are all printed by one thread.
    """
    rows = _printed_rows(path, len(result)).filter(pc.invert(pc.ends_with(pc.field("change"), "-U")))
    key = [field.name for field in result if pa.types.is_string(field.type)]
    rows = rows.rename_columns(["change", *result.names])
    others = [name for name in rows.column_names if name not in key]
    # With one thread the order of the rows is kept, and "last" depends on that order.
    last = rows.group_by(key, use_threads=False).aggregate([(name, "last") for name in others])
    last = last.filter(pc.invert(pc.ends_with(last["change_last"], "-D")))
    columns = [
        last[field.name] if field.name in key else last[f"{field.name}_last"].cast(pa.int64()).cast(field.type)
        for field in result
    ]
    return pa.Table.from_arrays(columns, schema=result)


def _printed_rows(path: Path, columns: int) -> pa.Table:
    """The lines as a column ``change``, which ends with the kind of change, and the columns of the row, as text."""
    names = [str(at) for at in range(columns)]
    lines = csv.read_csv(
        path,
        csv.ReadOptions(column_names=names),
        csv.ParseOptions(quote_char=False, invalid_row_handler=lambda _row: "skip"),
        csv.ConvertOptions(column_types={name: pa.string() for name in names}, strings_can_be_null=False),
    )
    lines = lines.filter(pc.match_substring(lines["0"], "[")).combine_chunks()
    opened = pc.split_pattern(lines["0"], "[", max_splits=1)
    values = [pc.list_element(opened, 1), *(lines[name] for name in names[1:])]
    trimmed = {name: pc.utf8_trim(values[at], " ]") for at, name in enumerate(names)}
    return pa.table({"change": pc.list_element(opened, 0), **trimmed})


def _in_memory(folder: Path) -> Path:
    """A folder whose files are in memory, where there is one: what is printed must not be written to the disk."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else folder


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
