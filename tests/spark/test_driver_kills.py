"""Source and sink under ``kill -9``: of the driver before and after the sink's commit, of mappers while there is no
driver, and of a Python worker while it writes."""

from __future__ import annotations

import signal

import pyarrow as pa
from pyspark.sql import SparkSession

from shuffle.examples.local import LocalSystem
from shuffle.statestore import StateClient
from tests.spark.killed_driver import BATCH_ROWS, copy
from tests.spark.programs import MOMENTS, ROWS, KilledDrivers


def copied(state: StateClient, moment: str) -> pa.Table:
    queue = state.queue(f"killed-{moment}-copy")
    return pa.concat_tables([queue.read(partition, 0, max_rows=ROWS)[0] for partition in range(queue.partitions)])


def test_driver_killed_before_and_after_the_commit_goes_on_from_its_checkpoint(
    spark: SparkSession, system: LocalSystem, state: StateClient, killed_drivers: KilledDrivers
) -> None:
    for moment in MOMENTS:
        code, said = killed_drivers.programs[moment].wait()
        assert code == -signal.SIGKILL, said
    assert copied(state, "before").num_rows == BATCH_ROWS, "batch 1 was staged, and is invisible"
    assert copied(state, "after").num_rows == 2 * BATCH_ROWS, "batch 1 is published, though Spark does not know"
    for moment in MOMENTS:
        folder = killed_drivers.programs[moment].folder
        killed_drivers.mappers[moment].kill_and_restart(0)
        copy(spark, system.address, f"killed-{moment}", str(folder), "worker").awaitTermination()
        assert (folder / "worker-died").exists()
        found = copied(state, moment).sort_by("_shuffle_index")
        assert found["_shuffle_index"].to_pylist() == list(range(ROWS))
        wanted = killed_drivers.rows.cast(found.schema.remove(len(found.schema) - 1))
        assert found.drop_columns("_shuffle_index").equals(wanted)
