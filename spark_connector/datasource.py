"""``format("shuffle")``: one data source for reading and writing, each in batch and as a stream."""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from shuffle.errors import BadInput
from shuffle.spark_connector.options import Options, likely_role


class ShuffleDataSource(DataSource):
    """Reads a processor's shuffled rows, tables and queues; writes to queues and tables."""

    @classmethod
    def name(cls) -> str:
        return "shuffle"

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = dict(options)

    def schema(self) -> StructType:
        # Spark calls this for batch and for streaming alike, and does not say which: the options show it.
        if likely_role(self._given) == "read":
            from shuffle.spark_connector.batch import batch_schema

            return batch_schema(Options.check("read", self._given))
        options = Options.check("read stream", self._given)
        if (options.text("work") or "read") != "read":
            from shuffle.spark_connector.reduce import output_schema

            return output_schema(options)
        from shuffle.spark_connector.source.reader import stream_schema

        return stream_schema(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from shuffle.spark_connector.batch import batch_reader

        return batch_reader(Options.check("read", self._given), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        options = Options.check("read stream", self._given)
        if options.choice("work", ["read", "reduce"], "read") == "reduce":
            from shuffle.spark_connector.reduce import ReduceStreamReader

            return ReduceStreamReader(options, schema)
        from shuffle.spark_connector.source.reader import ShuffleStreamReader

        return ShuffleStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from shuffle.spark_connector.sink.writer import QueueBatchWriter, TableBatchWriter, queue_target

        options = Options.check("write", self._given)
        if overwrite:
            raise BadInput('mode("overwrite") is not supported: queues are appended to and tables upserted; use append')
        if options.one_of(["table", "queue"]) == "table":
            for name in ("partitionBy", "partitions", "stagedTtl"):
                options.only_with(name, "queue")
            return TableBatchWriter(options, schema)
        options.only_with("key", "table")
        return QueueBatchWriter(queue_target(options, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        from shuffle.spark_connector.sink.writer import QueueStreamWriter, queue_target

        if overwrite:
            raise BadInput('outputMode("complete") is not supported: a queue is appended to; use append or update')
        return QueueStreamWriter(queue_target(Options.check("write stream", self._given), schema))
