"""The input of ``docs/inputs.md``, for tests: its module, a job over it, and files for it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = re.findall(r"^```(\w+)\n# ([\w.]+)\n(.*?)^```", (ROOT / "docs" / "inputs.md").read_text(), re.M | re.S)

JOBS = """
from shuffle import AggregateReducer, Count, HashMapper, Sum

class ByUser(HashMapper):
    key = ["user"]

class CountUsers(AggregateReducer):
    table = "counts"
    key = ["user"]
    aggregates = {"count": Count(), "sum": Sum("n")}
"""

LEAST = """
import csv_input
from shuffle import Input

class Least(Input):
    def partition_count(self):
        return 2

    def open(self, partition):
        return csv_input.CsvInput(self.config, self.state, self.folder).open(partition)
"""
"""The minimum: without ends, a schema of its options, or anything else that is optional."""


def write_example(folder: Path) -> Path:
    """What the page says, in ``folder``; the path of its spec."""
    for _, name, text in SECTIONS:
        (folder / name).write_text(text)
    (folder / "csv_jobs.py").write_text(JOBS)
    (folder / "least_input.py").write_text(LEAST)
    (folder / "incoming").mkdir()
    spec = folder / "csv.yaml"
    spec.write_text(spec.read_text().replace('ByUser"}', 'ByUser", trim_period: 100ms}'))
    return spec


def append_lines(folder: Path, rows: int, begin: int = 0) -> Counter[str]:
    """The same lines to each of two files; how often each user is in both."""
    users = [f"user-{number % 37}" for number in range(begin, begin + rows)]
    for partition in range(2):
        with (folder / "incoming" / f"{partition}.csv").open("a") as file:
            file.writelines(f"{user},{number}\n" for number, user in enumerate(users, begin))
    counts = Counter(users)
    return counts + counts
