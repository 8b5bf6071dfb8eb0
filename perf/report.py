"""What all benchmarks share: a table for people, a JSON file for machines, and readers of what the kernel counts.

The JSON file is one object: ``bars`` maps each measured name to its number, ``machine`` says where, ``details`` how.

Bytes written are the kernel's: ``write_bytes`` of ``/proc/<pid>/io`` counts what a process sends to storage. When a
parent waits for a dead child, Linux adds the child's counters to the parent's; so the sum over a process and its living
descendants misses nothing, not even what was written by workers that were killed on the way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from shuffle.errors import ShuffleError

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WIDTH = 160
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def parser(module: str, question: str) -> argparse.ArgumentParser:
    """The arguments every benchmark has."""
    made = argparse.ArgumentParser(prog=f"python -m perf.{module}", description=question)
    made.add_argument("--json", metavar="FILE", type=Path, help="write bars, machine and details to this file")
    return made


def told(main: Callable[[], int]) -> int:
    """Run a benchmark's ``main``; what went wrong is said in one line, and is the exit code 1."""
    try:
        return main()
    except ShuffleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def percentiles(values: Iterable[float], which: Sequence[float] = (50, 90, 99)) -> dict[str, float]:
    """``{"p50": …, "p99": …}`` by linear interpolation."""
    data = np.fromiter(values, dtype=np.float64)
    if not len(data):
        raise ValueError("no measurements to take percentiles of")
    return {f"p{percent:g}": float(found) for percent, found in zip(which, np.percentile(data, which), strict=True)}


def median(values: Iterable[float]) -> float:
    return percentiles(values, (50,))["p50"]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of a few repetitions."""
    return {"median": median(values), "min": min(values), "max": max(values), "runs": len(values)}


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def publish(
    title: str,
    bars: Mapping[str, float],
    details: Mapping[str, Any],
    json_path: Path | None = None,
    limits: Mapping[str, str] | None = None,
    series: Mapping[str, Any] | None = None,
) -> None:
    """Print the table for people and, if asked for, write the JSON file. ``limits`` says what a bar should come to.

    ``series`` is what ``perf.pictures`` draws: many numbers, so they are in the file only, and there on one line.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_column("should be")
    for name, value in bars.items():
        table.add_row(name, f"{value:,.4g}", (limits or {}).get(name, ""), style="bold")
    for name, value in _flat(details):
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value), "")
    Console().print(table)
    if json_path is not None:
        whole = {"bars": dict(bars), "machine": machine(), "details": dict(details)}
        text = json.dumps(whole, indent=2)
        if series is not None:
            text = text.removesuffix("\n}") + f',\n  "series": {json.dumps(series)}\n}}'
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(text + "\n")


def show(table: Table) -> None:
    """Print a table of many columns: where the output is no terminal it is not squeezed into that of one."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)


def _flat(details: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in details.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple):
            yield f"{prefix}{name}", value


def process_tree(root_pid: int) -> list[int]:
    """``root_pid`` and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            parent = _parent_of(int(entry))
            if parent is not None:
                children.setdefault(parent, []).append(int(entry))
    found = [root_pid]
    for pid in found:  # grows while it is walked
        found.extend(children.get(pid, ()))
    return found


def _parent_of(pid: int) -> int | None:
    stat = _stat_fields(pid)
    return None if stat is None else int(stat[1])


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of ``/proc/<pid>/stat`` after the name (which may hold spaces); None when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def command_line(pid: int) -> list[str]:
    """The arguments of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def written_bytes(pid: int) -> int:
    """Bytes this process, and those of its children it has waited for, caused to be written to storage."""
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    fields = dict(line.split(": ", 1) for line in text.splitlines())
    return int(fields["write_bytes"])


def tree_written_bytes(root_pid: int) -> int:
    """The same for a process and all its descendants, dead ones included."""
    return sum(written_bytes(pid) for pid in process_tree(root_pid))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and of its children it has waited for."""
    stat = _stat_fields(pid)
    return 0.0 if stat is None else sum(int(ticks) for ticks in stat[11:15]) / _TICKS_PER_S


def own_cpu_seconds(pid: int) -> float:
    """User and system time of a process without its children; 0 when it is gone."""
    stat = _stat_fields(pid)
    return 0.0 if stat is None else sum(int(ticks) for ticks in stat[11:13]) / _TICKS_PER_S


def rss_bytes(pid: int) -> int:
    """Resident memory now; 0 when the process is gone."""
    return status_bytes(pid, "VmRSS")


def rss_peak_bytes(pid: int) -> int:
    """The most memory that was ever resident; 0 when the process is gone."""
    return status_bytes(pid, "VmHWM")


def status_bytes(pid: int, name: str) -> int:
    """One of the sizes of ``/proc/<pid>/status``, by its name there; 0 when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
