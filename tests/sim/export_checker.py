"""What is outside: every row that a reducer emitted, once and in its order, and nothing trimmed before it is there."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.sim.workload import Oracle

if TYPE_CHECKING:
    from tests.sim.disk import Disk
    from tests.sim.sinks import SinkHost


class ExportChecker:
    def __init__(self, oracle: Oracle, disk: Disk, outbox: bytes | None, violated: Callable[[int, str], None]) -> None:
        self._oracle = oracle
        self._disk = disk
        self._violated = violated
        self._outbox = outbox
        self.host: SinkHost | None = None
        """The sink, if there is one in this run."""

    def on_change(self, partition: int, begin: int, end: int) -> None:
        """Something was published."""
        for mapper, outs in self._found(partition).items():
            expected = self._expected(partition, mapper)
            if outs != expected[: len(outs)]:
                said = f"outside, partition {partition}, mapper {mapper}, after the batch {begin} to {end}: {outs}"
                self._violated(1, f"{said} instead of {expected[: len(outs)]}")

    def on_durable(self) -> None:
        """The outbox may have been trimmed."""
        if self.host is None:
            return
        for partition, bounds in enumerate(self._bounds()):
            there = len(self.host.partitions[partition].rows)
            if bounds[0] > there:
                self._violated(7, f"partition {partition} of the outbox is trimmed up to {bounds[0]}, outside: {there}")

    def is_done(self) -> bool:
        """Everything is outside and trimmed."""
        return self.host is None or all(
            begin == end == len(self.host.partitions[partition].rows)
            for partition, (begin, end) in enumerate(self._bounds())
        )

    def behind(self) -> str:
        if self.host is None:
            return "no sink"
        return f"outbox {self._bounds()}, outside {[len(part.rows) for part in self.host.partitions]} rows"

    def at_end(self) -> None:
        for partition in range(self._oracle.workload.reducer_count):
            found = self._found(partition)
            for mapper in range(self._oracle.workload.mapper_count):
                expected = self._expected(partition, mapper)
                if found.get(mapper, []) != expected:
                    outs = found.get(mapper, [])
                    self._violated(1, f"outside, partition {partition}, mapper {mapper}: {outs}, not {expected}")

    def _found(self, partition: int) -> dict[int, list[int]]:
        assert self.host is not None
        found: dict[int, list[int]] = {}
        for mapper, out in self.host.partitions[partition].rows:
            found.setdefault(mapper, []).append(out)
        return found

    def _expected(self, partition: int, mapper: int) -> list[int]:
        return [out for _, out in self._oracle.parts[mapper][partition] if out >= 0]

    def _bounds(self) -> list[tuple[int, int]]:
        """Begin and end of each partition of the outbox, as they are on the disk."""
        return [self._bounds_of(partition) for partition in range(self._oracle.workload.reducer_count)]

    def _bounds_of(self, partition: int) -> tuple[int, int]:
        assert self._outbox is not None
        prefix = self._outbox + struct.pack(">I", partition)
        row = self._disk.keys.get(prefix + b"p")
        begin, end = struct.unpack("<QQ", row) if row is not None else (0, 0)
        for key, value in self._disk.keys.items():
            if key.startswith(prefix + b"s"):
                end = max(end, struct.unpack(">Q", key[10:])[0] + struct.unpack_from("<Q", value)[0])
        return begin, end
