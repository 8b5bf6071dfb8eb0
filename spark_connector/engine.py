"""Spark as the cluster: every mapper process and reducer is one long-lived task of one Spark job.

Spark places the tasks and starts them again, on another executor when one is lost; workers find each other through
discovery, as they do without Spark. A task that is killed is a worker that is killed: what it had in memory is read and
mapped again. Exporters, if rows go to a place outside of the store, are processes beside the driver: they need no
slot, and the libraries of their sinks are where the driver is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pyspark import InheritableThread, TaskContext
from pyspark.sql import SparkSession

from shuffle.durable.query_lease import refuse_beside_query
from shuffle.errors import ShuffleError, SpecError, StoreUnavailable
from shuffle.mapper.readers.opening import open_input
from shuffle.preflight.check import check_against_store
from shuffle.run.controller import (
    STATE_ENVIRONMENT,
    RunOptions,
    death_of,
    hopeless,
    log_folder,
    not_deterministic,
    served_store,
)
from shuffle.run.dead_letters import dead_letter_note
from shuffle.run.determinism import check_map
from shuffle.run.drain import drain_goal, is_drained
from shuffle.run.exporters import exporter_children
from shuffle.run.supervisor import Supervisor
from shuffle.spec.config import ProcessorSpec
from shuffle.spec.index_sets import indexes_text, share_out
from shuffle.statestore import StateClient
from shuffle.support.endpoint import Endpoint, bracketed, host_towards
from shuffle.support.logs import setup_logging
from shuffle.support.retry import doubled_s

SLOTS_WAIT_S = 60.0
"""The time in seconds that the executors may take to come up."""

LOOK_S = 0.5
"""The time in seconds between two looks at the job, the slots or the input."""

TASK_FAILURES_MAX = 100
"""The number of failures of one worker after which Spark ends the job. They are far apart: see ``RESTART_S_MAX``."""

RESTART_S_MIN = 0.2
RESTART_S_MAX = 10.0
"""Bounds of the wait in seconds before a worker that has failed runs again; the wait doubles with each failure."""

CANCEL_S_MAX = 10.0
"""The longest time in seconds that is spent on cancelling the job."""

DEATHS_SAID_MAX = 1_000
"""The most different deaths of processes beside the job that are reported."""

JOB_GROUP = "shuffle-workers"


def run_on_spark(
    spec: ProcessorSpec,
    master: str,
    options: RunOptions = RunOptions(),  # noqa: B008
    *,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> int:
    """Run a processor's workers on ``master`` until it is drained or stopped; returns the exit code of ``shuffle run``.

    1. Connect to the store; if the spec names a folder and the master is local, start a daemon for it.
    2. Check the spec against the store, and that the cluster has a slot for each worker: all workers must run at the
       same time.
    3. Start the exporters, if there is work for them, and the job, and watch them.
    4. End after Ctrl-C or SIGTERM, when the input is drained, or when a worker has failed too often.
    """
    if spec.state_folder is not None and not master.startswith("local"):
        raise SpecError(
            f"{spec.at('state')}: executors on other machines cannot open the folder {spec.state}: start "
            "`shuffle statestore` where they can reach it, and give its address (grpc://host:port)"
        )
    supervisor = Supervisor()
    with ExitStack() as stack:
        stack.callback(supervisor.kill)
        logs = stack.enter_context(log_folder(spec))
        spec = stack.enter_context(served_store(spec, supervisor, logs))  # 1
        client = stack.enter_context(spec.open_state())
        stop = _StopRequest()
        stack.enter_context(_handled(stop))
        mapper_count = check_against_store(spec, client, options.accept_new_map)  # 2
        if options.reducers:
            refuse_beside_query(client, spec.processor)
        _check_first_rows(spec, client, mapper_count, options)
        goal = None
        if options.until_drained:
            goal = drain_goal(stack.enter_context(open_input(spec, client)), mapper_count)
        reducer_count = spec.reducer.count if options.reducers else 0
        if not stop.is_set():
            beside = stack.enter_context(_exporters(spec, client, supervisor, logs, options, say))  # 3
            spark = _session(spec, master)
            stack.callback(spark.stop)
            stack.enter_context(_handled(stop))  # Again: a new session has installed its own handler instead of ours.
            _wait_for_slots(spark, len(share_out(mapper_count, spec.mapper.per_process)) + reducer_count, say)
            job = _Job(spark, spec, mapper_count, reducer_count)
            job.start()
            stack.callback(job.cancel)
            say(f"{spec.processor}: {mapper_count} mappers and {reducer_count} reducers as tasks of {master}")
            while not stop.wait(LOOK_S):  # 4
                job.check()
                beside()
                with contextlib.suppress(StoreUnavailable):
                    if goal is not None and is_drained(goal, spec, client):
                        say(f"{spec.processor}: drained{dead_letter_note(spec, client)}")
                        return 0
            say(f"{spec.processor}: stopped; it goes on from here when it is run again{dead_letter_note(spec, client)}")
        return 128 + signal.SIGINT if stop.number == signal.SIGINT else 0


@contextlib.contextmanager
def _exporters(
    spec: ProcessorSpec,
    client: StateClient,
    supervisor: Supervisor,
    logs: Path,
    options: RunOptions,
    say: Callable[[str], None],
) -> Iterator[Callable[[], None]]:
    """Run the exporters of the processor, and what else the supervisor keeps. In the block, call what this yields now
    and then: it starts again what has died, and raises if that is of no use. They stop after the job, cleanly."""
    os.environ[STATE_ENVIRONMENT] = spec.state
    children = [supervisor.add(child) for child in exporter_children(spec, client, logs, options.until_drained)]
    said: set[str] = set()

    def look() -> None:
        for child in supervisor.tick(time.monotonic()):
            line = death_of(child)
            if line not in said and len(said) < DEATHS_SAID_MAX:
                said.add(line)
                say(f"{spec.processor}: {line}")
        failure = hopeless(spec, supervisor, options.until_drained)
        if failure is not None:
            raise failure

    try:
        yield look
    finally:
        supervisor.stop(children)
        os.environ.pop(STATE_ENVIRONMENT, None)


def _check_first_rows(spec: ProcessorSpec, client: StateClient, mapper_count: int, options: RunOptions) -> None:
    if options.check:
        difference = check_map(spec, client, mapper_count, partitions_max=1).difference
        if difference is not None:
            raise SpecError(not_deterministic(spec, difference))


class _StopRequest(threading.Event):
    """Set once SIGINT or SIGTERM has come."""

    number: int | None = None
    """The number of the signal that came first; None if none has come."""

    def handle(self, number: int, _frame: Any) -> None:
        if self.is_set():
            # A second signal ends the process at once. The JVM and the store end with it.
            os._exit(128 + number)
        self.number = number
        self.set()


@contextlib.contextmanager
def _handled(stop: _StopRequest) -> Iterator[None]:
    """Pass SIGINT and SIGTERM to ``stop`` inside the block. Only the main thread can have handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Job:
    """The Spark job whose tasks are the workers; a thread of its own waits for it."""

    def __init__(self, spark: SparkSession, spec: ProcessorSpec, mapper_count: int, reducer_count: int) -> None:
        self._context = spark.sparkContext
        # In a local session the workers' stderr is this terminal; on a cluster it is the log of an executor.
        level = "warning" if _is_local(str(self._context.master)) else "info"
        self._work = partial(run_worker, spec, mapper_count, level)
        self._tasks = len(share_out(mapper_count, spec.mapper.per_process)) + reducer_count
        self._error: BaseException | None = None
        self._ended = False
        self._thread = InheritableThread(target=self._run, name="spark-job", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._context.setJobGroup(JOB_GROUP, "mappers and reducers", interruptOnCancel=True)
            self._context.parallelize(range(self._tasks), self._tasks).mapPartitionsWithIndex(self._work).collect()
        except BaseException as error:
            self._error = error
        self._ended = True

    def check(self) -> None:
        if self._ended:
            lines = str(self._error or "all tasks ended").strip().splitlines()
            ours = [line.strip() for line in lines if "ShuffleError" in line]
            raise ShuffleError(f"the job on Spark has ended: {ours[-1] if ours else lines[0]}")

    def cancel(self) -> None:
        """End the tasks. Spark's logging is off meanwhile: it would report every cancelled task as an error."""
        self._context.setLogLevel("OFF")
        deadline_s = time.monotonic() + CANCEL_S_MAX
        # In a loop, because Spark does not find a job by its group when it has only just been submitted.
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            self._context.cancelJobGroup(JOB_GROUP)
            self._thread.join(LOOK_S)


def _session(spec: ProcessorSpec, master: str) -> SparkSession:
    spark = (
        SparkSession.builder.master(master)
        .appName(f"shuffle {spec.processor}")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.task.maxFailures", str(TASK_FAILURES_MAX))
        # Speculation would start a second instance of a slow worker, and the two would only hinder each other.
        .config("spark.speculation", "false")
        .config("spark.python.worker.reuse", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _is_local(master: str) -> bool:
    """Whether the tasks run on this machine, as children of this driver's JVM."""
    return master.startswith("local") and not master.startswith("local-cluster")


def _wait_for_slots(spark: SparkSession, workers: int, say: Callable[[str], None]) -> None:
    """Wait until there is a task slot for each worker.

    Executors of a cluster come up one by one; a local master has all its slots from the start.
    """
    master = str(spark.sparkContext.master)
    deadline_s = time.monotonic() + (0.0 if _is_local(master) else SLOTS_WAIT_S)
    reported = False
    while (slots := spark.sparkContext.defaultParallelism) < workers:
        if time.monotonic() < deadline_s and not reported:
            reported = True
            say(
                f"waiting for {workers} task slots, one for each worker: {master} has {slots} so far. This gives up "
                f"after {SLOTS_WAIT_S:g} s"
            )
        if time.monotonic() >= deadline_s:
            raise SpecError(
                f"{workers} workers need {workers} task slots, and {master} has {slots}: give it more "
                "cores, or use fewer reducers or partitions"
            )
        time.sleep(LOOK_S)


def run_worker(spec: ProcessorSpec, mapper_count: int, log_level: str, index: int, _rows: Iterator[int]) -> NoReturn:
    """One task: it runs the mappers of one process, or one reducer, until it is killed. Raises if they end."""
    os.environ.setdefault("SHUFFLE_LOG_LEVEL", log_level)
    context: Any = TaskContext.get()
    attempt = context.attemptNumber() if context is not None else 0
    if attempt:
        time.sleep(doubled_s(RESTART_S_MIN, RESTART_S_MAX, attempt))
    mapper_processes = share_out(mapper_count, spec.mapper.per_process)
    if index < len(mapper_processes):
        from shuffle.mapper.daemon import run as run_mapper

        hosted = mapper_processes[index]
        name = f"mapper {indexes_text(hosted)}"
        # Listen on the network over which this host reaches the store: other tasks can reach that one as well.
        here = Endpoint(host_towards(Endpoint.parse(spec.state)), 0)
        code = run_mapper(spec, hosted, listen=here.target, advertise=bracketed(here.host))
    else:
        from shuffle.reducer.daemon import run as run_reducer

        reducer_index = index - len(mapper_processes)
        name = f"reducer {reducer_index}"
        setup_logging("reducer", spec.processor, reducer_index)
        code = run_reducer(spec, reducer_index)
    raise ShuffleError(f"{name} ended with exit code {code}: its error is in the log of the executor")
