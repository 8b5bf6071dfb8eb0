"""Keyed processing without a second shuffle: a streaming query whose tasks are the reducers.

A task fetches its reducer's rows inside Spark's Python worker, runs the project's ``Reducer`` on them, and commits its
state together with the positions, as a reducer process does. The reducer's row in the store says what has been
processed, not Spark's checkpoint: a task that is run again, or twice at once, reads that row and changes nothing. What
goes to the JVM is one row for each task, or the rows that the reducer emits (``emitted``).

Because of that a task need not stop where its micro-batch ends: if the query does not limit its micro-batches and no
rows are emitted, the task goes on for a while with the rows that come next (``RUN_ON_S``). The micro-batch that has
these rows then finds them committed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from shuffle.api import WorkerSpec
from shuffle.durable.reducer_state import ReducerState
from shuffle.durable.spill_ends import done_row_indexes
from shuffle.errors import BadInput, RowsGone, ShuffleError, SplitBrain, StoreUnavailable
from shuffle.ids import MapperIndex, ReducerIndex, ShuffleIndex, new_guid
from shuffle.preflight.check import check_against_store
from shuffle.reducer.commit import Committer
from shuffle.reducer.core import ReduceBatch, ReducerCore, Settled
from shuffle.reducer.cycle import CycleEnvironment, ReduceCycle
from shuffle.reducer.daemon import limits_of
from shuffle.reducer.outputs.opening import emitter
from shuffle.reducer.outputs.routes import exporters_missing
from shuffle.reducer.pace import GATHER_S, IDLE_S
from shuffle.reducer.reduce import Reduced, ReduceStage
from shuffle.spark_connector.options import Options
from shuffle.spark_connector.schemas import arrow_schema, as_schema, spark_schema
from shuffle.spark_connector.sink.emitted import Emission, emitted_schema, prepare
from shuffle.spark_connector.source.processor import MapperProgress, Processor
from shuffle.spark_connector.source.query_lease import begin_task
from shuffle.spark_connector.source.reader import DriverSide, ReducerPart, StreamReaderBase, source_processor
from shuffle.spark_connector.waiting import Waiting, say
from shuffle.spec.config import ProcessorSpec
from shuffle.statestore import StateClient
from shuffle.support.retry import Backoff
from shuffle.user_code.create import create_reducer
from shuffle.user_code.load import load_class

SUMMARY_SCHEMA = pa.schema(
    [
        pa.field("reducer", pa.int32(), False),
        pa.field("rows", pa.int64(), False),
        pa.field("bytes", pa.int64(), False),
        pa.field("commits", pa.int64(), False),
        pa.field("dead_letters", pa.int64(), False),
    ]
)
"""The row that a task gives to Spark: what it has committed itself. A task that is run again commits little or
nothing."""

RUN_ON_S = 2.0
"""The time in seconds for which a task goes on behind the end of its micro-batch, as long as the mappers have rows.
Between two micro-batches Spark plans, writes its logs and starts tasks, which takes a few tenths of a second, in which
nothing is reduced."""

RESTARTS_MAX = 100
"""The number of times that a task begins again because another one has moved its reducer's row. Each time that other
one has made progress, so this does not go on for ever."""


def reduce_frame(spark: SparkSession, spec: str, **options: Any) -> DataFrame:
    """The reducers of ``spec`` as a streaming DataFrame; they run when a query over it runs.

    Its rows are one summary for each task; or, with the option ``emit``, the rows that the reducers append to that
    queue.
    """
    given = {name: str(value) for name, value in options.items()}
    return spark.readStream.format("shuffle").options(spec=str(spec), work="reduce", **given).load()


def reduce_stream(
    spark: SparkSession,
    spec: str,
    checkpoint: str,
    *,
    name: str | None = None,
    trigger: Mapping[str, Any] | None = None,
    then: Callable[[DataFrame], DataStreamWriter] | None = None,
    **options: Any,
) -> StreamingQuery:
    """Start a query that runs the reducers of ``spec`` as its tasks; ``trigger`` as for ``DataStreamWriter.trigger``.

    The mappers must be running; reducers must not. ``options`` are those of the streaming source, and ``emit``: a queue
    to which the reducers append, and whose rows the query then has. ``then`` makes the writer for the query's rows; by
    default they are discarded.
    """
    rows = reduce_frame(spark, spec, **options)
    writer = rows.writeStream.format("noop") if then is None else then(rows)
    writer = writer.option("checkpointLocation", checkpoint)
    if name is not None:
        writer = writer.queryName(name)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    return writer.start()


def output_schema(options: Options) -> StructType:
    queue = options.text("emit")
    if not queue:
        return spark_schema(SUMMARY_SCHEMA, "the summary")
    processor, _ = source_processor(options)
    return spark_schema(
        processor.store.with_retries(lambda client: emitted_schema(client, queue)), f"the queue {queue!r}"
    )


class ReduceStreamReader(StreamReaderBase):
    """Runs the reducers as tasks. Offsets are those of the source; the rows stay in the tasks."""

    commits = False

    def __init__(self, options: Options, schema: StructType) -> None:
        options.required("spec", "the processor's spec: its reducer class is what the tasks run")
        if options.text("metadataColumns"):
            raise BadInput("the option 'metadataColumns' is for reading rows; reducers hand over their own: leave it")
        super().__init__(options)
        self._emit = options.text("emit")
        self._schema = arrow_schema(schema)
        # Limits of a micro-batch are exact, and emitted rows belong to one micro-batch.
        self._runs_on = self._limits.rows_max is None and self._limits.bytes_max is None and not self._emit

    @property
    def driver(self) -> DriverSide:
        if self._driver is None:
            spec = self._loaded()
            self.processor.store.with_retries(lambda client: self._check(spec, client))
        return super().driver

    def _check(self, spec: ProcessorSpec, client: StateClient) -> None:
        check_against_store(spec, client)
        if missing := exporters_missing(spec, client):
            say(f"{spec.processor}: {missing}")
        if self._emit:
            prepare(client, spec.processor, self._emit, spec.reducer.count)

    def _loaded(self) -> ProcessorSpec:
        assert self.spec is not None
        return self.spec

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        driver = self.driver
        driver.refuse_others()
        ends, holder = self._indexes(end), driver.lease.holder.guid
        return [
            ReducerPart(reducer, [(mapper, -1, last, driver.hint(mapper)) for mapper, last in enumerate(ends)], holder)
            for reducer in range(driver.shape.reducer_count)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ReducerPart)
        begin_task(self.processor, partition.holder, partition.reducer)
        emission = None
        if self._emit:
            ends = {mapper: end for mapper, _, end, _ in partition.ranges}
            emission = Emission(self.processor.store, self.processor.name, self._emit, partition.reducer, ends)
        done = ReduceTask(self._loaded(), self.processor, partition, emission, self._runs_on).run()
        if emission is not None:
            for batch in emission.rows():
                yield as_schema(batch, self._schema)
            return
        yield pa.RecordBatch.from_pylist(
            [{"reducer": partition.reducer, **asdict(done)}],
            schema=SUMMARY_SCHEMA,
        )


@dataclass
class TaskCounts:
    """What one task has committed, counted by the cycle as the metrics of a reducer process are."""

    rows: int = 0
    bytes: int = 0
    commits: int = 0
    dead_letters: int = 0
    """The number of the rows that were set aside as dead letters."""

    def count_commit(self, rows: int, size_bytes: int, dead_letter_rows: int) -> None:
        self.rows += rows
        self.bytes += size_bytes
        self.commits += 1
        self.dead_letters += dead_letter_rows

    def count_conflict(self) -> None:
        """Conflicts are not counted: the summary has no column for them."""

    def observe_reduce(self, seconds: float) -> None:
        """The time is not measured: Spark measures its tasks itself."""

    def observe_commit(self, seconds: float) -> None:
        """The time is not measured, as in ``observe_reduce``."""


class _Restart(Exception):
    """The reducer's row was moved by another task: begin again from it."""


@dataclass
class _Feed:
    """The reducer core, shared by the threads that fetch, one for each mapper, and the one that reduces and commits."""

    core: ReducerCore
    fetching: set[int]
    error: BaseException | None = None
    stopped: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, mapper: int, batch: pa.RecordBatch, last: int) -> bool:
        """Queue rows as soon as there is room. Returns False if the feed was stopped, and the rows are not needed."""
        with self.changed:
            while not self.stopped:
                plan = self.core.fetch_plan(MapperIndex(mapper))
                if plan is not None:
                    self.core.fetched(plan, [(batch, ShuffleIndex(last))])
                    self.changed.notify_all()
                    return True
                self.changed.wait()
            return False

    def end(self, mapper: int, error: BaseException | None) -> None:
        with self.changed:
            self.fetching.discard(mapper)
            self.error = self.error or error
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def next_batch(self) -> ReduceBatch | None:
        """The next rows to reduce; None when all rows have been reduced. Rows add up for a while before they are
        reduced, as in a reducer process under load: larger batches mean fewer commits."""
        gather_until_s: float | None = None
        seen_bytes = 0
        with self.changed:
            while True:
                if self.error is not None:
                    raise self.error
                core, now_s = self.core, time.monotonic()
                if core.queued_bytes and gather_until_s is None:
                    gather_until_s = now_s + GATHER_S
                waited = gather_until_s is not None and (now_s >= gather_until_s or core.queued_bytes == seen_bytes)
                if core.has_enough or waited or not self.fetching or core.in_flight is not None:
                    batch = core.take()
                    if batch is not None or not self.fetching:
                        return batch
                seen_bytes = core.queued_bytes
                self.changed.wait(IDLE_S)

    def cursor(self, mapper: int) -> int:
        with self.changed:
            return int(self.core.cursor(MapperIndex(mapper)))

    def committed_index(self, mapper: int) -> int:
        with self.changed:
            return int(self.core.committed_state[MapperIndex(mapper)])

    # The methods that the cycle calls.

    def is_current(self, batch: ReduceBatch) -> bool:
        with self.changed:
            return self.core.is_current(batch)

    def committed(self, batch: ReduceBatch) -> bool:
        with self.changed:
            self.core.committed(batch)
            self.changed.notify_all()
            return True

    def settle(self, batch: ReduceBatch, persisted: ReducerState) -> Settled:
        with self.changed:
            settled = self.core.settle(batch, persisted)
            self.changed.notify_all()
            return settled


class ReduceTask:
    """One reducer's part of one micro-batch."""

    def __init__(
        self,
        spec: ProcessorSpec,
        processor: Processor,
        part: ReducerPart,
        emission: Emission | None = None,
        runs_on: bool = False,
    ) -> None:
        self._run_on_until_s = time.monotonic() + RUN_ON_S if runs_on else 0.0
        self._spec = spec
        self._emission = emission
        self._processor = processor
        self._index = ReducerIndex(part.reducer)
        self._ends = {mapper: end for mapper, _, end, _ in part.ranges}
        self._hints: dict[int, MapperProgress | None] = {mapper: hint for mapper, _, _, hint in part.ranges}
        self._client = processor.store.client()
        self._committer = Committer(self._client, spec.reducers_table, self._index, len(self._ends))
        self._done = TaskCounts()
        self._waiting = Waiting(processor.store.timeout_s)

    def run(self) -> TaskCounts:
        """Everything up to the end of the micro-batch is committed when this returns, by this task or by another.

        1. Read the reducer's row: the rows up to there have been processed.
        2. Fetch the rest of the micro-batch from all mappers, and what comes behind it if the task may run on; reduce
           and commit it in order.
        3. If another task has moved the reducer's row meanwhile, begin again.
        4. Notify the mappers, so that they can go on reading even if there is no next micro-batch yet.
        """
        for _ in range(RESTARTS_MAX):
            core = ReducerCore(len(self._ends), limits_of(self._spec, len(self._ends)))
            core.restart(self._processor.store.with_retries(lambda _: self._committer.read_state()))  # 1
            if self._emission is not None:
                self._emission.begin()
            try:
                self._process(core)  # 2
            except _Restart:
                self._run_on_until_s = 0.0  # Another task is at work, and goes on itself.
                continue  # 3
            committed = core.committed_state
            indexes = {mapper: {int(self._index): int(committed[MapperIndex(mapper)])} for mapper in self._ends}
            self._processor.notify_committed(indexes)  # 4
            return self._done
        raise SplitBrain(f"reducer {self._index}: its row was moved by others {RESTARTS_MAX} times: what else runs?")

    def _process(self, core: ReducerCore) -> None:
        feed = _Feed(core, set(self._ends))
        threads = [
            threading.Thread(target=self._fetch, args=(feed, mapper), name=f"fetch-{mapper}", daemon=True)
            for mapper in self._ends
        ]
        for thread in threads:
            thread.start()
        try:
            cycle = self._cycle(feed, self._processor.store.with_retries(lambda _: self._stage()))
            while (batch := feed.next_batch()) is not None:
                try:
                    cycle.run(batch)
                except SplitBrain as error:
                    raise _Restart from error
        finally:
            feed.stop()

    # --- fetch ---

    def _fetch(self, feed: _Feed, mapper: int) -> None:
        error: BaseException | None = None
        try:
            begin, end = self._begin(feed, mapper), self._ends[mapper]
            rows = self._processor.rows(
                self._index, mapper, begin, end, lambda: feed.committed_index(mapper), self._hints[mapper]
            )
            for batch, last in itertools.chain(rows, self._beyond(feed, mapper, begin)):
                if not feed.put(mapper, batch, last):
                    return
        except RowsGone as gone:
            # Either another task has committed them, and the reducer's row says so by now, or they are really gone.
            error = _Restart() if self._moved(feed, mapper) else gone
        except BaseException as raised:
            error = raised
        finally:
            feed.end(mapper, error)

    def _beyond(self, feed: _Feed, mapper: int, begin: int) -> Iterator[tuple[pa.RecordBatch, int]]:
        """The rows behind those of the micro-batch, of which there are none after ``begin`` if that is further; none if
        the task may not run on."""
        if time.monotonic() < self._run_on_until_s:
            yield from self._processor.rows_beyond(
                self._index,
                mapper,
                max(begin, self._ends[mapper], feed.cursor(mapper)),
                lambda: feed.committed_index(mapper),
                self._hints[mapper],
                self._run_on_until_s,
            )

    def _begin(self, feed: _Feed, mapper: int) -> int:
        """The shuffle index after which to request rows.

        What is below the mapper's persisted state and not in the spill has been committed by all reducers, and the
        mapper no longer knows which reducer it was for.
        """
        return self._done_index(mapper, feed.committed_index(mapper))

    def _done_index(self, mapper: int, committed: int) -> int:
        reducer = ReducerIndex(self._index)

        def call(client: StateClient) -> int:
            with client.snapshot() as snapshot:
                known = {reducer: ShuffleIndex(committed)}
                return int(done_row_indexes(snapshot, self._processor.name, MapperIndex(mapper), known)[reducer])

        return self._processor.store.with_retries(call)

    def _moved(self, feed: _Feed, mapper: int) -> bool:
        persisted = self._processor.store.with_retries(lambda _: self._committer.read_state())
        if persisted != feed.core.committed_state:
            return True
        return self._done_index(mapper, feed.committed_index(mapper)) >= self._ends[mapper]

    # --- reduce and commit ---

    def _stage(self) -> ReduceStage:
        spec = self._spec
        worker = WorkerSpec(
            spec.processor, self._index, new_guid(), len(self._ends), spec.reducer.count, spec.max_parallelism
        )
        emit = emitter(spec, self._client, self._index)
        reducer = create_reducer(load_class(spec, "reducer"), spec.reducer.config, worker, self._client, emit)
        return ReduceStage(
            reducer,
            self._client,
            processor=spec.processor,
            index=self._index,
            on_error=spec.reducer.on_error,
            dead_letter_queue=spec.reducer.dead_letter_queue,
            locate=lambda part, place: None,
        )

    def _cycle(self, feed: _Feed, stage: ReduceStage) -> ReduceCycle:
        options = self._spec.reducer
        surroundings = CycleEnvironment(
            metrics=self._done,
            backoff=lambda: Backoff(options.backoff_ms, options.backoff_ms_max),
            clock=time.monotonic,
            sleep=_sleep,
            on_wait=self._be_patient,
            complete=self._add_emission,
        )
        return ReduceCycle(
            stage, self._committer, feed, surroundings, processor=self._spec.processor, index=self._index
        )

    def _add_emission(self, reduced: Reduced) -> None:
        if self._emission is not None:
            self._emission.add_to(reduced.transaction)

    def _be_patient(self, error: Exception, waited_s: float) -> None:
        """Report what is waited for, and raise once the wait is longer than the option ``timeout``."""
        if not waited_s:
            self._waiting.restart()
        message = error.message if isinstance(error, ShuffleError) else str(error)
        self._waiting.report(message)
        timeout_s = self._processor.store.timeout_s
        if waited_s > timeout_s:
            raise StoreUnavailable(
                f"{message}. It was waited for {timeout_s:g} s; start it again, or raise the option 'timeout'"
            ) from error


def _sleep(seconds: float) -> bool:
    """Sleep, and return True: the wait was not cut short. A task is ended by killing its process, never by a stop."""
    time.sleep(seconds)
    return True
