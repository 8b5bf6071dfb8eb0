"""Extrapolates from the cost of a row on a small machine to the resources that the thesis's own load would need.

The thesis runs 450 mappers and 10 reducers at 3.5 GB/s of input. Costs by role are assumed to be proportional to the
rows. The curves of ``perf.growth`` show whether that holds; it does as long as commits keep their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAPPERS = 450
REDUCERS = 10
INPUT_BYTES_PER_S = 3.5e9
COMMIT_ROWS_MAX = 2_000_000
"""The most rows of one reduce, by default: under such a load every commit has that many."""
LONG_POLL_S = 0.5
"""The time in seconds for which a mapper holds a request for which it has no rows."""


@dataclass(frozen=True)
class Load:
    """One measured run of the activity job."""

    input_bytes: int
    rows: int
    shuffled_rows: int
    cpu_s: Mapping[str, float]
    memory_bytes: Mapping[str, float]
    commits: int
    written_bytes: int


def extrapolated(load: Load) -> dict[str, float]:
    """The cores, memory, network and store load at 450 mappers, 10 reducers and 3.5 GB/s."""
    times = INPUT_BYTES_PER_S / load.input_bytes
    kept = load.shuffled_rows / load.rows
    rows_per_s = load.rows * times
    shuffled_rows_per_s = load.shuffled_rows * times
    shuffled_bytes_per_s = INPUT_BYTES_PER_S * kept
    cores = {f"{role}_cores": cpu_s * times for role, cpu_s in load.cpu_s.items()}
    memory = MAPPERS * load.memory_bytes["mapper"] + REDUCERS * load.memory_bytes["reducer"]
    return {
        "rows_per_s": rows_per_s,
        "shuffled_mb_per_s": shuffled_bytes_per_s / 1e6,
        **cores,
        "cores": sum(cores.values()),
        "cores_of_one_mapper": cores["mapper_cores"] / MAPPERS,
        "cores_of_one_reducer": cores["reducer_cores"] / REDUCERS,
        "memory_gb": (memory + load.memory_bytes["store"]) / 1e9,
        "network_from_queue_mb_per_s": INPUT_BYTES_PER_S / 1e6,
        "network_shuffle_mb_per_s": shuffled_bytes_per_s / 1e6,
        "network_of_one_reducer_mb_per_s": shuffled_bytes_per_s / 1e6 / REDUCERS,
        "commits_per_s": max(shuffled_rows_per_s / COMMIT_ROWS_MAX, float(REDUCERS)),
        "requests_per_s_at_least": MAPPERS * REDUCERS / LONG_POLL_S,
        "store_written_mb_per_s": load.written_bytes * times / 1e6,
    }
