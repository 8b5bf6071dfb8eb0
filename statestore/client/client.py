"""``StateClient``: what users and workers have of the state store, embedded or served."""

from __future__ import annotations

import difflib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from shuffle.errors import BadInput, ShuffleError, StoreLocked, TooLarge, UnknownTable
from shuffle.limits import BATCH_BYTES_MAX, MIB
from shuffle.statestore.client.transaction import Snapshot, Transaction, encoded_append, payloads
from shuffle.statestore.codec.schema import QueueSchema, TableSchema
from shuffle.statestore.codec.segment import decode_batch
from shuffle.statestore.codec.sorted_table import Bound, Table
from shuffle.statestore.local.store_folder import folder_path
from shuffle.statestore.request import Append, CommitRequest, CreateQueue, CreateTable, Drop, Trim
from shuffle.statestore.store import STAGED_TTL_MS_DEFAULT, Member, Moment, QueueRead, Store
from shuffle.statestore.wire.announcement import served_at
from shuffle.statestore.wire.operations import check_section
from shuffle.support.fields import whole

READ_ROWS_DEFAULT = 65_536
READ_BYTES_DEFAULT = 16 * MIB

_OPEN_WAIT_S = 3.0
"""How long ``open`` waits for a process that holds the folder to say where it serves: a daemon on its way up."""


class StateClient:
    """Tables, queues, transactions and leases of one state store. Safe to use from many threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._tables: dict[str, Table] = {}
        self._queues: dict[str, Queue] = {}
        self.leases = Leases(store)
        """Named groups of members that are alive."""

    @staticmethod
    def connect(address: str, timeout_s: float | None = None, local_files: bool = True) -> StateClient:
        """A client of the daemon at ``grpc://host:port``. Raises ``StoreUnavailable`` if it does not answer.

        ``timeout_s`` is how many seconds a call waits for its answer, 30 by default.
        On the daemon's machine the rows of queues are read from its files, where this process may read them; without
        ``local_files`` they come over the wire, as they do from another machine.
        """
        from shuffle.statestore.remote.remote import RemoteStore

        return StateClient(RemoteStore(address, timeout_s=timeout_s, local_files=local_files))

    @staticmethod
    def open(folder: str | os.PathLike[str], timeout_s: float | None = None) -> StateClient:
        """The store in ``folder``: through the daemon that serves it, if there is one, else in this process.

        A folder that is not there is made. Raises ``StoreLocked`` if another process has it open and serves nobody.
        ``timeout_s`` is for the daemon, as in ``connect``.
        """
        path = folder_path(folder)
        deadline = time.monotonic() + _OPEN_WAIT_S
        while True:
            client = StateClient.serving(path, timeout_s)
            if client is not None:
                return client
            try:
                from shuffle.statestore.local.local import LocalStore

                return StateClient(LocalStore(path))
            except StoreLocked:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    @staticmethod
    def serving(folder: Path, timeout_s: float | None = None) -> StateClient | None:
        """A client of the daemon that serves the store in ``folder``; None if there is none."""
        address = served_at(folder.absolute())
        if address is None:
            return None
        try:
            client = StateClient.connect(address, timeout_s)
        except ShuffleError:
            # The daemon that left its address is gone, or is being replaced; or something else has its port.
            return None
        if client.serves(folder):
            return client
        # The daemon that left its address is gone, and that of another store has its port now.
        client.close()
        return None

    @property
    def store(self) -> Store:
        """What this client is a client of: for another one that does the same in its own way."""
        return self._store

    # --- tables and queues ---

    def create_table(
        self,
        name: str,
        key: pa.Schema,
        value: pa.Schema,
        constraints: Mapping[str, str] | None = None,
        if_not_exists: bool = False,
    ) -> TableSchema:
        """Create a table whose rows are sorted by ``key``; no two rows have the same key.

        ``constraints`` are named conditions on the value columns, as in SQL's CHECK: a row that breaks one is refused
        with ``ConstraintViolated``. Raises ``TableExists`` if the name is taken; with ``if_not_exists``, a table with
        the same columns and constraints is no mistake.
        """
        schema = TableSchema(name, key, value, dict(constraints or {}))
        schema.validate()
        self._store.change_catalogue(CreateTable(schema, if_not_exists))
        self._forget(name)  # What was known by this name may have been dropped by others, and is another table now.
        return self.table(name)

    def create_queue(self, name: str, schema: pa.Schema, partitions: int, if_not_exists: bool = False) -> Queue:
        """Create a queue: ``partitions`` sequences of rows, each read in the order of its appends.

        Raises ``TableExists`` if the name is taken; with ``if_not_exists``, a queue with the same columns and as many
        partitions is no mistake.
        """
        wanted = QueueSchema(name, schema, partitions)
        wanted.validate()
        self._store.change_catalogue(CreateQueue(wanted, if_not_exists))
        self._forget(name)
        return self.queue(name)

    def drop_table(self, name: str) -> None:
        """Remove a table with all its rows. Raises ``UnknownTable`` if there is none of that name."""
        self._store.change_catalogue(Drop("table", name))
        self._forget(name)

    def drop_queue(self, name: str) -> None:
        """Remove a queue with all its rows. Raises ``UnknownTable`` if there is none of that name."""
        self._store.change_catalogue(Drop("queue", name))
        self._forget(name)

    def tables(self) -> list[TableSchema]:
        """All tables, in the order of their names."""
        return sorted(self._store.tables(), key=lambda schema: schema.name)

    def queues(self) -> list[QueueSchema]:
        """All queues, in the order of their names."""
        return sorted(self._store.queues(), key=lambda schema: schema.name)

    def table(self, name: str) -> TableSchema:
        """The columns and constraints of a table. Raises ``UnknownTable`` if there is none of that name."""
        return self.table_handle(name).schema

    def table_handle(self, name: str) -> Table:
        with self._lock:
            found = self._tables.get(name)
        if found is None:
            schemas = {schema.name: schema for schema in self._store.tables()}
            found = Table(_named(schemas, name, "table"))
            with self._lock:
                self._tables[name] = found
        return found

    def queue(self, name: str) -> Queue:
        """The queue of that name, to append to and read from. Raises ``UnknownTable`` if there is none."""
        with self._lock:
            found = self._queues.get(name)
        if found is None:
            schemas = {schema.name: schema for schema in self._store.queues()}
            found = Queue(self._store, _named(schemas, name, "queue"), on_gone=partial(self._forget, name))
            with self._lock:
                self._queues[name] = found
        return found

    def forget_names(self) -> None:
        """A table was unknown to the store: what this client knows of the names may be out of date."""
        with self._lock:
            self._tables.clear()
            self._queues.clear()

    def _forget(self, name: str) -> None:
        with self._lock:
            self._tables.pop(name, None)
            self._queues.pop(name, None)

    # --- reading and writing ---

    def transaction(self) -> Transaction:
        """Begin a transaction. It reads at one moment, and changes nothing until its ``commit``."""
        return Transaction(self, self._store)

    def snapshot(self) -> Snapshot:
        """All tables as they are now, to be read without a transaction. Use it in a ``with``, or close it."""
        return Snapshot(self, self._store)

    def share_snapshot(self, ttl_ms: int) -> str:
        """The present moment, held by the daemon for other processes: a token for their ``snapshot_at``.

        It ends when nobody has renewed it (``Snapshot.renew``, ``snapshot_at``) for ``ttl_ms``, not with this client.
        """
        moment = self._store.share_moment(ttl_ms)
        return f"{moment.session_id}.{moment.moment_id}.{moment.version}"

    def snapshot_at(self, token: str) -> Snapshot:
        """Reads at the moment of a ``share_snapshot``. Closing it leaves the moment to the others."""
        parts = token.split(".")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise BadInput(f"not the token of a shared snapshot: {token!r}")
        session_id, moment_id, version = (int(part) for part in parts)
        snapshot = Snapshot(self, self._store, Moment(moment_id, version, session_id))
        snapshot.renew()
        return snapshot

    def lookup(self, table: str, keys: pa.Table | pa.RecordBatch) -> pa.Table:
        """The rows with these keys, as of now; missing ones are absent."""
        return self._fresh(table, lambda found: self._lookup(found, keys))

    def _lookup(self, table: Table, keys: pa.Table | pa.RecordBatch) -> pa.Table:
        conformed, encoded = table.encode_keys(keys)
        return table.found_rows(conformed, self._store.get(None, table.table_id, encoded))

    def scan(
        self,
        table: str,
        begin: Bound | None = None,
        end: Bound | None = None,
        prefix: Bound | None = None,
        limit: int | None = None,
        reverse: bool = False,
        columns: list[str] | None = None,
        partial: bool = False,
    ) -> pa.RecordBatchReader:
        """The rows of a range, as ``Snapshot.scan``, at a moment that is held until the last of them was read."""
        snapshot = self.snapshot()
        reader = snapshot.scan(table, begin, end, prefix, limit, reverse, columns, partial)
        return pa.RecordBatchReader.from_batches(reader.schema, _closing(reader, snapshot))

    def _fresh(self, table: str, use: Callable[[Table], pa.Table]) -> pa.Table:
        """Run ``use``, and once more with a newly read schema when the table was created anew meanwhile."""
        try:
            return use(self.table_handle(table))
        except UnknownTable:
            self._forget(table)
            return use(self.table_handle(table))

    # --- the rest ---

    def stats(self) -> dict[str, Any]:
        """Bytes written, per table, per queue and in all, since the store was opened."""
        return self._store.stats()

    @property
    def address(self) -> str:
        """Where the store is: ``grpc://host:port``, or its folder."""
        return self._store.address

    def serves(self, folder: Path) -> bool:
        """Whether this is the store in ``folder``, as seen from this process."""
        found = self._store.folder
        return found is not None and found.exists() and folder.exists() and found.samefile(folder)

    def close(self) -> None:
        """Give the store back. Of an embedded one, everything that was committed is on disk by then."""
        self._store.close()

    def __enter__(self) -> StateClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Queue:
    """A queue: rows in partitions, each row at a position that counts from 0 and never changes.

    One that was dropped and created anew is another queue, with other rows at the same positions: a handle of the old
    one says ``UnknownTable``, and ``StateClient.queue`` gives the new one.
    """

    def __init__(self, store: Store, description: QueueSchema, on_gone: Callable[[], None] = lambda: None) -> None:
        """``on_gone`` is called when the store does not know the queue any more."""
        self._store = store
        self._description = description
        self._on_gone = on_gone
        self.queue_id = description.queue_id

    @property
    def name(self) -> str:
        """The name of the queue."""
        return self._description.name

    @property
    def schema(self) -> pa.Schema:
        """The columns of its rows."""
        return self._description.schema

    @property
    def partitions(self) -> int:
        """How many partitions it has; they are numbered from 0."""
        return self._description.partitions

    def append(
        self,
        partition: int,
        rows: pa.Table | pa.RecordBatch,
        producer: str | None = None,
        sequence: int | None = None,
    ) -> tuple[int, int]:
        """Append rows durably; returns their positions, from ``begin`` up to and without ``end``.

        With a ``producer`` and a ``sequence`` (which grows with each append), repeating an append whose answer was lost
        is safe: it appears once, and both get the same answer.
        """
        append = self.encoded(partition, rows, producer, sequence)
        with self._noticing():
            return self._store.commit(CommitRequest(appends=[append])).appended[0]

    def encoded(
        self, partition: int, rows: pa.Table | pa.RecordBatch, producer: str | None, sequence: int | None
    ) -> Append:
        if (producer is None) != (sequence is None):
            raise BadInput("producer and sequence go together: give both, or none")
        partition, sequence = whole(partition), whole(sequence)
        append = encoded_append(self.queue_id, partition, self._description.conform_rows(rows), producer, sequence)
        check_section("append", self.queue_id, partition, len(append.payloads), producer, sequence)
        self._check_sizes(append.payloads)
        return append

    def stage(self, rows: pa.Table | pa.RecordBatch, ttl_ms: int = STAGED_TTL_MS_DEFAULT) -> str:
        """Write rows durably but invisibly; ``Transaction.publish`` makes them part of a partition.

        Returns the id to publish. Rows that are not published within ``ttl_ms`` are removed.
        """
        encoded = payloads(self._description.conform_rows(rows))
        self._check_sizes(encoded)
        with self._noticing():
            return self._store.stage(self.queue_id, encoded, ttl_ms)

    def _check_sizes(self, encoded: list[pa.Buffer]) -> None:
        """The store checks it again; here it is found before it travels."""
        largest = max((payload.size for payload in encoded), default=0)
        if largest > BATCH_BYTES_MAX:
            raise TooLarge(
                f"queue {self.name!r}: one row, or some rows of very different sizes, have {largest} bytes, more than "
                f"{BATCH_BYTES_MAX}",
                queue=self.name,
                limit=BATCH_BYTES_MAX,
            )

    def discard(self, staged_id: str) -> None:
        """Give up staged rows before their time is over."""
        self._store.discard(staged_id)

    def read(
        self,
        partition: int,
        begin: int,
        max_rows: int = READ_ROWS_DEFAULT,
        max_bytes: int = READ_BYTES_DEFAULT,
        wait_ms: int = 0,
        one_answer: bool = False,
    ) -> tuple[pa.Table, int]:
        """Rows from the position ``begin`` on, and the position after them; waits up to ``wait_ms`` for the first one.

        Raises ``OutOfRange`` if ``begin`` was trimmed or lies after the end.
        ``max_bytes`` is kept to about one row, and at least one row is returned if there is any. With ``one_answer``
        the store is asked once, which may give fewer rows than there are: it does not read on from file to file.
        """
        partition, begin, max_rows = whole(partition), whole(begin), whole(max_rows)
        if max_rows < 1 or max_bytes < 1:
            raise BadInput(f"max_rows and max_bytes must be at least 1, not {max_rows} and {max_bytes}")
        max_bytes = min(max_bytes, BATCH_BYTES_MAX)
        batches: list[pa.RecordBatch] = []
        position, size_bytes = begin, 0
        while position - begin < max_rows and size_bytes < max_bytes:
            wanted = max_rows - (position - begin)
            with self._noticing():
                found = self._store.read(
                    self.queue_id, partition, position, wanted, max_bytes - size_bytes, 0 if batches else wait_ms
                )
            if found is None:
                break
            for batch in self._decoded(found, position, wanted):
                cut = _within(batch, max_bytes - size_bytes, at_least_one=not batches)
                if not cut.num_rows:
                    return pa.Table.from_batches(batches, self.schema), position
                batches.append(cut)
                position += cut.num_rows
                size_bytes += cut.nbytes
            if one_answer:
                break
        return pa.Table.from_batches(batches, self.schema), position

    def _decoded(self, found: QueueRead, begin: int, max_rows: int) -> Iterable[pa.RecordBatch]:
        offset = found.offset
        for record in found.records:
            head, batch = decode_batch(record, self.schema, found.file, offset)
            first = found.segment_begin + head.first_row
            batch = batch.slice(max(begin - first, 0), max_rows)
            yield batch
            begin += batch.num_rows
            max_rows -= batch.num_rows
            offset += record.size

    def trim(self, partition: int, index: int) -> None:
        """Give up the rows below the position ``index`` for good; whole files are freed."""
        partition, index = whole(partition), whole(index)
        check_section("trim", self.queue_id, partition, index)
        with self._noticing():
            self._store.commit(CommitRequest(trims=[Trim(self.queue_id, partition, index)]))

    def bounds(self) -> list[tuple[int, int]]:
        """For each partition: the first position that can be read, and the one after the last."""
        with self._noticing():
            return self._store.bounds(self.queue_id)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except UnknownTable:
            self._on_gone()
            raise


class Lease:
    """A place in a group. It is lost when it is not renewed in time."""

    def __init__(self, store: Store, lease_id: int) -> None:
        self._store = store
        self.lease_id = lease_id

    def renew(self) -> None:
        """Keep the place for as long again. Raises ``Expired`` when it is too late for that."""
        self._store.renew(self.lease_id)

    def leave(self) -> None:
        """Give the place up now, instead of letting it run out."""
        self._store.leave(self.lease_id)


class Leases:
    """Named groups of members that are alive."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def register(self, group: str, member: str, attributes: Mapping[str, str], ttl_ms: int) -> Lease:
        """Join a group for ``ttl_ms`` milliseconds, again with each ``renew``; a member of that name is replaced."""
        return Lease(self._store, self._store.register(group, member, attributes, ttl_ms))

    def members(self, group: str) -> list[Member]:
        """Who is in a group now; an unknown group is an empty one."""
        return self._store.members(group)[1]

    def watch(self, group: str, revision: int, wait_ms: int) -> tuple[int, list[Member]]:
        """Wait up to ``wait_ms`` until the group's revision is not ``revision`` (to begin, any other number will do).

        Returns the revision and the members; each change of a group gives it another revision.
        """
        return self._store.watch(group, revision, wait_ms)

    def groups(self) -> list[str]:
        """The groups that have members now."""
        return self._store.groups()


def _named(schemas: Mapping[str, Any], name: str, kind: str) -> Any:
    if name in schemas:
        return schemas[name]
    similar = difflib.get_close_matches(name, schemas, 1)
    hint = f"; did you mean {similar[0]!r}?" if similar else ""
    raise UnknownTable(f"there is no {kind} {name!r}{hint}", table=name)


def _within(batch: pa.RecordBatch, max_bytes: int, at_least_one: bool) -> pa.RecordBatch:
    """The front of ``batch`` that fits into ``max_bytes``, taking its rows as equally large."""
    if batch.nbytes <= max_bytes or not batch.num_rows:
        return batch
    rows = int(batch.num_rows * max(max_bytes, 0) / batch.nbytes)
    return batch.slice(0, max(rows, 1) if at_least_one else rows)


def _closing(reader: pa.RecordBatchReader, snapshot: Snapshot) -> Iterable[pa.RecordBatch]:
    with snapshot:
        yield from reader
