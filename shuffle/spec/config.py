"""A spec: the definition of one streaming processor, as frozen objects, and its loading from YAML.

``load_spec`` reads a file and reports every mistake in it at once, each with its line; nothing has been started or
changed by then. Whatever needs the store (does the queue exist, does the state fit) is checked in
``shuffle.preflight``.

A key that takes a time or a size may be written in two ways: with its unit in the name and a plain number
(``trim_period_ms: 500``), or without it and the unit in the value (``trim_period: 500ms``, ``memory: 256MiB``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shuffle.durable import tables
from shuffle.errors import SpecError
from shuffle.limits import (
    BATCH_BYTES_MAX,
    GIB,
    KEY_GROUPS_DEFAULT,
    MIB,
    TRANSACTION_BYTES_MAX,
    TRANSACTION_ROWS_MAX,
    WAIT_MS_MAX,
    WORKER_RESPONSE_S_MAX,
)
from shuffle.spec.index_sets import PARTITIONS_PER_MAPPER_MAX, PER_PROCESS_MAX
from shuffle.spec.inputs import InputSpec
from shuffle.spec.outputs import IS_INPUT, OutputSpec

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

OnError = Literal["stop", "dead_letter"]
Compression = Literal["none", "lz4", "zstd"]

REDUCERS_MAX = 4096
"""The most reducers of a processor. There is one bucket per reducer in every mapper, and one connection per pair: above
this number the pairs are the bottleneck."""


@dataclass(frozen=True, slots=True)
class MapperSpec:
    """The settings of the mappers: how they read, map and keep rows."""

    class_name: str
    """Your subclass of ``Mapper``, as ``module:Class``. YAML key: ``class``."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Your own part of the spec: any names and values, which the class finds in ``self.config``. Default: empty."""
    memory_bytes: int = 256 * MIB
    """The most bytes of mapped rows that the windows of one mapper process may hold, in equal shares for its mappers;
    above that, reading stops. YAML key: ``memory``. Default: 256 MiB."""
    batch_rows_max: int = 100_000
    """The most rows in one call of ``map``. A mapper that is behind its input reads the rows of several calls at once.
    Default: 100,000."""
    batch_bytes_max: int = 16 * MIB
    """The most bytes in one read; a single row may have more. Default: 16 MiB."""
    read_wait_ms: int = 1_000
    """Milliseconds that a read waits for rows when there are none. Default: 1,000."""
    trim_period_ms: int = 1_000
    """Milliseconds between two writes of the mapper's state, each followed by a trim of the input. Default: 1,000."""
    split_brain_delay_ms: int = 1_000
    """Milliseconds that a mapper waits before it starts again, once it has noticed another instance of itself.
    Default: 1,000."""
    on_error: OnError = "stop"
    """The reaction to an exception in ``map``: ``stop`` reports it and ends the mapper; ``dead_letter`` sets the rows
    aside that cause it, and goes on. Default: stop."""
    dead_letter_queue: str | None = None
    """The queue for rows that are set aside, with ``on_error: dead_letter``. Default:
    ``<processor>/mapper_dead_letters``."""
    listen: str = "127.0.0.1:0"
    """The ``host:port`` on which a mapper serves reducers; port 0 is any free one. Default: 127.0.0.1:0."""
    advertise: str | None = None
    """The ``host``, or ``host:port``, under which reducers reach a mapper, if that is not where it listens: in a
    container, or on a machine with several networks. A mapper that is a task of Spark determines it by itself. Default:
    the address on which it listens, with the name of the machine instead of 0.0.0.0."""
    partitions_per_mapper: int = 1
    """The number of partitions of the input that one mapper reads. With more than one, the order in which their rows
    were read is written to the store before they are served: it is for very many partitions with little in each.
    Partitions that the input gets later are read by new mappers. It cannot be changed over existing state. Default:
    1."""
    per_process: int = 1
    """The number of mappers in one process. They share its memory limit and its interpreter, and whatever ends one of
    them ends all of them. Default: 1."""


@dataclass(frozen=True, slots=True)
class ReducerSpec:
    """The settings of the reducers: how they fetch, reduce and commit."""

    class_name: str
    """Your subclass of ``Reducer``, as ``module:Class``. YAML key: ``class``."""
    count: int
    """The number of reducers. It cannot be changed over existing state."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Your own part of the spec: any names and values, which the class finds in ``self.config``. Default: empty."""
    fetch_rows_max: int = 100_000
    """The most rows in one response of one mapper. Default: 100,000."""
    fetch_bytes_max: int = 16 * MIB
    """The most bytes in one response of one mapper. Default: 16 MiB."""
    fetch_wait_ms: int = 500
    """Milliseconds that a mapper holds a request when it has no rows for it. While it has none they double with each
    request, up to 4 seconds. Default: 500."""
    share_memory: bool = True
    """True to read rows of mappers on the same machine from shared memory, and not from a socket. Default: true."""
    batch_rows_max: int = 2_000_000
    """The most rows given to ``reduce`` at once, from all mappers. Default: 2,000,000."""
    batch_bytes_max: int = 64 * MIB
    """The most bytes given to ``reduce`` at once, from all mappers. Default: 64 MiB."""
    backoff_ms: int = 50
    """Milliseconds before the first retry after a failure; the wait doubles with each retry. Default: 50."""
    backoff_ms_max: int = 5_000
    """The longest wait between retries, in milliseconds. Default: 5,000."""
    on_error: OnError = "stop"
    """The reaction to an exception in ``reduce``: ``stop`` reports it and ends the reducer; ``dead_letter`` sets the
    rows aside that cause it, and goes on. Default: stop."""
    dead_letter_queue: str | None = None
    """The queue for rows that are set aside, with ``on_error: dead_letter``. Default:
    ``<processor>/reducer_dead_letters``."""
    per_process: int = 1
    """The number of reducers in one process. They share its interpreter, and whatever ends one of them ends all of
    them. Default: 1."""


@dataclass(frozen=True, slots=True)
class SpillSpec:
    """The settings for reducers that lag behind: mappers move their rows to the store, so that the others can go on.

    YAML key: ``spill``, a mapping, or ``true`` or ``false``.
    """

    enabled: bool = True
    """True to spill rows of reducers that lag behind. With ``false``, the mapper stops reading when a slow reducer has
    filled its window; rows that are spilled already are still served. Default: true."""
    reducers_done_share: float = 0.5
    """A reducer is late when at least this share of the reducers is ahead of it. Default: 0.5."""
    age_ms: int = 2_000
    """A late reducer is a straggler when it has not reached the position where the others were this many milliseconds
    ago. Default: 2,000."""
    memory_share: float = 0.5
    """Rows of stragglers are spilled while the window holds more than this share of ``mapper.memory``. Default: 0.5."""
    compression: Compression = "lz4"
    """The compression of spilled rows. Default: lz4."""


@dataclass(frozen=True, slots=True)
class ProcessorSpec:
    """One streaming processor."""

    processor: str
    """The name of the processor, which is the prefix of its tables and lease groups."""
    state: str
    """The location of the state store: a folder, relative to that of the spec, or ``grpc://host:port`` of a running
    daemon."""
    input: InputSpec
    """The input from which the mappers read rows."""
    mapper: MapperSpec
    """The settings of the mappers: how they read, map and keep rows."""
    reducer: ReducerSpec
    """The settings of the reducers: how they fetch, reduce and commit."""
    output: OutputSpec | None = None
    """The output to which reducers emit rows with ``Reducer.emit``. Without it they may not emit any. Default: none."""
    dead_letters: OutputSpec | None = None
    """The place outside of the state store to which exporters move the rows that were set aside (``on_error:
    dead_letter``). Default: they stay in their queues."""
    spill: SpillSpec = field(default_factory=SpillSpec)
    """The settings for reducers that lag behind."""
    max_parallelism: int = KEY_GROUPS_DEFAULT
    """The number of key groups. Reducers own contiguous ranges of them, so there can never be more reducers, and it
    cannot be changed over existing state. Default: 4,096."""
    lease_ttl_ms: int = 5_000
    """Milliseconds after which a worker that has not renewed its lease is no longer listed. Default: 5,000."""
    metrics: bool | int = True
    """The port on which each worker serves Prometheus metrics over HTTP: ``true`` is any free port, and with ``false``
    they are not served. A number is the first port of a range in which the reducers come before the mappers; a process
    with several mappers takes the port of its first one. A store that ``shuffle run`` starts takes the port before the
    range, and exporters those before that one, downwards. Default: true."""
    path: Path = Path("<none>")
    """The file from which the spec was read."""
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """The line of each key in that file, by the path of the key (``mapper.class``)."""

    def at(self, key_path: str) -> str:
        """The beginning of a message about the key ``key_path``: file, line and key."""
        nearest = key_path
        while nearest and nearest not in self.lines:
            nearest = nearest.rpartition(".")[0]
        line = self.lines.get(nearest)
        return f"{self.path}:{line}: {key_path}" if line else f"{self.path}: {key_path}"

    @property
    def state_folder(self) -> Path | None:
        """The folder of the embedded store; None if ``state`` is the address of a store elsewhere."""
        return state_folder(self.state)

    @property
    def mappers_table(self) -> str:
        return tables.mappers_table(self.processor)

    @property
    def reducers_table(self) -> str:
        return tables.reducers_table(self.processor)

    @property
    def reads_table(self) -> str:
        return tables.reads_table(self.processor)

    @property
    def spills_table(self) -> str:
        return tables.spills_table(self.processor)

    @property
    def exports_table(self) -> str:
        return tables.exports_table(self.processor)

    @property
    def outbox(self) -> str:
        """The queue for rows on their way to an output outside of the state store."""
        return tables.outbox_queue(self.processor)

    @property
    def meta_table(self) -> str:
        return tables.meta_table(self.processor)

    def dead_letter_queue(self, role: Literal["mapper", "reducer"]) -> str:
        """The name of the queue for rows that this role sets aside, if it does so."""
        named = self.mapper.dead_letter_queue if role == "mapper" else self.reducer.dead_letter_queue
        return named or tables.dead_letter_queue(self.processor, role)

    @property
    def exported_dead_letter_queues(self) -> dict[str, tables.Role]:
        """The dead-letter queues whose rows are moved to a place outside of the state store, each with the first role
        that uses it."""
        found: dict[str, tables.Role] = {}
        if self.dead_letters is not None and self.mapper.on_error == "dead_letter":
            found[self.dead_letter_queue("mapper")] = "mapper"
        if self.dead_letters is not None and self.reducer.on_error == "dead_letter":
            found.setdefault(self.dead_letter_queue("reducer"), "reducer")
        return found

    def metrics_port(self, role: Literal["mapper", "reducer", "exporter"], index: int) -> int | None:
        """The port on which a worker serves its metrics: 0 for any free one, None if it serves none."""
        if isinstance(self.metrics, bool):
            return 0 if self.metrics else None
        if role == "exporter":
            return self.metrics - 2 - index
        return self.metrics + index + (self.reducer.count if role == "mapper" else 0)

    def store_metrics_port(self) -> int | None:
        """The port on which a store that is started for this processor serves its metrics: 0 for any free one, None if
        it serves none."""
        if isinstance(self.metrics, bool):
            return 0 if self.metrics else None
        return self.metrics - 1

    def open_state(self) -> StateClient:
        """A client of this processor's store. If a daemon serves the folder, the client connects to that daemon."""
        from shuffle.statestore import StateClient

        return StateClient.open(self.state, timeout_s=WORKER_RESPONSE_S_MAX)


def state_folder(state: str) -> Path | None:
    """The folder that ``state`` names, or None when it is the address of a store elsewhere."""
    if ":" not in state:  # It is a folder, which is known without importing the store.
        return Path(state)
    from shuffle.statestore.client.open_store import folder_of

    return folder_of(state)


def relation_mistakes(spec: ProcessorSpec) -> list[tuple[str, str]]:
    """The mistakes between fields that are each valid alone, as (path of the key, what is wrong)."""
    mapper, reducer = spec.mapper, spec.reducer
    checks = [
        (
            mapper.batch_bytes_max <= mapper.memory_bytes,
            "mapper.memory",
            f"{mapper.memory_bytes} cannot hold a batch of {mapper.batch_bytes_max}: raise it or lower batch_bytes_max",
        ),
        (
            mapper.batch_bytes_max <= mapper.memory_bytes // mapper.per_process
            or mapper.batch_bytes_max > mapper.memory_bytes,
            "mapper.per_process",
            f"{mapper.per_process} mappers in one process have {mapper.memory_bytes // mapper.per_process} bytes each, "
            f"which cannot hold a batch of {mapper.batch_bytes_max}: lower it or batch_bytes_max, or raise memory",
        ),
        (
            reducer.count <= spec.max_parallelism,
            "reducer.count",
            f"{reducer.count} cannot share {spec.max_parallelism} key groups: lower it, or raise max_parallelism",
        ),
        (
            reducer.backoff_ms <= reducer.backoff_ms_max,
            "reducer.backoff_ms",
            f"{reducer.backoff_ms} is above backoff_ms_max={reducer.backoff_ms_max}",
        ),
        (
            mapper.on_error == "dead_letter" or mapper.dead_letter_queue is None,
            "mapper.dead_letter_queue",
            "is never used with on_error: stop; write on_error: dead_letter, or leave it out",
        ),
        (
            reducer.on_error == "dead_letter" or reducer.dead_letter_queue is None,
            "reducer.dead_letter_queue",
            "is never used with on_error: stop; write on_error: dead_letter, or leave it out",
        ),
        (
            spec.input.consumes is None
            or spec.input.consumes not in (mapper.dead_letter_queue, reducer.dead_letter_queue),
            f"input.{spec.input.kind}",
            "is also a dead letter queue: rows set aside would be read again for ever",
        ),
    ]
    if spec.output is not None and spec.output.appends_to is not None:
        key_path, queue = f"output.{spec.output.kind}", spec.output.appends_to
        is_dead_letters = queue in (mapper.dead_letter_queue, reducer.dead_letter_queue)
        dead_letters = "is also a dead letter queue, whose rows are of another form: emit to another one"
        checks += [(queue != spec.input.consumes, key_path, IS_INPUT), (not is_dead_letters, key_path, dead_letters)]
    checks.append(
        (
            spec.dead_letters is None or "dead_letter" in (mapper.on_error, reducer.on_error),
            "dead_letters",
            "is never used with on_error: stop; write on_error: dead_letter for mapper or reducer, or leave it out",
        )
    )
    return [(key_path, what) for is_valid, key_path, what in checks if not is_valid]


RANGES: dict[str, tuple[int, int]] = {
    "memory_bytes": (1 * MIB, 1024 * GIB),
    "mapper.batch_rows_max": (1, 10_000_000),
    "mapper.batch_bytes_max": (1024, BATCH_BYTES_MAX),
    "read_wait_ms": (0, WAIT_MS_MAX),
    "trim_period_ms": (1, 3_600_000),
    "split_brain_delay_ms": (0, 600_000),
    "per_process": (1, PER_PROCESS_MAX),
    "partitions_per_mapper": (1, PARTITIONS_PER_MAPPER_MAX),
    "count": (1, REDUCERS_MAX),
    "fetch_rows_max": (1, 10_000_000),
    "fetch_bytes_max": (1024, BATCH_BYTES_MAX),
    "fetch_wait_ms": (0, WAIT_MS_MAX),
    "reducer.batch_rows_max": (1, TRANSACTION_ROWS_MAX),
    "reducer.batch_bytes_max": (1024, TRANSACTION_BYTES_MAX),
    "output.batch_rows_max": (1, 100_000_000),
    "output.batch_bytes_max": (1024, 1 * GIB),
    "dead_letters.batch_rows_max": (1, 100_000_000),
    "dead_letters.batch_bytes_max": (1024, 1 * GIB),
    "batch_age_ms": (0, 86_400_000),
    "backoff_ms": (1, 600_000),
    "backoff_ms_max": (1, 600_000),
    "max_parallelism": (1, 32_768),
    "lease_ttl_ms": (300, 600_000),
    "age_ms": (1, 86_400_000),
}
"""The smallest and the largest value of each number, by its field. A number beyond them is a mistake in the spec."""


def load_spec(path: str | os.PathLike[str]) -> ProcessorSpec:
    """The spec in ``path``. Raises one ``SpecError`` that names every mistake with its line and key.

    The address in the environment variable ``SHUFFLE_STATE``, if it is set, replaces ``state``: a controller passes the
    address of the store that it has started to its workers in this way.
    """
    from shuffle.spec.spec_file import parse_spec

    spec = parse_spec(Path(path))
    address = os.environ.get("SHUFFLE_STATE")
    if not address:
        return spec
    from shuffle.statestore.client.open_store import address_forms, is_address

    if not is_address(address):
        raise SpecError(f"the environment's SHUFFLE_STATE is {address!r}, which is not {' or '.join(address_forms())}")
    return replace(spec, state=address)
