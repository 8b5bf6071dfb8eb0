"""The yardstick of the Spark connector: a source that yields Arrow batches from memory, and a sink that discards them.
Their only cost is Spark's own cost of a Python source and sink."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import lru_cache

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from shuffle.examples.workload import SCHEMA, Workload
from shuffle.spark_connector.schemas import arrow_schema, as_schema, spark_schema


@lru_cache(maxsize=2)
def in_memory(rows: int) -> pa.RecordBatch:
    """A batch of rows, made once in each Python worker, during the first micro-batch, which is not measured."""
    table = Workload(with_user_share=1.0).rows(0, rows).combine_chunks()
    return as_schema(table.to_batches()[0], arrow_schema(spark_schema(SCHEMA, "logs")))


class BareSource(DataSource):
    """``batches`` micro-batches of ``rows`` rows, in ``partitions`` partitions and Arrow batches of ``slice`` rows."""

    @classmethod
    def name(cls) -> str:
        return "bare"

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = dict(options)

    def schema(self) -> StructType:
        return spark_schema(SCHEMA, "logs")

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return BareReader(*(int(self._given[name]) for name in ("batches", "rows", "partitions", "slice")))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        return BareWriter()


class BareReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, batches: int, rows: int, partitions: int, slice_rows: int) -> None:
        self._batches, self._rows, self._partitions, self._slice_rows = batches, rows, partitions, slice_rows

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"n": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        return {"n": min(start["n"] + 1, self._batches)}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        pass

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(partition) for partition in range(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        held = in_memory(self._slice_rows)
        left = self._rows // self._partitions
        while left > 0:
            yield held.slice(0, min(left, held.num_rows))
            left -= held.num_rows


class BareWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for batch in iterator:
            if batch.num_rows and not batch.nbytes:
                raise ValueError("rows without bytes")
        return WriterCommitMessage()
