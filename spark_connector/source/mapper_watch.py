"""What a query's mappers are doing, as the driver keeps asking them."""

from __future__ import annotations

import time

from shuffle.errors import StoreUnavailable
from shuffle.spark_connector.source.offsets import Indexes
from shuffle.spark_connector.source.positions import Positions
from shuffle.spark_connector.source.processor import Processor, Produced, Shape
from shuffle.spark_connector.waiting import Waiting

POLL_S = 0.05


class MapperWatch:
    """What the mappers have produced, as the driver keeps asking. One that is away holds up nobody but its own rows."""

    def __init__(self, processor: Processor, shape: Shape) -> None:
        self._processor = processor
        self._silences = [Waiting(processor.store.timeout_s) for _ in range(shape.mapper_count)]
        self.latest: Indexes = [-1] * shape.mapper_count
        self.produced: dict[int, Produced] = {}

    def look(self) -> None:
        self.produced = self._processor.produced()
        for mapper, found in self.produced.items():
            if mapper < len(self.latest):
                self._silences[mapper].restart()
                self.latest[mapper] = max(self.latest[mapper], found.last_row_index)

    def refuse_silence(self) -> None:
        """A mapper that has been silent for long is told of, and after the time-out it is an error."""
        for mapper, silence in enumerate(self._silences):
            silence.tell(f"processor {self._processor.name}: mapper {mapper} does not answer")
            if silence.is_over:
                raise StoreUnavailable(
                    f"processor {self._processor.name}: mapper {mapper} has not answered for "
                    f"{self._processor.store.timeout_s:g} s: start it, or raise the option 'timeout'",
                    mapper=mapper,
                )

    def wait_for_all(self) -> None:
        while True:
            self.look()
            if len(self.produced) >= len(self.latest):
                return
            self.refuse_silence()
            time.sleep(POLL_S)


class Goal:
    """For ``Trigger.AvailableNow``: the end of the input as it was when the query began."""

    def __init__(self, processor: Processor, shape: Shape, positions: Positions) -> None:
        self._positions = positions
        self._ends: list[int] | None = None
        if shape.input.startswith("queue "):
            name = shape.input.removeprefix("queue ")
            self._ends = [end for _, end in processor.store.patiently(lambda client: client.queue(name).bounds())]
        self._caps: list[int | None] = [None] * shape.mapper_count

    def look(self, watch: MapperWatch) -> None:
        """A mapper that has read up to the goal is capped at what it has produced by then."""
        origins: list[int | None] = [None] * len(self._caps)
        if self._ends is not None and None in self._caps:
            origins = self._positions.input_origins()
        for mapper, found in watch.produced.items():
            if self._caps[mapper] is not None:
                continue
            origin = origins[mapper]
            # What a folder will hold is not known beforehand, so there the goal is what was mapped.
            if self._ends is None or (origin is not None and origin + found.next_input_index >= self._ends[mapper]):
                self._caps[mapper] = watch.latest[mapper]

    @property
    def reached(self) -> bool:
        return None not in self._caps

    def capped(self, latest: Indexes) -> Indexes:
        return [last if cap is None else min(last, cap) for last, cap in zip(latest, self._caps, strict=True)]
