"""The spec of the simulated job, and the preparation of a store for it."""

from __future__ import annotations

from typing import Any

from shuffle.durable.export_state import EXPORTS_KEY, EXPORTS_VALUE
from shuffle.durable.mapper_state import MAPPERS_KEY, MAPPERS_VALUE
from shuffle.durable.read_order import READS_KEY, READS_VALUE
from shuffle.durable.reducer_state import REDUCERS_KEY, REDUCERS_VALUE
from shuffle.durable.spill_ends import SPILLS_KEY, SPILLS_VALUE
from shuffle.mapper.spill.format import SPILL_SCHEMA
from shuffle.spec.config import MapperSpec, ProcessorSpec, ReducerSpec
from shuffle.spec.inputs import QueueInputSpec
from shuffle.statestore.client.client import StateClient
from shuffle.user_code.poison import DEAD_LETTER_SCHEMA
from tests.sim import kernel
from tests.sim.disk import Disk
from tests.sim.kernel import Process, World
from tests.sim.network import Network
from tests.sim.store import SimStore, StoreHost
from tests.sim.workload import EFFECTS_KEY, EFFECTS_VALUE, INPUT, OUTPUT, Workload

BATCH_BYTES = 5_000
"""More than one batch of twenty input rows weighs in the window, with its overhead."""

LETTERS_BYTES = 19_000
"""And what they weigh beyond that if all of them become dead letters."""


def batch_bytes_max(workload: Workload) -> int:
    return BATCH_BYTES + LETTERS_BYTES * (workload.on_error == "dead_letter")


def job_spec(workload: Workload, rng: Any) -> ProcessorSpec:
    return ProcessorSpec(
        processor="job",
        state="sim",
        input=QueueInputSpec(queue="input"),
        mapper=MapperSpec(
            class_name="sim:SimMapper",
            memory_bytes=rng.choice([3_000, 8_000, 100_000]),
            batch_rows_max=rng.choice([3, 8, 20]),
            read_wait_ms=500,
            trim_period_ms=rng.choice([80, 250]),
            split_brain_delay_ms=80,
            on_error=workload.on_error,  # type: ignore[arg-type]
        ),
        reducer=ReducerSpec(
            class_name="sim:SimReducer",
            count=workload.reducer_count,
            fetch_rows_max=rng.choice([2, 8, 50]),
            fetch_wait_ms=500,
            batch_rows_max=rng.choice([3, 10, 100]),
            batch_bytes_max=rng.choice([300, 10_000]),
            backoff_ms=10,
            backoff_ms_max=400,
            on_error=workload.on_error,  # type: ignore[arg-type]
        ),
        lease_ttl_ms=750,
        metrics=False,
    )


_prepared: dict[tuple[int, int, str, str | None, int], Disk] = {}


def prepared_disk(workload: Workload) -> Disk:
    """A store with the job's tables and queues in it, made once for each shape of job."""
    partitions = len(workload.partitions)
    shape = (workload.mapper_count, workload.reducer_count, workload.on_error, workload.output, partitions)
    found = _prepared.get(shape)
    if found is None:
        found = _prepared[shape] = _prepare(*shape)
    return found


def _prepare(mapper_count: int, reducer_count: int, on_error: str, output: str | None, partitions: int) -> Disk:
    before = kernel.maybe_world()
    world = World(0)
    kernel.set_world(world)
    disk = Disk(world.streams["disk"])
    host = StoreHost(world, Network(world), disk)
    host.start()
    process = Process(world, "setup")
    ended = []

    def setup() -> None:
        kernel.sleep(0.1)
        client = StateClient(SimStore(host, process))
        client.create_table("job/mappers", MAPPERS_KEY, MAPPERS_VALUE)
        client.create_table("job/reducers", REDUCERS_KEY, REDUCERS_VALUE)
        client.create_table("effects", EFFECTS_KEY, EFFECTS_VALUE)
        client.create_table("job/spills", SPILLS_KEY, SPILLS_VALUE)
        for mapper_index in range(mapper_count):
            client.create_queue(f"job/spill/{mapper_index}", SPILL_SCHEMA, reducer_count)
        client.create_queue("input", INPUT, partitions)
        if partitions != mapper_count:
            client.create_table("job/reads", READS_KEY, READS_VALUE)
        if on_error == "dead_letter":
            client.create_queue("job/mapper_dead_letters", DEAD_LETTER_SCHEMA, 1)
            client.create_queue("job/reducer_dead_letters", DEAD_LETTER_SCHEMA, 1)
        if output is not None:
            client.create_queue(output, OUTPUT, reducer_count)
            client.create_table("job/exports", EXPORTS_KEY, EXPORTS_VALUE)
        ended.append(True)

    process.spawn("setup", setup)
    world.run(lambda: bool(ended or world.failures), 10_000_000)
    if world.failures:
        raise world.failures[0][1]
    for one in world.processes:
        one.kill()
    kernel.set_world(before)
    return disk
