"""``StateClient``: the state store for users and workers, embedded or served."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from shuffle.errors import BadInput, UnknownTable
from shuffle.statestore.client.cached_lookup import CachedLookups
from shuffle.statestore.client.handles import Handles
from shuffle.statestore.client.leases import Leases
from shuffle.statestore.client.open_store import (
    OpenOptions,
    folder_of,
    is_store_in,
    open_remote,
    open_served,
    open_store,
)
from shuffle.statestore.client.queue import Queue
from shuffle.statestore.client.row_cache import RowCache
from shuffle.statestore.client.transaction import PreparedRows, Snapshot, Transaction
from shuffle.statestore.codec.schema import QueueSchema, TableSchema
from shuffle.statestore.codec.sorted_table import Bound, Table
from shuffle.statestore.request import CreateQueue, CreateTable, Drop
from shuffle.statestore.store import ReadView, Store


class StateClient:
    """Tables, queues, transactions and leases of one state store. Safe to use from many threads."""

    def __init__(self, store: Store, row_cache: RowCache | None = None) -> None:
        self._store = store
        self._row_cache = row_cache
        self._handles = Handles(store)
        self._cached_lookups = CachedLookups(store, self._handles)
        self.leases = Leases(store)
        """The named groups of members that are alive."""

    @staticmethod
    def connect(
        address: str, timeout_s: float | None = None, local_files: bool = True, lane: bool | None = None
    ) -> StateClient:
        """A client of the daemon at ``grpc://host:port``. Raises ``StoreUnavailable`` if it does not respond.

        ``timeout_s`` is the number of seconds that a call waits for its response, 30 by default.
        On the daemon's machine the rows of queues are read from its files, where this process may read them; without
        ``local_files`` they come over the wire, as they do from another machine.
        Small requests go over the daemon's lane, a channel of plain sockets; with ``lane=False``, or
        ``SHUFFLE_STORE_LANE=off`` in the environment, everything goes over Arrow Flight.
        """
        options = OpenOptions(timeout_s, local_files, lane)
        # Without a scheme it can only be the host and port of a daemon.
        opener = open_store if folder_of(address) is None else open_remote
        return StateClient(opener(address, options))

    @staticmethod
    def open(folder: str | os.PathLike[str], timeout_s: float | None = None) -> StateClient:
        """The store in ``folder``: through the daemon that serves it, if there is one, else in this process.

        A folder that is not there is made. Raises ``StoreLocked`` if another process has it open and serves nobody.
        ``timeout_s`` is for the daemon, as in ``connect``. Instead of a folder, an address as for ``connect`` is
        accepted as well.
        """
        return StateClient(open_store(folder, OpenOptions(timeout_s)))

    @staticmethod
    def serving(folder: Path, timeout_s: float | None = None) -> StateClient | None:
        """A client of the daemon that serves the store in ``folder``; None if there is none."""
        store = open_served(folder, OpenOptions(timeout_s))
        return None if store is None else StateClient(store)

    def with_row_cache(self, cache: RowCache) -> StateClient:
        """A client of the same store whose transactions look up rows in ``cache`` first and update it on commit.

        It shares the store with this client; close only this client.
        """
        return StateClient(self._store, cache)

    @property
    def store(self) -> Store:
        """The store that this client reads and writes, in encoded rows."""
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
        the same columns and constraints is accepted.
        """
        schema = TableSchema(name, key, value, dict(constraints or {}))
        schema.validate()
        self._store.change_catalogue(CreateTable(schema, if_not_exists))
        # Another client may have dropped the table that had this name before, so the old handle may be wrong.
        self._handles.forget(name)
        return self.table(name)

    def create_queue(self, name: str, schema: pa.Schema, partitions: int, if_not_exists: bool = False) -> Queue:
        """Create a queue: ``partitions`` sequences of rows, each read in the order of its appends.

        Raises ``TableExists`` if the name is taken; with ``if_not_exists``, a queue with the same columns and as many
        partitions is accepted.
        """
        description = QueueSchema(name, schema, partitions)
        description.validate()
        self._store.change_catalogue(CreateQueue(description, if_not_exists))
        self._handles.forget(name)
        return self.queue(name)

    def drop_table(self, name: str) -> None:
        """Remove a table with all its rows. Raises ``UnknownTable`` if there is none of that name."""
        self._store.change_catalogue(Drop("table", name))
        self._handles.forget(name)

    def drop_queue(self, name: str) -> None:
        """Remove a queue with all its rows. Raises ``UnknownTable`` if there is none of that name."""
        self._store.change_catalogue(Drop("queue", name))
        self._handles.forget(name)

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
        """The codecs of a table."""
        return self._handles.table(name)

    def queue(self, name: str) -> Queue:
        """The queue of that name, to append to and read from. Raises ``UnknownTable`` if there is none."""
        return self._handles.queue(name)

    def refresh(self) -> None:
        """Ask the store again for tables and queues when they are used next.

        A client that lives long may remember one that others have dropped, or created anew with other columns: the
        first use of it would raise ``UnknownTable``.
        """
        self._handles.forget_all()

    # --- reading and writing ---

    def transaction(self) -> Transaction:
        """Begin a transaction. It reads one version of the store, and changes nothing until its ``commit``."""
        return Transaction(self._handles, self._store, self._row_cache)

    def snapshot(self) -> Snapshot:
        """All tables as they are now, to be read without a transaction. Use it in a ``with``, or close it."""
        return Snapshot(self._handles, self._store)

    def share_snapshot(self, ttl_ms: int) -> str:
        """A snapshot of now that the daemon keeps for other processes: returns a token for their ``snapshot_at``.

        It ends when nobody has renewed it (``Snapshot.renew``, ``snapshot_at``) for ``ttl_ms``, not with this client.
        """
        view = self._store.share_view(ttl_ms)
        return f"{view.session_id}.{view.view_id}.{view.version}"

    def snapshot_at(self, token: str) -> Snapshot:
        """The snapshot of a ``share_snapshot``. Closing it here does not end it for the others."""
        parts = token.split(".")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise BadInput(f"not the token of a shared snapshot: {token!r}")
        session_id, view_id, version = (int(part) for part in parts)
        snapshot = Snapshot(self._handles, self._store, ReadView(view_id, version, session_id))
        snapshot.renew()
        return snapshot

    def prepare(self, table: str, rows: pa.Table | pa.RecordBatch) -> PreparedRows:
        """Encode rows for a table once, so that several transactions can write or expect them."""
        return PreparedRows.of(self._handles.table(table), rows)

    def lookup(self, table: str, keys: pa.Table | pa.RecordBatch) -> pa.Table:
        """The rows with these keys, as of now; missing ones are absent."""
        return self._retry_if_recreated(table, lambda handle: self._lookup(handle, keys))

    def _lookup(self, table: Table, keys: pa.Table | pa.RecordBatch) -> pa.Table:
        conformed, encoded = table.encode_keys(keys)
        return table.decode_lookup(conformed, self._store.get(None, table.table_id, encoded))

    def cached_lookup(self, table: str, key: Sequence[Any]) -> pa.Table:
        """The row with this key as of now, or no row: a ``lookup`` for one row that is read very often.

        ``key`` has the values of the key columns, in their order. The row is read each time, but it is decoded only if
        it has changed: as long as it has not, the same object is returned.
        """
        return self._cached_lookups.lookup(table, key)

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
        """The rows of a range, like ``Snapshot.scan``, in a snapshot that is kept until the last of them was read."""
        snapshot = self.snapshot()
        reader = snapshot.scan(table, begin, end, prefix, limit, reverse, columns, partial)
        return pa.RecordBatchReader.from_batches(reader.schema, _closing(reader, snapshot))

    def _retry_if_recreated(self, table: str, use: Callable[[Table], pa.Table]) -> pa.Table:
        """Run ``use``, and once more with a newly read schema when the table was created anew meanwhile."""
        try:
            return use(self.table_handle(table))
        except UnknownTable:
            self._handles.forget(table)
            return use(self.table_handle(table))

    # --- the rest ---

    def stats(self) -> dict[str, Any]:
        """Bytes written, per table, per queue and in all, since the store was opened."""
        return self._store.stats()

    @property
    def address(self) -> str:
        """The address of the store: ``grpc://host:port``, or its folder."""
        return self._store.address

    def serves(self, folder: Path) -> bool:
        """Says whether this is the store in ``folder``, as seen from this process."""
        return is_store_in(self._store, folder)

    def close(self) -> None:
        """Close the store. Everything that was committed to an embedded one is on disk then."""
        self._store.close()

    def __enter__(self) -> StateClient:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _closing(reader: pa.RecordBatchReader, snapshot: Snapshot) -> Iterable[pa.RecordBatch]:
    with snapshot:
        yield from reader
