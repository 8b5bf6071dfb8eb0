"""Spark Structured Streaming over Spark's own source for Kafka, in a process of its own, for ``perf.kafka``.

The source is not a part of PySpark. Its jars are in ``spark_kafka_jars.txt``, and are fetched once (``tools/jars.py``).
Values are parsed by ``from_json`` into the columns that the count needs. Everything else is as in ``spark_alone``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from perf.yardsticks import spark_alone
from perf.yardsticks.compare_peer import serve


class Jobs(spark_alone.Jobs):
    """The requests of this process: those of Spark alone, with rows from a topic."""

    def _rows(self, request: Mapping[str, Any]) -> DataFrame:
        records = (
            self._spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", request["address"])
            .option("subscribe", request["topic"])
            .option("startingOffsets", "earliest")
            .option("kafka.isolation.level", "read_committed")
            .option("maxOffsetsPerTrigger", request["rows_per_batch"])
            .load()
        )
        parsed = F.from_json(F.col("value").cast("string"), request["columns"])
        return records.select(parsed.alias("row")).select("row.*")


def main() -> int:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    folder, jars = Path(sys.argv[1]), sorted(Path(sys.argv[2]).glob("*.jar"))
    return serve(Jobs(folder, {"spark.jars": ",".join(map(str, jars))}))


if __name__ == "__main__":
    sys.exit(main())
