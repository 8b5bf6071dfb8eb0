"""Compares the contents of the spill, read from the bytes on the disk, with what must be there. It uses no code of the
product."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tests.sim.workload import Oracle

if TYPE_CHECKING:
    from tests.sim.disk import Disk


_PREFIX_BYTES = 10
"""Of a segment's key: a letter for queues, the queue's number, the partition, and a letter for segments."""


class SpillChecker:
    """The spills of all mappers for all reducers."""

    def __init__(self, oracle: Oracle, disk: Disk, queues: dict[str, bytes]) -> None:
        self._oracle = oracle
        self._disk = disk
        shape = oracle.workload
        self._prefixes = {
            (m, r): queues[f"job/spill/{m}"] + struct.pack(">I", r)
            for m in range(shape.mapper_count)
            for r in range(shape.reducer_count)
        }
        self.partition_keys = [prefix + b"p" for prefix in self._prefixes.values()]
        self._pairs = {prefix + b"s": pair for pair, prefix in self._prefixes.items()}
        self._segments: dict[tuple[int, int], list[bytes]] = {}

    def look(self) -> None:
        """Where the segments of all spills are, in one pass over the disk. To be called when it has changed."""
        self._segments = {}
        for key in self._disk.keys:
            pair = self._pairs.get(key[:_PREFIX_BYTES])
            if pair is not None:
                self._segments.setdefault(pair, []).append(key)

    def problem(self, mapper: int, reducer: int, committed: int, rows_out: int) -> str | None:
        """What is wrong, given that the mapper's state stands at ``rows_out``; None if nothing is.

        Every row before it that is not committed is in the spill, once, with the right contents; and nothing is there
        that will be mapped again.
        """
        part = self._oracle.parts[mapper][reducer]
        waiting = [row for row in part if committed < row[0] < rows_out]
        try:
            found = self._rows(mapper, reducer)
        except (struct.error, KeyError, ValueError, OSError, pa.ArrowException) as error:
            return f"? of reducer {reducer}: its spill cannot be read from the disk: {error!r}"
        indexes = [index for index, _ in found]
        if indexes != sorted(set(indexes)):
            return f"? of reducer {reducer}: rows are in the spill twice or out of order: {indexes}"
        if indexes and indexes[-1] >= rows_out:
            return f"? of reducer {reducer}: rows up to {indexes[-1]} are in the spill and will be mapped again"
        right = dict(part)
        for index, out in found:
            if right.get(index) != out:
                return f"{index} of reducer {reducer}: the spill has {out} there instead of {right.get(index)}"
        missing = [index for index, _ in waiting if index not in set(indexes)]
        if missing:
            return f"{missing[0]} of reducer {reducer}, which it has not committed and which is not in the spill"
        return None

    def begin(self, mapper: int, reducer: int) -> int:
        """The position up to which this spill is trimmed."""
        row = self._disk.keys.get(self._prefixes[mapper, reducer] + b"p")
        return int(struct.unpack("<QQ", row)[0]) if row is not None else 0

    def left(self) -> list[tuple[int, int]]:
        """(mapper, reducer) of the spills that still have files."""
        self.look()
        return [pair for pair in self._prefixes if pair in self._segments]

    def _rows(self, mapper: int, reducer: int) -> list[tuple[int, int]]:
        """(shuffle index, out) of every row from the partition's begin on."""
        keys = sorted(self._segments.get((mapper, reducer), ()))
        if not keys:
            return []
        prefix = self._prefixes[mapper, reducer]
        begin = self.begin(mapper, reducer)
        found: list[tuple[int, int]] = []
        for key in keys:
            position = struct.unpack(">Q", key[len(prefix) + 1 :])[0]
            value = self._disk.keys[key]
            size_bytes = struct.unpack_from("<QQ", value)[1]
            data = bytes(self._disk.files[value[16:].decode()][:size_bytes])
            for at, batch in enumerate(segment_rows(data)):
                if position + at >= begin:
                    found.extend(batch_rows(batch))
        return found


def segment_rows(data: bytes) -> list[dict[str, Any]]:
    from tests.sim.checkers import decode_segment

    return decode_segment(data)


def batch_rows(batch: dict[str, Any]) -> list[tuple[int, int]]:
    rows = pa.ipc.open_stream(batch["batch"]).read_all()["out"].to_pylist()
    steps = batch["index_steps"]
    width = len(steps) // (len(rows) - 1) if len(rows) > 1 else 1
    index = batch["first_row_index"]
    found = [(index, rows[0])]
    for at, out in enumerate(rows[1:]):
        index += int.from_bytes(steps[at * width : (at + 1) * width], "little")
        found.append((index, out))
    assert index == batch["last_row_index"], "the indexes do not end where the batch says"
    return found
