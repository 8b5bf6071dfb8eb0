"""Programs that the tests of Spark run beside the shared session: the worked pipeline, and drivers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from shuffle.examples.local import LocalSystem
from shuffle.examples.processes import process_tree
from shuffle.examples.spark_pipeline import Mappers
from shuffle.examples.workload import SCHEMA, Workload
from tests.spark.killed_driver import BATCH_ROWS

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = 3 * BATCH_ROWS
MOMENTS = ("before", "after")
WAIT_S = 170


class Program:
    """A process with a log, gone with all its children at the end of the block."""

    def __init__(self, folder: Path, *command: str, **environment: str) -> None:
        self.folder = folder
        self._log = folder / "log"
        # A file, not a pipe: what a killed driver leaves behind would keep that open.
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> tuple[int, str]:
        """The exit code, and what it said."""
        return self._process.wait(WAIT_S), self._log.read_text()

    def close(self) -> None:
        for pid in reversed(process_tree(self._process.pid) if self._process.poll() is None else []):
            os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class PipelineRun(Program):
    """The pipeline, run once whoever asks: pytest's processes have the folder in common, and the first of them runs it.

    The exit code is left in a file, for those whose child it is not.
    """

    def __init__(self, folder: Path) -> None:
        leave_code = "import subprocess, sys; print(subprocess.call(sys.argv[2:]), file=open(sys.argv[1], 'w'))"
        command = [sys.executable, "-m", "examples.spark_pipeline", "--rows", "20000", "--seed", "5"]
        super().__init__(folder, "-c", leave_code, str(folder / "code"), *command, TMPDIR=str(folder))

    @staticmethod
    def result(folder: Path) -> tuple[int, str]:
        """What came of it, whoever ran it: its exit code, and what it said."""
        deadline_s = time.monotonic() + WAIT_S
        code = folder / "code"
        while not (code.exists() and code.read_text().endswith("\n")):
            assert time.monotonic() < deadline_s, (folder / "log").read_text()[-3000:]
            time.sleep(0.1)
        return int(code.read_text()), (folder / "log").read_text()


class KilledDrivers:
    """Two drivers, each with a processor of its own to read; one dies before the commit of batch 1, one after."""

    def __init__(self, system: LocalSystem, folder: Path) -> None:
        self.rows: pa.Table = Workload(with_user_share=1.0).rows(0, ROWS)
        self.mappers: dict[str, Mappers] = {}
        self.programs: dict[str, Program] = {}
        script = str(Path(__file__).parent / "killed_driver.py")
        for moment in MOMENTS:
            own = folder / moment
            own.mkdir()
            name = f"killed-{moment}"
            with system.connect() as state:
                state.create_queue(name, schema=SCHEMA, partitions=1).append(0, self.rows)
            spec = {
                "processor": name,
                "input": {"queue": name},
                "mapper": {"class": "examples.activity:ParseLogs", "trim_period": "50ms"},
                "reducer": {"class": "examples.activity:CountByUser", "count": 1},
                "lease_ttl": "2s",
                "metrics": False,
            }
            self.mappers[moment] = Mappers(system, system.write_spec(spec), 1)
            self.programs[moment] = Program(own, script, system.address, name, str(own), moment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for program in self.programs.values():
            program.close()
        for mappers in self.mappers.values():
            mappers.close()
