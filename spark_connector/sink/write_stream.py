"""Starting the sink, with its checks first.

Spark creates a Python sink only when the first micro-batch is about to be written: a stream whose first rows come after
a day would fail after a day. ``write_stream`` makes the checks before it starts the query.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from shuffle.spark_connector.options import Options
from shuffle.spark_connector.sink.writer import queue_target


def write_stream(
    frame: DataFrame,
    checkpoint: str,
    *,
    name: str | None = None,
    trigger: Mapping[str, Any] | None = None,
    **options: Any,
) -> StreamingQuery:
    """Append a streaming DataFrame to a queue; ``options`` are those of the sink, ``trigger`` as for
    ``DataStreamWriter.trigger``.

    Misspelt options, a store that does not answer, a queue that is not there, columns that do not fit: all are raised
    here, and nothing has been started then.
    """
    given = {key: str(value) for key, value in options.items()}
    queue_target(Options.check("write stream", given), frame.schema)
    writer = frame.writeStream.format("shuffle").options(**given).option("checkpointLocation", checkpoint)
    if name is not None:
        writer = writer.queryName(name)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    return writer.start()
