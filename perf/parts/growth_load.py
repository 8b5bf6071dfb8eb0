"""From what a row was measured to cost on a small machine to what the thesis's own load would need.

The thesis runs 450 mappers and 10 reducers at 3.5 GB/s of input. Costs by role are taken to be in proportion to the
rows, which the curves of ``perf.growth`` bear out as long as commits keep their size; where they do not, they say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAPPERS = 450
REDUCERS = 10
INPUT_BYTES_PER_S = 3.5e9
COMMIT_ROWS_MAX = 2_000_000
"""Rows of one reduce, by default: under such a load every commit is full."""
LONG_POLL_S = 0.5
"""A mapper holds a request without rows for so long."""


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
    """Cores, memory, network and the store's load at 450 mappers, 10 reducers and 3.5 GB/s."""
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
