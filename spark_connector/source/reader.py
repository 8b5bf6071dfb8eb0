"""The streaming source: a processor's shuffled rows, as its reducers would get them.

There is one Spark partition for each reducer. An offset is a shuffle index for each mapper. A micro-batch is the rows
between two offsets, and it can be read any number of times until it is committed: mappers keep rows until then, and map
them again when they were restarted.

Spark calls a source's ``commit`` for a micro-batch only when the next one has been planned. A mapper whose window is
full of that micro-batch can read no further, and there would never be a next one. So the source commits earlier: when
Spark calls ``latestOffset`` with an offset to start at, everything before that offset is in Spark's own commit log.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from shuffle.errors import BadInput, StoreUnavailable
from shuffle.messages import METADATA_FIELDS
from shuffle.spark_connector.options import TIMEOUT_S_DEFAULT, Options, state_of
from shuffle.spark_connector.schemas import arrow_schema, as_schema, check_requested_schema, spark_schema
from shuffle.spark_connector.source.mapper_watch import POLL_S, Goal, MapperWatch
from shuffle.spark_connector.source.offsets import Indexes, admit, from_offset, rows_between, to_offset
from shuffle.spark_connector.source.positions import Baseline, QueryPositions
from shuffle.spark_connector.source.processor import MapperProgress, Processor
from shuffle.spark_connector.source.query_lease import QueryLease, begin_task
from shuffle.spark_connector.store_handle import StoreHandle
from shuffle.spark_connector.waiting import Waiting
from shuffle.spec.config import ProcessorSpec, load_spec
from shuffle.support.suggest import did_you_mean

METADATA_COLUMNS = {
    field.name.removeprefix("_"): field
    for field in (pa.field("_mapper", pa.int32(), False), pa.field("_reducer", pa.int32(), False), *METADATA_FIELDS)
}
"""The columns that the option ``metadataColumns`` can add: where a row came from, its shuffle index, and when it was
read."""

IDLE_S = 0.5
"""The time in seconds that a call of ``latestOffset`` may wait for new rows: Spark calls again at once."""

AHEAD_MAX = 3
"""The number of mappers' responses that are fetched in advance while Spark takes in an earlier one."""


def source_processor(options: Options) -> tuple[Processor, ProcessorSpec | None]:
    """The processor that the options name, by its spec or by its name."""
    timeout_s = options.seconds("timeout", TIMEOUT_S_DEFAULT)
    if options.text("spec"):
        for name in ("processor", "state"):
            if options.text(name):
                raise BadInput(f"the options 'spec' and {name!r} contradict each other: the spec names it", option=name)
        spec = load_spec(options.required("spec", "the processor's spec, a YAML file"))
        return Processor(StoreHandle(spec.state, timeout_s), spec.processor), spec
    name = options.required("processor", "the processor whose rows are read (or give 'spec', its YAML file)")
    return Processor(StoreHandle(state_of(options), timeout_s), name), None


def stream_schema(options: Options) -> StructType:
    if options.text("emit"):
        raise BadInput("the option 'emit' is for reducers that run in Spark: use spark_connector.reduce_frame(…)")
    processor, _ = source_processor(options)
    rows = processor.row_schema(processor.shape())
    extra = [METADATA_COLUMNS[name] for name in metadata_columns(options)]
    for field in extra:
        if field.name in rows.names:
            raise BadInput(
                f"metadataColumns: the rows have a column {field.name!r} of their own; leave it out of metadataColumns,"
                " or rename it in the mapper",
                option="metadataColumns",
            )
    return spark_schema(pa.schema([*rows, *extra]), f"the rows of processor {processor.name!r}")


def metadata_columns(options: Options) -> list[str]:
    names = options.names("metadataColumns")
    for name in names:
        if name not in METADATA_COLUMNS:
            hint = did_you_mean(name, METADATA_COLUMNS, f"; there are {', '.join(METADATA_COLUMNS)}")
            raise BadInput(f"the option 'metadataColumns' knows no {name!r}{hint}", option="metadataColumns")
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class BatchLimits:
    """The bounds of one micro-batch."""

    rows_max: int | None
    bytes_max: int | None
    rows_min: int | None

    @staticmethod
    def of(options: Options) -> BatchLimits:
        limits = BatchLimits(
            options.number("maxRowsPerTrigger"),
            options.size_bytes("maxBytesPerTrigger"),
            options.number("minRowsPerTrigger"),
        )
        if limits.rows_min is not None and limits.rows_max is not None and limits.rows_min > limits.rows_max:
            raise BadInput(
                f"the options minRowsPerTrigger={limits.rows_min} and maxRowsPerTrigger={limits.rows_max} contradict "
                "each other: no batch could ever be large enough. Lower the first, or raise the second"
            )
        return limits

    def default(self) -> ReadLimit:
        if self.rows_max is not None:
            return ReadMaxRows(self.rows_max)
        if self.bytes_max is not None:
            return ReadMaxBytes(self.bytes_max)
        return ReadMinRows(self.rows_min) if self.rows_min is not None else ReadAllAvailable()

    @property
    def given(self) -> bool:
        return (self.rows_max, self.bytes_max, self.rows_min) != (None, None, None)

    def rows_of(self, produced: dict[int, MapperProgress]) -> int | None:
        """The most rows within both bounds, by the average size of the rows in the windows; at least one row."""
        bounds = [] if self.rows_max is None else [self.rows_max]
        row_bytes = max((mapper.row_bytes for mapper in produced.values()), default=0.0)
        if self.bytes_max is not None and row_bytes:
            bounds.append(max(1, int(self.bytes_max / row_bytes)))
        return min(bounds) if bounds else None


class DriverSide:
    """Computes offsets and commits them. It lives in the one Python process that Spark keeps for a query's driver."""

    def __init__(
        self,
        processor: Processor,
        starting: str,
        limits: BatchLimits,
        commits: bool,
        spec: ProcessorSpec | None = None,
    ) -> None:
        self._spec = spec
        self.processor = processor
        self.shape = processor.shape()
        self.lease = QueryLease(processor)
        self.positions = QueryPositions(processor, self.shape, self.lease)
        self._starting = starting
        self._limits = limits
        self._commits = commits
        self._watch = MapperWatch(processor, self.shape)
        self._goal: Goal | None = None
        self._baseline: Baseline | None = None
        self._committed: Indexes | None = None
        self.lease.take()
        try:
            self.positions.refuse_reducers()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the processor at the end of the query, so that another one may read it."""
        if self._goal is not None:
            self._goal.close()
        self.lease.release()

    def refuse_others(self) -> None:
        """Raise if another query holds the processor, or if reducers have been started since this query began.

        Called before rows are handed out.
        """
        self.lease.check()
        self.positions.refuse_reducers()

    @property
    def baseline(self) -> Baseline:
        if self._baseline is None:
            self._baseline = self.positions.baseline()
        return self._baseline

    def initial(self) -> Indexes:
        if not self._commits:
            return self.positions.start()
        if self._baseline is None:
            latest = None
            if self._starting == "latest":
                self._watch.wait_for_all()
                latest = self._watch.latest
            self._baseline = self.positions.begin(self._starting, latest)
        return self._baseline.start

    def set_goal(self) -> None:
        self._goal = Goal(self.processor, self.shape, self._spec)

    def latest(self, start: Indexes, limit: ReadLimit) -> Indexes:
        """The end of the next micro-batch; ``start`` if there are no rows yet. Waits up to ``IDLE_S`` for rows."""
        self.refuse_others()
        self.commit(start)
        begin_s = time.monotonic()
        standstill = Waiting(self.processor.store.timeout_s)
        seen: Indexes = []
        while True:
            self._watch.look()
            latest = self._watch.latest
            if self._goal is not None:
                self._goal.look(self._watch)
                latest = self._goal.capped(latest)
            end = self._admitted(start, latest, limit)
            if end != start or (self._goal is not None and self._goal.reached):
                return end
            if latest != seen:
                seen = list(latest)
                standstill.restart()
            self._watch.refuse_silence()
            if self._goal is None:
                if time.monotonic() - begin_s > IDLE_S:
                    return start
            elif standstill.is_over:
                raise StoreUnavailable(
                    f"processor {self.processor.name}: its mappers have not come to the end of the input, and have "
                    f"produced nothing for {standstill.waited_s:.0f} s: see in their logs or in `shuffle status` what "
                    "stops them, or raise the option 'timeout'"
                )
            else:
                standstill.report(f"processor {self.processor.name}: its mappers are not at the end of the input yet")
            time.sleep(POLL_S)

    def _admitted(self, start: Indexes, latest: Indexes, limit: ReadLimit) -> Indexes:
        latest = [max(first, last) for first, last in zip(start, latest, strict=True)]
        if isinstance(limit, ReadAllAvailable) and self._limits.given:
            return latest  # Trigger.Once takes everything, whatever the options say.
        least = self._limits.rows_min
        if least is not None and self._goal is None and rows_between(start, latest) < least:
            return start
        return admit(start, latest, self._limits.rows_of(self._watch.produced))

    def report(self) -> Indexes | None:
        return list(self._watch.latest) if self._watch.produced else None

    def commit(self, end: Indexes) -> None:
        """Commit everything up to ``end``, which is in Spark's commit log, in the store, and notify the mappers."""
        if not self._commits or self._committed == end:
            return
        committed = self.positions.commit(end, self.baseline)
        self._committed = end
        self.processor.notify_committed(
            {m: {r: row[m] for r, row in enumerate(committed)} for m in range(self.shape.mapper_count)}
        )

    def hint(self, mapper: int) -> MapperProgress | None:
        return self._watch.produced.get(mapper)


class StreamReaderBase(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The offsets, which are the same for reading rows and for running reducers."""

    commits = True

    def __init__(self, options: Options) -> None:
        self.processor, self.spec = source_processor(options)
        self._starting = options.choice("startingOffsets", ["earliest", "latest", "committed"], "committed")
        self._limits = BatchLimits.of(options)
        self._driver: DriverSide | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The reader is pickled for the tasks, and connections cannot be.
        return {**self.__dict__, "_driver": None}

    @property
    def driver(self) -> DriverSide:
        if self._driver is None:
            exit_on_sigterm()
            self._driver = DriverSide(self.processor, self._starting, self._limits, self.commits, self.spec)
        return self._driver

    def stop(self) -> None:
        if self._driver is not None:
            self._driver.close()

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return to_offset(self.driver.initial())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return self._limits.default()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        return to_offset(self.driver.latest(self._indexes(start), limit))

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802
        latest = self.driver.report()
        return None if latest is None else to_offset(latest)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self.driver.set_goal()

    def commit(self, end: dict[str, int]) -> None:
        self.driver.commit(self._indexes(end))

    def _indexes(self, offset: dict[str, int]) -> Indexes:
        return from_offset(offset, self.driver.shape.mapper_count)


def exit_on_sigterm() -> None:
    """Let SIGTERM raise ``SystemExit``, so that ``stop`` is called.

    Spark ends the process of a source with SIGTERM, twice in a row, so the second one is ignored.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def end(number: int, _frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


@dataclass
class ReducerPart(InputPartition):
    """One reducer's rows of one micro-batch."""

    reducer: int
    ranges: list[tuple[int, int, int, MapperProgress | None]]
    """For each mapper: its index, the shuffle index after which the rows begin, the last shuffle index, and its
    progress when the micro-batch was planned, if it is known."""
    holder: str
    """The guid of the run of the query that has planned it."""

    def __init__(
        self, reducer: int, ranges: list[tuple[int, int, int, MapperProgress | None]], holder: str = ""
    ) -> None:
        super().__init__(None)
        self.reducer, self.ranges, self.holder = reducer, ranges, holder


class ShuffleStreamReader(StreamReaderBase):
    """The streaming source: gives the shuffled rows to Spark."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options)
        self._metadata = metadata_columns(options)
        self._with_indexes = any(METADATA_COLUMNS[name] in METADATA_FIELDS for name in self._metadata)
        self._schema = arrow_schema(schema)
        self._checked = False

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        driver = self.driver
        begin, last = self._indexes(start), self._indexes(end)
        driver.refuse_others()
        self._check_schema(driver)
        # Rows before the batch are in Spark's commit log. This also raises if the rows of the batch are gone.
        driver.commit(begin)
        parts: list[InputPartition] = []
        for reducer in range(driver.shape.reducer_count):
            ranges = []
            for mapper, to in enumerate(last):
                after = driver.baseline.begin(reducer, mapper, begin[mapper])
                if after < to:
                    ranges.append((mapper, after, to, driver.hint(mapper)))
            parts.append(ReducerPart(reducer, ranges, driver.lease.holder.guid))
        return parts

    def _check_schema(self, driver: DriverSide) -> None:
        """Check a schema that the user has given against the rows, once, before the first micro-batch is read."""
        if not self._checked:
            rows = self.processor.row_schema(driver.shape)
            produced = pa.schema([*rows, *(METADATA_COLUMNS[name] for name in self._metadata)])
            check_requested_schema(self._schema, produced, f"the stream of processor {self.processor.name!r}")
            self._checked = True

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ReducerPart)
        begin_task(self.processor, partition.holder, partition.reducer)
        for mapper, batch in ahead(self._fetched(partition)):
            yield self._complete(batch, mapper, partition.reducer)

    def _fetched(self, part: ReducerPart) -> Iterator[tuple[int, pa.RecordBatch]]:
        for mapper, after, to, hint in part.ranges:
            rows = self.processor.rows(part.reducer, mapper, after, to, partial(int, after), hint, self._with_indexes)
            for batch, _ in rows:
                yield mapper, batch

    def _complete(self, batch: pa.RecordBatch, mapper: int, reducer: int) -> pa.RecordBatch:
        for name, value in (("mapper", mapper), ("reducer", reducer)):
            if name in self._metadata:
                field = METADATA_COLUMNS[name]
                batch = batch.append_column(field, pa.repeat(pa.scalar(value, field.type), batch.num_rows))
        return as_schema(batch, self._schema)


def ahead(items: Iterator[Any]) -> Iterator[Any]:
    """``items``, computed in a thread of their own, up to ``AHEAD_MAX`` in advance: fetching overlaps with Spark's
    reading of the rows."""
    done = object()
    ready: queue.Queue[Any] = queue.Queue(AHEAD_MAX)
    stopping = threading.Event()

    def put(item: Any) -> bool:
        while not stopping.is_set():
            try:
                ready.put(item, timeout=0.5)
                return True
            except queue.Full:
                continue
        return False

    def run() -> None:
        try:
            for item in items:
                if not put((item, None)):
                    return
            put((done, None))
        except BaseException as error:
            put((done, error))

    threading.Thread(target=run, name="fetch-ahead", daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is done:
                return
            yield item
    finally:
        stopping.set()
