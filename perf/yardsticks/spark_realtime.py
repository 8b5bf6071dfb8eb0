"""Spark's real-time mode (``trigger(realTime=…)``, with Spark 4.3's own shuffle in memory) in a process of its own, for
``perf.compare``.

Its tasks live as long as a batch, rows go from stage to stage over the network as they come, and the state is made
durable at the end of each batch. A batch lasts at least five seconds, whether there are rows or not; so the clock runs
over those batches in which rows never ended: all but the first, which compiles, and the last.

The sink ``noop`` is not among those that Spark allows in this mode, so its check is off; nothing else is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery

from perf.yardsticks.compare_peer import serve
from perf.yardsticks.spark_alone import CORES, QUERY_TIMEOUT_S, aggregates, end_s, session, worked, write_state

POLL_S = 0.2
SLOTS = 2 * CORES
"""Task slots: the tasks of both stages run at the same time."""


class Jobs:
    """The requests of this process."""

    def __init__(self, folder: Path, classes: Path) -> None:
        self._folder = folder
        settings = {
            "spark.driver.extraClassPath": str(classes),
            "spark.sql.streaming.realTimeMode.allowlistCheck": "false",
            # The mode requires it.
            "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
        }
        self._spark = session(folder, SLOTS, settings)
        self._queries = 0

    def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Count until all rows are committed, and write the state to the file ``to``."""
        self._queries += 1
        checkpoint = self._folder / f"realtime-checkpoint-{self._queries}"
        key, computed = aggregates("count")
        rows = self._spark.readStream.format("perf.RealTimeRows").option("files", request["files"]).load()
        counted = rows.groupBy(*key).agg(*computed)
        query = (
            counted.writeStream.format("noop")
            .outputMode("update")
            .option("checkpointLocation", str(checkpoint))
            .trigger(realTime=f"{request['batch_s']} seconds")  # type: ignore[call-overload]
            .start()
        )
        reply = timed(until_read(query, request["rows"]))
        write_state(self._spark, checkpoint, counted.columns, request["to"])
        return reply


def until_read(query: StreamingQuery, rows: int) -> list[dict[str, Any]]:
    """Wait until the batches that are committed have all rows; then stop the query. Returns their progress."""
    deadline_s = time.monotonic() + QUERY_TIMEOUT_S
    try:
        while query.isActive and time.monotonic() < deadline_s:
            progress = [json.loads(one.json) for one in query.recentProgress]
            if sum(one["numInputRows"] for one in progress) >= rows:
                return progress
            time.sleep(POLL_S)
        raise TimeoutError(f"the query has not read {rows} rows: {query.exception() or 'it takes too long'}")
    finally:
        query.stop()


def timed(progress: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """When the batches began and ended in which rows never ended, and how many rows they had."""
    batches = [one for one in worked(progress) if one["numInputRows"]]
    if len(batches) < 3:
        raise ValueError("the query needs three batches at least, and had fewer: take more --realtime-rows")
    return {
        "begin_s": end_s(batches[0]),
        "end_s": end_s(batches[-2]),
        "rows": sum(one["numInputRows"] for one in batches[1:-1]),
    }


def main() -> int:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return serve(Jobs(Path(sys.argv[1]), Path(sys.argv[2])))


if __name__ == "__main__":
    sys.exit(main())
