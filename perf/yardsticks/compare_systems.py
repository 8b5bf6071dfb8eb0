"""This project in ``perf.compare``, and what is measured of every system there.

| system | reads | its clock runs |
|---|---|---|
| this project | a queue of its store | from the first commit that is seen to the last |
| this project under Spark | the same | the same |
| Spark alone | Parquet | from the end of the first micro-batch to the end of the last |
| Spark's real-time mode | Arrow files | from the end of the first batch to the end of the last but one |
| Flink | CSV | from the first rows that are seen to be read to the last checkpoint |

Rows that were processed when the clock started are not counted, and processor time is that of the same period. Bytes
written and the peak of memory are those of the whole run.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.common.progress import Buckets, fill_with, forget, watched
from perf.common.workload_files import Input, in_turn
from perf.yardsticks.compare_usage import Meter
from shuffle.errors import ShuffleError
from shuffle.examples.local import LocalSystem
from shuffle.statestore import StateClient

MAPPERS = 2
REDUCERS = 2
READ_BATCHES = 2
"""The number of batches of the input that a mapper of this project reads at once."""
NAME = "this project"


@dataclass(frozen=True)
class Run:
    """One run of one system whose result was right."""

    rows: int
    seconds: float
    cpu_s: float
    memory_peak_bytes: int
    written_bytes: int
    input_bytes: int
    row_bytes: float
    start_up_s: float
    """The time in seconds from the start of the system's processes to the start of the clock; if the system was warm,
    from the start of its query."""

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds

    @property
    def mb_per_s(self) -> float:
        return self.rows_per_s * self.row_bytes / 1e6

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.rows * self.row_bytes) * 1e9

    @property
    def written_per_byte(self) -> float:
        return self.written_bytes / self.input_bytes


class Base:
    def __init__(self, given: Input) -> None:
        self._input = given

    def _run(self, meter: Meter, begin_s: float, end_s: float, rows: int, started_s: float, system: str) -> Run:
        if end_s <= begin_s or rows <= 0:
            raise ShuffleError(f"{system} was done before its clock had started: take more --rows")
        return Run(
            rows=rows,
            seconds=end_s - begin_s,
            cpu_s=meter.cpu_between_s(begin_s, end_s),
            memory_peak_bytes=meter.memory_peak_bytes,
            written_bytes=meter.written_bytes,
            input_bytes=self._input.size_bytes,
            row_bytes=self._input.row_bytes,
            start_up_s=begin_s - started_s,
        )


class Prepared:
    """The rows of an input in memory, and where each of them belongs. They are made once: making them costs more than
    appending them."""

    def __init__(self, given: Input) -> None:
        self.input = given
        self.batches = list(in_turn(given.workload, given.rows, MAPPERS, given.batch_rows))
        self._buckets: dict[int, Buckets] = {}

    def buckets(self, reducers: int) -> Buckets:
        if reducers not in self._buckets:
            made = Buckets(MAPPERS, reducers, self.input.question.key)
            for partition, batch in self.batches:
                made.add(partition, batch)
            self._buckets[reducers] = made.close()
        return self._buckets[reducers]


class Ours(Base):
    """This project: one store for all runs, and for each run new mappers and reducers and a queue filled beforehand."""

    def __init__(self, prepared: Prepared, folder: Path, stack: ExitStack) -> None:
        super().__init__(prepared.input)
        self._prepared = prepared
        self.system = stack.enter_context(LocalSystem(folder))
        self.state: StateClient = stack.enter_context(self.system.connect())
        self._runs = 0

    @property
    def buckets(self) -> Buckets:
        return self._prepared.buckets(REDUCERS)

    def spec(self, mapper: str, reducer: str, reducers: int = REDUCERS) -> dict[str, Any]:
        """A spec over a new queue, which is filled here."""
        self._runs += 1
        name = f"run-{self._runs}"
        fill_with(self.state, name, self._input.question.schema, self._prepared.batches)
        return {
            "processor": name,
            "input": {"queue": name},
            "mapper": {
                "class": mapper,
                "memory": "128MiB",
                "batch_rows_max": READ_BATCHES * self._input.batch_rows,
                "batch_bytes_max": "32MiB",
            },
            "reducer": {"class": reducer, "count": reducers},
            "metrics": False,
        }

    def count(self, reducers: int = REDUCERS) -> Run:
        """Count, and empty the table again for the next run."""
        question = self._input.question
        spec = self.spec(question.mapper, question.reducer, reducers)
        run = self.processed(spec)
        self.check(NAME)
        forget(self.state, spec["processor"], spec["processor"], question.table)
        return run

    def repartition(self) -> Run:
        """Repartition the rows. There is no table to compare: the positions show that each row was committed by the
        reducer it belongs to."""
        spec = self.spec("perf.common.jobs:WholeRows", "perf.common.jobs:KeepNothing")
        run = self.processed(spec)
        forget(self.state, spec["processor"], spec["processor"])
        return run

    def processed(self, spec: dict[str, Any]) -> Run:
        """Run a spec to the end of its queue. The caller checks the result."""
        roots = [self.system.store_pid]
        buckets = self._prepared.buckets(spec["reducer"]["count"])
        with Meter(lambda: roots) as meter:
            seen = watched(self.system, self.state, spec, buckets, lambda started: roots.append(started.pid))
            # What the store has put off is part of the price.
            meter.wait_until_nothing_is_written()
        return self._run(meter, seen.begin_s, seen.end_s, seen.rows, seen.started_s, NAME)

    def check(self, system: str) -> None:
        question = self._input.question
        question.check(self._input.expected, self.state.scan(question.table).read_all(), system)


def count_afresh(prepared: Prepared, folder: Path) -> Run:
    """A count on a store of its own, so that a large state that an earlier run has left does not burden this one."""
    own = folder / "afresh"
    try:
        with ExitStack() as stack:
            own.mkdir()
            ours = Ours(prepared, own, stack)
            question = prepared.input.question
            run = ours.processed(ours.spec(question.mapper, question.reducer))
            ours.check(NAME)
            return run
    finally:
        shutil.rmtree(own, ignore_errors=True)
