"""A query over the rows of a processor whose input is the user's own class (``docs/inputs.md``)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from examples.local import LocalSystem
from shuffle.examples.spark_pipeline import Mappers
from shuffle.statestore import StateClient
from tests.own_input import append_lines, write_example

ROWS = 20_000


def test_query_ends_where_an_own_input_ended_and_has_every_row_once(
    spark: SparkSession, system: LocalSystem, state: StateClient, tmp_path: Path
) -> None:
    spec = write_example(tmp_path)
    text = spec.read_text().replace("./csv.state", system.address)
    # A window that holds a small part of the input: what was mapped when the query began is not all of it.
    spec.write_text(text.replace("trim_period: 100ms", "trim_period: 100ms, memory: 1MiB, batch_bytes_max: 64KiB"))
    expected = append_lines(tmp_path, ROWS)
    with Mappers(system, spec, 2) as mappers:
        stream = spark.readStream.format("shuffle").options(spec=str(spec), maxRowsPerTrigger=25_000).load()
        to = stream.writeStream.format("shuffle").options(
            state=system.address, queue="own", partitions=2, checkpointLocation=str(tmp_path / "checkpoint")
        )
        to.trigger(availableNow=True).start().awaitTermination()
        assert users_in(state) == expected
        mappers.kill_and_restart(1)
        expected += append_lines(tmp_path, 1_000, begin=ROWS)
        to.trigger(availableNow=True).start().awaitTermination()
        assert users_in(state) == expected


def users_in(state: StateClient) -> Counter[str]:
    parts = [state.queue("own").read(partition, 0, max_rows=10 * ROWS)[0] for partition in range(2)]
    return Counter(pa.concat_tables(parts)["user"].to_pylist())
