"""``shuffle run``: starts, watches and stops the store (if it is embedded), mappers, reducers and exporters.

1. The store: if ``state`` is a folder that no daemon serves, one is started for it. If a daemon that another process
   has started serves it and ends, one is started in its place.
2. The spec is checked against the store, and ``map`` on a sample of the input; nothing else runs before that.
3. Mappers, reducers and, if rows go to a place outside of the store, exporters are started; processes that die are
   started again, after waits that grow.
4. The end: Ctrl-C, SIGTERM, or ``--until-drained`` and everything is committed. Reducers stop first, so that the rows
   they have fetched are still acknowledged; then the exporter, which publishes what they have emitted; then mappers,
   which persist their positions; then the store.

If a controller is killed, its children are killed, too (``shuffle.run.launch``); the durable state is enough to go on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shuffle.durable.query_lease import refuse_beside_query
from shuffle.errors import ShuffleError, SpecError, StoreUnavailable, UserCodeError
from shuffle.mapper.readers.opening import open_input
from shuffle.preflight.check import check_against_store
from shuffle.run.dead_letters import dead_letter_note
from shuffle.run.determinism import Difference, check_map
from shuffle.run.drain import DrainGoal, drain_goal, is_drained
from shuffle.run.exporters import exporter_children
from shuffle.run.growth import Growth
from shuffle.run.status import ProcessorStatus, StatusCollector
from shuffle.run.store_service import StoreKeeper, log_folder, open_client, require_store, served_store, serving_address
from shuffle.run.supervisor import Child, RestartPolicy, Supervisor
from shuffle.run.terminal import ChildView, Rates, progress_line, render
from shuffle.spec.config import ProcessorSpec
from shuffle.spec.index_sets import indexes_text, share_out, share_out_of
from shuffle.support.exit_codes import EXIT_SPEC, EXIT_USER_CODE
from shuffle.support.logs import get_logger

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

STATE_ENVIRONMENT = "SHUFFLE_STATE"
"""The environment variable with which workers get the address of the store."""
MODULES = {"mapper": "shuffle.mapper", "reducer": "shuffle.reducer"}
"""The Python module that a worker of each role runs."""
TICK_S = 0.1
"""Seconds between two rounds of the loop that watches the processes."""
LOOK_S = 1.0
"""Seconds between two updates of the screen."""
LINE_S = 5.0
"""Seconds between two lines of progress where there is no screen."""
DRAIN_LOOK_S = 0.25
"""Seconds between two checks whether the input is drained."""
CHECK_RETRY_S = 2.0
"""Seconds before ``map`` is checked again if there was no input to check it on."""

_log = get_logger(__name__)

__all__ = [
    "Controller",
    "RestartPolicy",
    "RunOptions",
    "death_of",
    "hopeless",
    "serving_address",
    "log_folder",
    "require_store",
    "run",
    "served_store",
]


# The controller ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of ``shuffle run``."""

    until_drained: bool = False
    """True to end once all input that was there at the start has been committed."""
    screen: bool = True
    """True for a screen that is updated, False for lines of progress."""
    check: bool = True
    """True to check on a sample of the input that ``map`` is deterministic."""
    accept_new_map: bool = False
    """True to go on with a changed ``map`` over existing state, if that cannot lose or double rows."""
    reducers: bool = True
    """False to start mappers only: Spark reads their rows, or runs the reducers as its tasks."""


class Controller:
    """Runs one processor until it is stopped, is drained, or cannot go on."""

    def __init__(self, spec: ProcessorSpec, options: RunOptions, say: Callable[[str], None]) -> None:
        self._given = spec
        self._options = options
        self._say = say
        self._supervisor = Supervisor()
        self._stop = threading.Event()
        self._signal: int | None = None
        self._failure: ShuffleError | None = None
        self._rates = Rates()
        self._status: ProcessorStatus | None = None
        self._reported: set[str] = set()
        self._keeper: StoreKeeper | None = None
        self._ending = ""

    def interrupt(self, number: int, _frame: Any = None) -> None:
        """The signal handler. The first signal ends the run in order, the second kills all processes."""
        if self._stop.is_set():
            self._supervisor.kill()
        self._signal = number
        self._stop.set()

    def run(self) -> int:
        """Runs until the end and returns the exit code: 0 if drained or stopped by SIGTERM, 130 after Ctrl-C. Raises
        ``ShuffleError`` when it cannot go on."""
        with log_folder(self._given) as logs:
            try:
                with served_store(self._given, self._supervisor, logs) as spec:  # 1
                    os.environ[STATE_ENVIRONMENT] = spec.state
                    if self._given.state_folder is not None and not self._supervisor.children:
                        self._keeper = StoreKeeper(
                            self._given.state_folder,
                            spec.state,
                            self._supervisor,
                            logs,
                            spec.store_metrics_port(),
                        )
                    with open_client(spec) as client:
                        self._run_processor(spec, client, logs)
            finally:
                os.environ.pop(STATE_ENVIRONMENT, None)
                self._supervisor.kill()  # No process of ours is left behind, whatever happened.
            if self._failure is not None:
                raise self._failure
        return 128 + signal.SIGINT if self._signal == signal.SIGINT else 0

    def _run_processor(self, spec: ProcessorSpec, client: StateClient, logs: Path) -> None:
        mapper_count = check_against_store(spec, client, self._options.accept_new_map)  # 2
        if self._options.reducers:
            refuse_beside_query(client, spec.processor)
        checked = not self._options.check or self._check_first_rows(spec, client, mapper_count)
        if not self._options.until_drained:
            self._run_workers(spec, client, logs, mapper_count, checked, None)
            return
        with open_input(spec, client) as source:
            self._run_workers(spec, client, logs, mapper_count, checked, drain_goal(source, mapper_count))

    def _run_workers(
        self,
        spec: ProcessorSpec,
        client: StateClient,
        logs: Path,
        mapper_count: int,
        checked: bool,
        goal: DrainGoal | None,
    ) -> None:
        if self._stop.is_set():
            return
        reducer_count = spec.reducer.count if self._options.reducers else 0
        hosted = {
            "mapper": share_out(mapper_count, spec.mapper.per_process),
            "reducer": share_out(reducer_count, spec.reducer.per_process),
        }
        workers = {role: [self._start(role, indexes, logs) for indexes in of] for role, of in hosted.items()}  # 3
        exporters = exporter_children(spec, client, logs, self._options.until_drained)
        workers["exporter"] = [self._supervisor.add(child) for child in exporters]
        self._say(f"{spec.processor}: {mapper_count} mappers, {reducer_count} reducers, logs in {logs}")
        growth = None if goal is not None else Growth(spec, client, mapper_count)
        try:
            with StatusCollector(spec, client) as collector:
                self._watch(
                    spec,
                    client,
                    collector,
                    goal,
                    checked,
                    mapper_count,
                    lambda now_s: self._grow(spec, growth, workers["mapper"], logs, now_s),
                )
        finally:
            if self._signal is not None:
                self._say(f"{spec.processor}: stopping; a second Ctrl-C kills what is left")
                self._ending = "stopped; the next `shuffle run` goes on from here"
            for role in ("reducer", "exporter", "mapper"):  # 4
                self._supervisor.stop(workers[role])
        if self._ending:
            self._say(f"{spec.processor}: {self._ending}{dead_letter_note(spec, client)}")

    def _grow(self, spec: ProcessorSpec, growth: Growth | None, mappers: list[Child], logs: Path, now_s: float) -> None:
        """Starts mappers for partitions that the input has got since. Reducers notice them by themselves."""
        new = range(0) if growth is None else growth.look(now_s)
        if new:
            mappers += [self._start("mapper", indexes, logs) for indexes in share_out_of(new, spec.mapper.per_process)]
            self._say(f"{spec.processor}: the input has {len(new)} more partitions: {new.stop} mappers now")

    def _start(self, role: str, indexes: Sequence[int], logs: Path) -> Child:
        """Starts one process that hosts the workers ``indexes``."""
        text = indexes_text(indexes)
        arguments = [os.fspath(self._given.path), "--index", text]
        workers = [f"{role} {index}" for index in indexes]
        log_path = logs / f"{role}-{text}.log"
        child = Child(f"{role} {text}", MODULES[role], lambda: arguments, log_path, workers=workers)
        return self._supervisor.add(child)

    def _check_first_rows(self, spec: ProcessorSpec, client: StateClient, mapper_count: int) -> bool:
        """Checks ``map`` and returns whether there were rows to check it on. Raises ``SpecError`` if it is not
        deterministic."""
        result = check_map(spec, client, mapper_count, partitions_max=1)
        if result.difference is not None:
            raise SpecError(not_deterministic(spec, result.difference))
        return result.rows > 0

    def _watch(
        self,
        spec: ProcessorSpec,
        client: StateClient,
        collector: StatusCollector,
        goal: DrainGoal | None,
        checked: bool,
        mapper_count: int,
        grow: Callable[[float], None],
    ) -> None:
        began_s = time.monotonic()
        look = _Every(LOOK_S if self._options.screen else LINE_S)
        drain, check, keep = _Every(DRAIN_LOOK_S), _Every(CHECK_RETRY_S), _Every(LOOK_S)
        checking: Future[bool] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="check") as pool, _screen(self._options.screen) as show:
            while not self._stop.wait(TICK_S):
                now_s = time.monotonic()
                for child in self._supervisor.tick(now_s):
                    self._report_death(child)
                if self._keeper is not None and keep.due(now_s) and self._keeper.look(now_s):
                    self._say(f"{spec.processor}: the state store that others had started is gone: serving it")
                self._give_up_if_hopeless(spec)
                grow(now_s)
                if not checked and checking is None and check.due(now_s):
                    checking = pool.submit(self._check_first_rows, spec, client, mapper_count)
                if checking is not None and checking.done():
                    checked, checking = self._take_check(checking), None
                if goal is not None and drain.due(now_s) and self._is_drained(goal, spec, client):
                    self._ending = f"drained after {now_s - began_s:.1f} s"
                    return
                if look.due(now_s) and self._look(collector, now_s):
                    show(self._picture()) if self._options.screen else self._say(self._line())

    def _take_check(self, checking: Future[bool]) -> bool:
        try:
            return checking.result()
        except SpecError as error:
            self._failure = error
            self._stop.set()
        except ShuffleError as error:
            _log.warning("map not checked", error=error)
        return False

    def _is_drained(self, goal: DrainGoal, spec: ProcessorSpec, client: StateClient) -> bool:
        try:
            return is_drained(goal, spec, client)
        except StoreUnavailable as error:
            _log.warning("store not reached", error=error)
            return False

    def _look(self, collector: StatusCollector, now_s: float) -> bool:
        try:
            self._status = collector.collect()
        except ShuffleError as error:
            _log.warning("no look at the processor", error=error)
            return False
        self._rates.note(now_s, self._status)
        return True

    def _picture(self) -> Any:
        assert self._status is not None
        children = {
            worker: ChildView(child.running, child.policy.restarts, child.last_error, child.name)
            for child in self._supervisor.children
            for worker in child.workers or [child.name]
        }
        return render(self._status, self._rates, children, note="Ctrl-C ends it")

    def _line(self) -> str:
        assert self._status is not None
        restarts = sum(child.policy.restarts for child in self._supervisor.children)
        return progress_line(self._status, self._rates, restarts, self._options.reducers)

    def _report_death(self, child: Child) -> None:
        """Prints each reason once, so that a worker that keeps dying does not hide all other output."""
        text = death_of(child)
        key = text.split("(")[0] + str(child.last_error)
        if not self._options.screen and key not in self._reported and len(self._reported) < 1_000:
            self._reported.add(key)
            self._say(text)

    def _give_up_if_hopeless(self, spec: ProcessorSpec) -> None:
        """Ends the run with an error if a worker keeps dying and it is no use to wait for it."""
        failure = hopeless(spec, self._supervisor, self._options.until_drained)
        if failure is not None:
            self._failure = failure
            self._stop.set()


def death_of(child: Child) -> str:
    """A line for people about a process that has died."""
    if child.policy.keeps_dying:
        return f"{child.name} keeps dying ({child.policy.deaths} times in a row): {child.last_error}"
    return f"{child.name} died: {child.last_error}; starting it again"


def hopeless(spec: ProcessorSpec, supervisor: Supervisor, until_drained: bool) -> ShuffleError | None:
    """The error of a process that keeps dying and that it is no use to wait for; None if there is none."""
    for child in supervisor.keeps_dying():
        if child.last_code == EXIT_SPEC:
            return SpecError(f"{child.name}: {child.last_error}")
        if until_drained:
            deaths = child.policy.deaths
            error_type = UserCodeError if child.last_code == EXIT_USER_CODE else ShuffleError
            return error_type(
                f"{spec.processor}: not drained: {child.name} died {deaths} times in a row: {child.last_error}",
                worker=child.name,
            )
    return None


def not_deterministic(spec: ProcessorSpec, difference: Difference) -> str:
    """The error text for a ``map`` that is not deterministic."""
    return (
        f"{spec.at('mapper.class')}: {spec.mapper.class_name}.map is not deterministic row by row: {difference};"
        " after a crash rows are mapped again, and would not be the same"
    )


@dataclass(slots=True)
class _Every:
    """Says when an action that is repeated with a period is due."""

    period_s: float
    next_s: float = 0.0

    def due(self, now_s: float) -> bool:
        if now_s < self.next_s:
            return False
        self.next_s = now_s + self.period_s
        return True


@contextmanager
def _screen(enabled: bool) -> Iterator[Callable[[Any], None]]:
    if not enabled:
        yield lambda picture: None
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False, transient=False) as live:
        yield lambda picture: live.update(picture, refresh=True)


def run(spec: ProcessorSpec, options: RunOptions, signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM)) -> int:
    """Runs the controller in this process, with its signal handlers installed, and returns its exit code."""
    controller = Controller(spec, options, say=lambda line: print(line, file=sys.stderr, flush=True))
    before = {number: signal.signal(number, controller.interrupt) for number in signals}
    try:
        return controller.run()
    finally:
        for number, handler in before.items():
            with suppress(TypeError):
                signal.signal(number, handler)
