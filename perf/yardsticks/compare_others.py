"""The other systems of ``perf.compare``, each in a process of its own: Spark, Spark's real-time mode, Flink."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from perf.common.progress import CommitClock, forget
from perf.common.workload_files import Input
from perf.yardsticks import realtime_source
from perf.yardsticks.compare_peer import Peer
from perf.yardsticks.compare_systems import MAPPERS, REDUCERS, Base, Ours, Run
from perf.yardsticks.compare_usage import Meter
from perf.yardsticks.flink import Flink
from shuffle.errors import ShuffleError
from shuffle.examples.local import PROJECT
from shuffle.examples.spark_pipeline import Mappers

RESPONSE_TIMEOUT_S = 400.0
FILES_PER_BATCH = 2
"""The number of files in a micro-batch of Spark: one for each core."""
REALTIME_BATCH_S = 5
"""How long a batch of real-time mode lasts, in seconds: the least that Spark allows, so that it commits most often."""


class SparkProcess:
    """One process of Spark for all its jobs. It is started when it is first needed, not while another is measured."""

    def __init__(self, module: str, folder: Path, stack: ExitStack, *arguments: str) -> None:
        self._module, self._folder, self._stack, self._arguments = module, folder, stack, arguments
        self._asked = 0

    @cached_property
    def peer(self) -> Peer:
        python = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        command = [sys.executable, "-m", f"perf.yardsticks.{self._module}", str(self._folder), *self._arguments]
        peer = Peer(self._module, command, self._folder, {"PYTHONPATH": str(PROJECT), **python})
        self._stack.callback(peer.close)
        return peer

    def ask(self, **request: Any) -> tuple[dict[str, Any], float]:
        """The response, and when the clock of the start-up began: for the first request, when the process did."""
        started_s = self.peer.started_s if not self._asked else time.time()
        self._asked += 1
        return self.peer.call(RESPONSE_TIMEOUT_S, **request), started_s


class Spark(Base):
    """Spark in its own process: alone, and with this project's reducers as its tasks."""

    def __init__(self, given: Input, folder: Path, process: SparkProcess, ours: Ours | None) -> None:
        super().__init__(given)
        self._ours = ours
        self._folder = folder
        self._process = process

    def count(self, partitions: int = REDUCERS) -> Run:
        run, _ = self._asked_for("count", partitions)
        self._process.peer.call(RESPONSE_TIMEOUT_S, job="counted", to=str(self._counted))
        checked(self._input, self._counted, "Spark")
        return run

    def repartition(self) -> Run:
        run, reply = self._asked_for("repartition", REDUCERS)
        if reply["rows_behind"] != self._input.rows:
            raise ShuffleError(f"Spark repartitioned {reply['rows_behind']} rows of {self._input.rows}")
        return run

    def _source(self) -> dict[str, Any]:
        """Where the process finds the rows."""
        return {"parquet": str(self._input.parquet), "files_per_batch": FILES_PER_BATCH}

    @property
    def _counted(self) -> Path:
        return self._folder / "spark-counted.parquet"

    def _asked_for(self, job: str, partitions: int) -> tuple[Run, dict[str, Any]]:
        pid = (
            self._process.peer.pid
        )  # Starts the peer here: it ends with the thread that has started it, and the meter's thread ends soon.
        with Meter(lambda: [pid]) as meter:
            reply, started_s = self._process.ask(
                job=job, question=self._input.question.name, partitions=partitions, **self._source()
            )
            meter.stop_counting_bytes()
        return self._measured(meter, reply, started_s, "Spark"), reply

    def _measured(self, meter: Meter, reply: dict[str, Any], started_s: float, system: str) -> Run:
        if reply["rows"] != self._input.rows:
            raise ShuffleError(f"Spark read {reply['rows']} rows of {self._input.rows}")
        rows = reply["rows"] - reply["rows_first"]
        return self._run(meter, reply["begin_s"], reply["end_s"], rows, started_s, system)

    def reduce_stream(self) -> Run:
        """Run mappers as processes and reducers as Spark's tasks; the clock is that of this project alone."""
        assert self._ours is not None
        ours, question = self._ours, self._input.question
        spec = ours.spec(question.mapper, question.reducer)
        name = spec["processor"]
        roots = [self._process.peer.pid, ours.system.store_pid]
        with Meter(lambda: roots) as meter, ExitStack() as stack:
            mappers = stack.enter_context(Mappers(ours.system, ours.system.write_spec(spec), MAPPERS))
            roots.extend(mappers.pids)
            clock = stack.enter_context(CommitClock(ours.state, name, ours.buckets))
            self._process.ask(job="reduce_stream", spec=str(mappers.spec))
        seen = clock.watched()
        ours.check("this project under Spark")
        forget(ours.state, name, name, question.table)
        return self._run(meter, seen.begin_s, seen.end_s, seen.rows, seen.started_s, "this project under Spark")


def checked(given: Input, counted: Path, system: str) -> None:
    """Check a result that a process has written as Parquet, and remove the file."""
    given.question.check(given.expected, pq.read_table(counted), system)
    counted.unlink()


class SparkRealTime(Base):
    """Spark's real-time mode, in a process of its own: it needs a task slot for every task of both stages at once."""

    def __init__(self, given: Input, folder: Path, stack: ExitStack) -> None:
        super().__init__(given)
        self._counted = folder / "realtime-counted.parquet"
        self._process = SparkProcess("spark_realtime", folder, stack, str(realtime_source.compiled(folder)))

    def count(self) -> Run:
        pid = self._process.peer.pid
        with Meter(lambda: [pid]) as meter:
            reply, started_s = self._process.ask(
                job="count",
                files=",".join(map(str, self._input.arrow)),
                rows=self._input.rows,
                batch_s=REALTIME_BATCH_S,
                to=str(self._counted),
            )
            meter.stop_counting_bytes()
        checked(self._input, self._counted, "Spark's real-time mode")
        return self._run(meter, reply["begin_s"], reply["end_s"], reply["rows"], started_s, "Spark's real-time mode")


class FlinkProcess:
    """One process of Flink for all its jobs, started when it is first needed."""

    def __init__(self, python: Path, folder: Path, stack: ExitStack) -> None:
        self._python, self._folder, self._stack = python, folder, stack
        self.asked = 0

    @cached_property
    def flink(self) -> Flink:
        flink = Flink(self._python, self._folder)
        self._stack.callback(flink.close)
        return flink


class FlinkCount(Base):
    def __init__(self, given: Input, process: FlinkProcess) -> None:
        super().__init__(given)
        self._process = process

    def count(self, parallelism: int = REDUCERS) -> Run:
        run = self.run("count", parallelism)
        question = self._input.question
        question.check(self._input.expected, self._process.flink.counted(question.result), "Flink")
        return run

    def run(self, job: str, parallelism: int = REDUCERS) -> Run:
        """Run a job whose result is not checked: a part of the count, for the details."""
        flink = self._process.flink
        started_s = flink.peer.started_s if not self._process.asked else time.time()
        self._process.asked += 1
        with Meter(lambda: [flink.peer.pid]) as meter:
            begin_s, rows_first, end_s = flink.run(job, self._input.question.name, self._input.csv, parallelism)
            meter.stop_counting_bytes()
        return self._run(meter, begin_s, end_s, self._input.rows - rows_first, started_s, "Flink")
