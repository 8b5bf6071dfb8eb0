"""A place outside of the store, as a process of the simulation, and the product's ``Sink`` that leads there.

What it has taken survives everything: it stands for Kafka, a lake or a bucket. There are three sorts of it:

- ``fencing`` is Kafka: ``open`` raises the epoch of a partition, and whoever has an older one is refused; rows and
  position are one step, and copies of a message are recognised by their sequence number within the epoch.
- ``comparing`` is a lake: a commit names the position that it was made for, and is refused if it is another one.
- ``naming`` is a folder: a batch has a name, and the same name again is the same batch.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from shuffle.errors import PublishUnknown, ServiceUnavailable, SplitBrain
from shuffle.reducer.outputs.sink import Sink
from tests.sim.kernel import Process, World
from tests.sim.network import Network, NoAnswer, NotReached

ADDRESS = "sink"
TIMEOUT_S = 0.5

Row = tuple[int, int]


class Partition:
    """What there is of one partition of the outbox."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.position: int | None = None
        self.epoch = 0
        self.sequence = 0
        self.batches: dict[tuple[int, int], list[Row]] = {}


class SinkHost:
    """Where the sink runs. It is restarted as the store is, and forgets nothing by that."""

    def __init__(self, world: World, network: Network, kind: str, partitions: int, on_change: Any) -> None:
        self.kind = kind
        self.partitions = [Partition() for _ in range(partitions)]
        self._world = world
        self._network = network
        self._on_change = on_change
        self._starts = 0
        self.process: Process | None = None

    def start(self) -> None:
        self._starts += 1
        process = self.process = Process(self._world, f"sink#{self._starts}")
        self._network.listen(ADDRESS, process, self)

    def crash(self, down_us: int) -> None:
        if self.process is not None and self.process.alive:
            self.process.kill()
            self._world.at(self._world.now_us + down_us, lambda _: self.start())

    def forget_position(self, partition: int) -> None:
        """As a broker does with positions that nobody has committed for a week."""
        if self.kind != "naming":
            self.partitions[partition].position = None

    # what can be asked

    def open(self, partition: int) -> tuple[int, int | None]:
        found = self.partitions[partition]
        if self.kind == "naming":
            return 0, None
        found.epoch += 1
        found.sequence = 0
        return found.epoch, found.position

    def publish(self, partition: int, token: tuple[int, int, int | None], begin: int, end: int, rows: list[Row]) -> str:
        """``token``: epoch, sequence and the position that the writer believes the sink to be at."""
        found = self.partitions[partition]
        epoch, sequence, seen = token
        if self.kind == "naming":
            self._world.mark("a batch was published under its name again" if (begin, end) in found.batches else "named")
            found.batches[begin, end] = rows
            found.rows = [row for name in sorted(found.batches) for row in found.batches[name]]
        elif self.kind == "fencing":
            if epoch < found.epoch:
                return "fenced"
            if sequence <= found.sequence:
                return "done"
            if sequence != found.sequence + 1:
                return "fenced"
            found.sequence = sequence
            found.rows += rows
            found.position = end
        else:
            if found.position != seen:
                return "fenced"
            found.rows += rows
            found.position = end
        self._on_change(partition, begin, end)
        return "done"


class SimSink(Sink):
    """One exporter's way to it."""

    keeps_position = True  # Of the class; ``naming`` sets it for itself.

    def __init__(self, host: SinkHost, network: Network, partition: int) -> None:
        self._host = host
        self._network = network
        self._partition = partition
        self._epoch = 0
        self._sequence = 0
        self._seen: int | None = None
        self.__dict__["keeps_position"] = host.kind != "naming"

    @property
    def identity(self) -> str:
        return f"sim {self._host.kind}"

    def open(self) -> int | None:
        try:
            self._epoch, self._seen = self._network.call(
                ADDRESS, "sink_open", lambda host, call: host.open(self._partition), TIMEOUT_S
            )
        except (NotReached, NoAnswer) as error:
            raise ServiceUnavailable(str(error)) from None
        self._sequence = 0
        return self._seen

    def publish(self, rows: pa.Table, begin: int, end: int) -> None:
        self._sequence += 1
        token = self._epoch, self._sequence, self._seen
        given = list(zip(rows["mapper"].to_pylist(), rows["out"].to_pylist(), strict=True))

        def serve(host: SinkHost, call: Any) -> str:
            return host.publish(self._partition, token, begin, end, given)

        try:
            answer = self._network.call(ADDRESS, "sink_publish", serve, TIMEOUT_S)
        except NotReached as error:
            raise ServiceUnavailable(str(error)) from None
        except NoAnswer as error:
            raise PublishUnknown(str(error)) from None
        if answer == "fenced":
            raise SplitBrain("another instance has published")
        self._seen = end
