"""The systems of ``perf.compare``: the same jobs on the same rows, each result checked before its time counts.

| system | reads | its clock runs |
|---|---|---|
| this project | a queue of its store | from the first commit that is seen to the last |
| this project under Spark | the same | from the end of the first micro-batch to the end of the last |
| Spark alone | Parquet | the same |
| Flink | CSV | from the first rows that are seen to be read to the last checkpoint |

Rows that were processed when the clock started are not counted, and processor time is that of the same period. Bytes
written and the peak of memory are those of the whole run.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from perf.common.progress import Buckets, fill_with, forget, watched
from perf.common.workload_files import Input, in_turn
from perf.yardsticks.compare_peer import Peer
from perf.yardsticks.compare_usage import Meter
from perf.yardsticks.flink import Flink
from shuffle.errors import ShuffleError
from shuffle.examples.activity import COLUMNS, KEY_COLUMNS, TABLE
from shuffle.examples.local import PROJECT, LocalSystem
from shuffle.examples.spark_pipeline import Mappers
from shuffle.examples.workload import SCHEMA, difference
from shuffle.statestore import StateClient

MAPPERS = 2
REDUCERS = 2
RESPONSE_TIMEOUT_S = 400.0
READ_BATCHES = 2
"""The number of batches of the input that a mapper of this project reads at once."""
FILES_PER_BATCH = 2
"""The number of files in a micro-batch of Spark: one for each core."""


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


def correct(expected: pa.Table, actual: pa.Table, system: str) -> None:
    verdict = difference(expected, actual.select(COLUMNS))
    if not verdict.exact:
        raise ShuffleError(f"the result of {system} is wrong, so its time does not count: {verdict}")


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


class Ours(Base):
    """This project: one store for all runs, and for each run new mappers and reducers and a queue filled beforehand."""

    def __init__(self, given: Input, folder: Path, stack: ExitStack) -> None:
        super().__init__(given)
        self.system = stack.enter_context(LocalSystem(folder))
        self.state: StateClient = stack.enter_context(self.system.connect())
        # The rows are made once: making them costs more than appending them.
        made = in_turn(given.workload, given.rows, MAPPERS, given.batch_rows)
        self._batches = list(made)
        buckets = Buckets(MAPPERS, REDUCERS, KEY_COLUMNS)
        for partition, batch in self._batches:
            buckets.add(partition, batch)
        self._buckets = buckets.close()
        self._runs = 0

    def spec(self, mapper: str, reducer: str) -> dict[str, Any]:
        """A spec over a new queue, which is filled here."""
        self._runs += 1
        name = f"run-{self._runs}"
        fill_with(self.state, name, SCHEMA, self._batches)
        return {
            "processor": name,
            "input": {"queue": name},
            "mapper": {
                "class": mapper,
                "memory": "128MiB",
                "batch_rows_max": READ_BATCHES * self._input.batch_rows,
                "batch_bytes_max": "32MiB",
            },
            "reducer": {"class": reducer, "count": REDUCERS},
            "metrics": False,
        }

    def count(self) -> Run:
        return self._processed("perf.common.jobs:KeyAndTime", "examples.activity:DeclaredCountByUser", counted=True)

    def repartition(self) -> Run:
        """Repartition the rows. There is no table to compare: the positions show that each row was committed by the
        reducer it belongs to."""
        return self._processed("perf.common.jobs:WholeRows", "perf.common.jobs:KeepNothing", counted=False)

    def _processed(self, mapper: str, reducer: str, counted: bool) -> Run:
        system = "this project"
        spec = self.spec(mapper, reducer)
        roots = [self.system.store_pid]
        with Meter(lambda: roots) as meter:
            seen = watched(self.system, self.state, spec, self._buckets, lambda started: roots.append(started.pid))
        if counted:
            self.check(system)
        forget(self.state, spec["processor"], spec["processor"], TABLE)
        return self._run(meter, seen.begin_s, seen.end_s, seen.rows, seen.started_s, system)

    def check(self, system: str) -> None:
        correct(self._input.expected, self.state.scan(TABLE).read_all(), system)


class Spark(Base):
    """Spark in its own process: alone, and with this project's reducers as its tasks."""

    def __init__(self, given: Input, folder: Path, stack: ExitStack, ours: Ours | None) -> None:
        super().__init__(given)
        self._ours = ours
        self._folder = folder
        self._stack = stack
        self._asked = 0

    @cached_property
    def peer(self) -> Peer:
        """Spark's process. It is started when it is first needed, not while another system is measured."""
        python = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        command = [sys.executable, "-m", "perf.yardsticks.spark_alone", str(self._folder)]
        peer = Peer("spark", command, self._folder, {"PYTHONPATH": str(PROJECT), **python})
        self._stack.callback(peer.close)
        return peer

    def count(self) -> Run:
        run, _ = self._asked_for("count")
        to = self._folder / "spark-counted.parquet"
        self.peer.call(RESPONSE_TIMEOUT_S, job="counted", to=str(to))
        correct(self._input.expected, pq.read_table(to), "Spark")
        to.unlink()
        return run

    def repartition(self) -> Run:
        run, reply = self._asked_for("repartition")
        if reply["rows_behind"] != self._input.rows:
            raise ShuffleError(f"Spark repartitioned {reply['rows_behind']} rows of {self._input.rows}")
        return run

    def _asked_for(self, job: str) -> tuple[Run, dict[str, Any]]:
        pid = (
            self.peer.pid
        )  # Starts the peer here: it ends with the thread that has started it, and the meter's thread ends soon.
        with Meter(lambda: [pid]) as meter:
            reply, started_s = self._ask(job=job, parquet=str(self._input.parquet), files_per_batch=FILES_PER_BATCH)
            meter.stop_counting_bytes()
        return self._measured(meter, reply, started_s, "Spark"), reply

    def _ask(self, **request: Any) -> tuple[dict[str, Any], float]:
        started_s = self.peer.started_s if not self._asked else time.time()
        self._asked += 1
        reply = self.peer.call(RESPONSE_TIMEOUT_S, **request)
        if reply["rows"] != self._input.rows:
            raise ShuffleError(f"Spark read {reply['rows']} rows of {self._input.rows}")
        return reply, started_s

    def _measured(self, meter: Meter, reply: dict[str, Any], started_s: float, system: str) -> Run:
        rows = reply["rows"] - reply["rows_first"]
        return self._run(meter, reply["begin_s"], reply["end_s"], rows, started_s, system)

    def reduce_stream(self, batch_rows: int) -> Run:
        """Run mappers as processes and reducers as Spark's tasks."""
        assert self._ours is not None
        spec = self._ours.spec("perf.common.jobs:KeyAndTime", "examples.activity:DeclaredCountByUser")
        system, name = self._ours.system, spec["processor"]
        roots = [self.peer.pid, system.store_pid]
        with Meter(lambda: roots) as meter, ExitStack() as stack:
            mappers = stack.enter_context(Mappers(system, system.write_spec(spec), MAPPERS))
            roots.extend(mappers.pids)
            reply, started_s = self._ask(job="reduce_stream", spec=str(mappers.spec), batch_rows=batch_rows)
        self._ours.check("this project under Spark")
        forget(self._ours.state, name, name, TABLE)
        return self._measured(meter, reply, started_s, "this project under Spark")


class FlinkCount(Base):
    def __init__(self, given: Input, folder: Path, stack: ExitStack, python: Path) -> None:
        super().__init__(given)
        self._folder, self._stack, self._python = folder, stack, python
        self._asked = 0

    @cached_property
    def _flink(self) -> Flink:
        flink = Flink(self._python, self._folder, self._input.csv)
        self._stack.callback(flink.close)
        return flink

    def count(self) -> Run:
        run = self.run("count")
        correct(self._input.expected, self._flink.counted(), "Flink")
        return run

    def run(self, job: str) -> Run:
        """Run a job whose result is not checked: a part of the count, for the details."""
        started_s = self._flink.peer.started_s if not self._asked else time.time()
        self._asked += 1
        with Meter(lambda: [self._flink.peer.pid]) as meter:
            begin_s, rows_first, end_s = self._flink.run(job)
            meter.stop_counting_bytes()
        return self._run(meter, begin_s, end_s, self._input.rows - rows_first, started_s, "Flink")
