"""The activity job's mapper, which also records how old the rows are when they are mapped.

A worker imports this module, so it imports little itself: what generates and checks rows stays out of the mapper.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from shuffle.api import PartitionedRowset, WorkerSpec
from shuffle.examples.activity import ParseLogs
from shuffle.statestore import StateClient

APPENDED_COLUMN = "appended_ns"
"""The column with the time at which a row was appended, in ns of the machine's monotonic clock, which all its processes
share."""

_NOTE = np.dtype([("read_ns", "<i8"), ("lag_ns", "<i8")])


class TimedParseLogs(ParseLogs):
    """``ParseLogs``, which records the read lag of each batch: the time from the append of its oldest row to its
    mapping."""

    def __init__(self, config: Mapping[str, Any], spec: WorkerSpec, state: StateClient, schema: pa.Schema) -> None:
        super().__init__(config, spec, state, schema)
        self._notes = (Path(config["folder"]) / f"lag-{spec.index}-{spec.guid}.bin").open("ab", buffering=0)

    def map(self, rows: pa.Table) -> PartitionedRowset:
        if rows.num_rows:
            now_ns = time.monotonic_ns()
            # A partition's rows are in the order of their appends: the first is the oldest.
            note = np.array([(now_ns, now_ns - rows[APPENDED_COLUMN][0].as_py())], dtype=_NOTE)
            self._notes.write(note.tobytes())
        return super().map(rows.drop_columns([APPENDED_COLUMN]))


def read_lags(folder: Path, mapper_index: int) -> tuple[Any, Any]:
    """The read lags of one mapper, over all its instances: the times (s of the monotonic clock), and the lags (s)."""
    parts = []
    for path in folder.glob(f"lag-{mapper_index}-*.bin"):
        data = path.read_bytes()
        parts.append(np.frombuffer(data[: len(data) // _NOTE.itemsize * _NOTE.itemsize], dtype=_NOTE))
    notes = np.sort(np.concatenate([np.empty(0, dtype=_NOTE), *parts]), order="read_ns")
    return notes["read_ns"] / 1e9, notes["lag_ns"] / 1e9
