"""The report of a benchmark: a table for people, and a JSON file for machines.

The JSON file is one object: ``bars`` maps each measured name to its number, ``machine`` describes the machine and
``details`` the run. What the kernel counts of processes is read by ``shuffle.examples.processes``.
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

WIDTH = 160
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def parser(module: str, question: str) -> argparse.ArgumentParser:
    """A parser with the arguments that every benchmark has."""
    made = argparse.ArgumentParser(prog=f"python -m perf.{module}", description=question)
    made.add_argument("--json", metavar="FILE", type=Path, help="write bars, machine and details to this file")
    return made


def run_and_report_errors(main: Callable[[], int]) -> int:
    """Run a benchmark's ``main`` and return its exit code. A ``ShuffleError`` is printed in one line; the code is 1."""
    try:
        return main()
    except ShuffleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def percentiles(values: Iterable[float], which: Sequence[float] = (50, 90, 99)) -> dict[str, float]:
    """The percentiles of ``values`` as ``{"p50": …, "p99": …}``, by linear interpolation."""
    data = np.fromiter(values, dtype=np.float64)
    if not len(data):
        raise ValueError("no measurements to take percentiles of")
    return {f"p{percent:g}": float(found) for percent, found in zip(which, np.percentile(data, which), strict=True)}


def median(values: Iterable[float]) -> float:
    return percentiles(values, (50,))["p50"]


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, lowest and highest of a few repetitions."""
    return {"median": median(values), "min": min(values), "max": max(values), "runs": len(values)}


def machine() -> dict[str, Any]:
    """A description of the machine and the versions that the figures come from."""
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
    """Print the table and, if ``json_path`` is given, write the JSON file. ``limits`` has the target of each bar.

    ``series`` is what ``perf.common.pictures`` draws: many numbers, so they are in the file only, on one line.
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
    """Print a table of many columns. If the output is not a terminal, it is ``WIDTH`` columns wide."""
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
