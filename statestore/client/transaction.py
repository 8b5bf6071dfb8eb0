"""Transactions and snapshots, as users have them.

A transaction lives in the client. It reads in one read view, records its read set, and buffers its writes, which only
its own reads see. ``commit`` sends everything in one request. So an abandoned transaction costs the store nothing but
its read view, which is released when the client's session ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import pyarrow as pa

from shuffle.errors import BadInput, TooLarge, UnknownTable
from shuffle.limits import LOGGED_ROWS_MIN, TRANSACTION_BYTES_MAX, TRANSACTION_ROWS_MAX
from shuffle.statestore.client.handles import Handles
from shuffle.statestore.client.row_cache import RowCache
from shuffle.statestore.client.scan import Chunk, overlay_writes, scan_chunks, split_ranges
from shuffle.statestore.codec.arrow_bytes import Binary, bytes_of, no_values, sort_by_key, to_array, to_list
from shuffle.statestore.codec.sorted_table import Bound, Table
from shuffle.statestore.key_range import KeyRange
from shuffle.statestore.request import CommitRequest, Committed, Precondition, Publish, ReadSet, TableWrite, Trim
from shuffle.statestore.store import ReadView, Store
from shuffle.statestore.wire.operations import check_section
from shuffle.support.fields import as_int


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """Rows that were encoded for a table once, for several transactions (``StateClient.prepare``)."""

    rows: pa.Table | pa.RecordBatch
    """The rows as they were given."""
    table_id: int
    """The id of the table that they are encoded for; a table that is created anew has another."""
    keys: Binary
    """The encoded keys."""
    values: Binary
    """The encoded values."""

    @staticmethod
    def of(table: Table, rows: pa.Table | pa.RecordBatch) -> PreparedRows:
        """Encode ``rows`` for ``table``."""
        return PreparedRows(rows, table.table_id, *table.encode_rows(rows))


def _encoded(table: Table, rows: pa.Table | pa.RecordBatch | PreparedRows) -> tuple[Binary, Binary]:
    if not isinstance(rows, PreparedRows):
        return table.encode_rows(rows)
    if rows.table_id == table.table_id:
        return rows.keys, rows.values
    return table.encode_rows(rows.rows)  # The table was dropped and created anew.


class _ViewReader:
    """What a snapshot and a transaction have in common: typed reads in one read view."""

    def __init__(self, handles: Handles, store: Store) -> None:
        self._handles = handles
        self._store = store
        self._view: ReadView | None = None

    def lookup(self, table: str, keys: pa.Table | pa.RecordBatch) -> pa.Table:
        """The rows with these keys: key and value columns, in the order of ``keys``; missing ones are absent."""
        handle = self._handles.table(table)
        conformed, encoded = handle.encode_keys(keys)
        return handle.decode_lookup(conformed, self._get(handle, encoded))

    def lookup_values(self, table: str, keys: pa.Table | pa.RecordBatch) -> pa.Table:
        """The value columns of the rows with these keys, a row for each key and in their order; null where no row has
        the key."""
        handle = self._handles.table(table)
        _, encoded = handle.encode_keys(keys)
        return handle.decode_values(self._get(handle, encoded))

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
        """The rows of a range in the order of their keys, or backwards.

        ``begin`` (inclusive) and ``end`` (exclusive) are leading key values: a mapping by name, or a sequence in order;
        ``prefix`` is all rows with those leading values, and with ``partial`` its last value is only the beginning of a
        string. At most ``limit`` rows come, and only ``columns`` of them if these are named.
        """
        handle = self._handles.table(table)
        key_range = KeyRange(*handle.range(begin, end, prefix, partial))
        if limit is not None and limit < 0:
            raise BadInput(f"limit must not be negative, not {limit}")
        schema = handle.schema.row
        for column in columns or []:
            if column not in schema.names:
                raise BadInput(f"table {table!r} has no column {column!r}", table=table, column=column)
        batches = (handle.decode_rows(*chunk) for chunk in self._chunks(handle, key_range, limit, reverse))
        if columns is None:
            return pa.RecordBatchReader.from_batches(schema, batches)
        projected = pa.schema([schema.field(column) for column in columns])
        return pa.RecordBatchReader.from_batches(projected, (batch.select(columns) for batch in batches))

    def _get(self, table: Table, keys: Binary) -> Binary:
        try:
            if self._view is not None:
                return self._store.get(self._view, table.table_id, keys)
            self._view, values = self._store.open_view_and_get(table.table_id, keys)
        except UnknownTable:
            self._handles.forget_all()
            raise
        return values

    def _chunks(self, table: Table, key_range: KeyRange, limit: int | None, reverse: bool) -> Iterator[Chunk]:
        return scan_chunks(lambda *args: self._fetch(table, reverse, *args), key_range, limit, reverse)

    def _fetch(self, table: Table, reverse: bool, begin: bytes, end: bytes | None, rows_max: int) -> Chunk:
        try:
            return self._store.scan(self._opened(), table.table_id, begin, end, rows_max, reverse)
        except UnknownTable:
            self._handles.forget_all()
            raise

    def _opened(self) -> ReadView:
        if self._view is None:
            self._view = self._store.open_view()
        return self._view

    @property
    def version(self) -> int:
        """The version of the store that is read here."""
        return self._opened().version

    def _release(self) -> None:
        if self._view is not None:
            view, self._view = self._view, None
            self._store.release_view(view)

    def _abandon(self) -> None:
        """Release the view of an object that its user forgot to close.

        A finaliser may run at any point of any thread, so this sends no request and waits for nothing.
        """
        if self._view is not None:
            self._store.abandon_view(self._view)


class Snapshot(_ViewReader):
    """A consistent view of all tables, which is never blocked by writers and never blocks them. Close it when done."""

    def __init__(self, handles: Handles, store: Store, shared: ReadView | None = None) -> None:
        super().__init__(handles, store)
        self._closed = False
        self._view = self._shared = shared
        self._opened()

    def close(self) -> None:
        """Release the read view, so that the store need not keep its old versions of rows."""
        self._closed = True
        if self._shared is None:
            self._release()

    def renew(self) -> None:
        """Keep a shared snapshot for as long again. A snapshot of this client alone needs no renewal."""
        self._store.renew_view(self._opened())

    def split(self, table: str, parts: int, ranges: Sequence[KeyRange] | None = None) -> list[KeyRange]:
        """Cuts ``ranges`` of a table (default: all of it) into at least ``parts`` pieces with rows, if it has enough.

        The cuts divide the bytes between the first and the last key evenly, so the pieces have similar numbers of rows
        only if the keys are evenly distributed.
        """
        handle = self._handles.table(table)
        fetch = partial(self._fetch, handle)
        key_ranges = ranges if ranges is not None else [KeyRange(*handle.range(None, None, None))]
        return split_ranges(lambda reverse, begin, end: fetch(reverse, begin, end, 1)[0], key_ranges, parts)

    def scan_range(self, table: str, key_range: KeyRange) -> pa.RecordBatchReader:
        """The rows of one piece of ``split``."""
        handle = self._handles.table(table)
        batches = (handle.decode_rows(*chunk) for chunk in self._chunks(handle, key_range, None, False))
        return pa.RecordBatchReader.from_batches(handle.schema.row, batches)

    def _opened(self) -> ReadView:
        if self._closed:
            raise BadInput("the snapshot is closed")
        return super()._opened()

    def _get(self, table: Table, keys: Binary) -> Binary:
        self._opened()
        return super()._get(table, keys)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._shared is None:  # A shared view is left to the other clients, however this object ends.
            self._abandon()


class Transaction(_ViewReader):
    """Reads and writes that take effect together or not at all.

    ``commit`` has three outcomes: it returns (committed and durable), raises ``CommitConflict`` (nothing happened, run
    the transaction again) or ``CommitUnknown`` (the response was lost: read the state again to learn which it was).
    """

    def __init__(self, handles: Handles, store: Store, cache: RowCache | None = None) -> None:
        super().__init__(handles, store)
        self._cache = cache
        self._seen: dict[bytes, bytes | None] = {}
        """The rows that this transaction has read, from the store or from the cache; empty without a cache."""
        self._request = CommitRequest()
        self._keys_read: list[Binary] = []
        self._ranges_read: list[KeyRange] = []
        self._tables: dict[int, Table] = {}
        self._own: dict[int, dict[bytes, bytes | None]] = {}
        self._over: str | None = None
        self.is_committed = False
        """True if the store has acknowledged the commit. False may also mean that its response was lost."""
        self._size_bytes = 0
        self._rows = 0

    # --- preconditions ---

    def expect(self, table: str, rows: pa.Table | pa.RecordBatch | PreparedRows) -> None:
        """Commit only if the table has exactly these rows at that time, before this transaction's own writes.

        The store compares them when it commits, so a row whose content is known need not be read again. If a row
        differs, or does not exist, ``commit`` raises ``CommitConflict``.
        """
        self._check_open()
        handle = self._handles.table(table)
        self._add_precondition(Precondition(handle.table_id, *_encoded(handle, rows)), table)

    def expect_absent(self, table: str, keys: pa.Table | pa.RecordBatch) -> None:
        """Commit only if no row of the table has one of these keys at the time of the commit."""
        self._check_open()
        handle = self._handles.table(table)
        _, encoded = handle.encode_keys(keys)
        self._add_precondition(Precondition(handle.table_id, encoded, no_values(encoded)), table)

    def _add_precondition(self, added: Precondition, table: str) -> None:
        if len(added.keys):
            self._grow(bytes_of(added.keys) + bytes_of(added.values), len(added.keys), table)
            self._request.preconditions.append(added)

    # --- writing ---

    def write(self, table: str, rows: pa.Table | pa.RecordBatch | PreparedRows) -> None:
        """Insert rows, or replace those with the same keys."""
        self._check_open()
        handle = self._handles.table(table)
        self._tables[handle.table_id] = handle
        keys, values = _encoded(handle, rows)
        if len(keys) < LOGGED_ROWS_MIN:
            # A larger write goes to a changelog, where the order of its keys does not matter.
            keys, values = sort_by_key(keys, values)
        self._add(TableWrite(handle.table_id, keys, values), table)

    def delete(self, table: str, keys: pa.Table | pa.RecordBatch) -> None:
        """Delete the rows with these keys; keys without a row are ignored."""
        self._check_open()
        handle = self._handles.table(table)
        self._tables[handle.table_id] = handle
        _, encoded = handle.encode_keys(keys)
        self._add(TableWrite(handle.table_id, encoded, no_values(encoded)), table)

    def append(
        self,
        queue: str,
        partition: int,
        rows: pa.Table | pa.RecordBatch,
        producer: str | None = None,
        sequence: int | None = None,
    ) -> None:
        """Append rows to a partition of a queue. Their positions are in the result of ``commit``."""
        self._check_open()
        append = self._handles.queue(queue).encode_append(partition, rows, producer, sequence)
        self._grow(sum(payload.size for payload in append.payloads), 0, queue)
        self._request.appends.append(append)

    def publish(self, queue: str, partition: int, staged_id: str) -> None:
        """Make rows visible that ``Queue.stage`` has written before."""
        self._check_open()
        target = self._handles.queue(queue).queue_id, as_int(partition)
        check_section("publish", *target, staged_id)
        self._request.appends.append(Publish(*target, staged_id))

    def appends_to(self, queue: str) -> set[int]:
        """The partitions of ``queue`` that this transaction appends to."""
        queue_id = self._handles.queue(queue).queue_id
        return {append.partition for append in self._request.appends if append.queue_id == queue_id}

    def trim(self, queue: str, partition: int, index: int) -> None:
        """Remove the rows of a partition below the position ``index``."""
        self._check_open()
        target, index = (self._handles.queue(queue).queue_id, as_int(partition)), as_int(index)
        check_section("trim", *target, index)
        self._request.trims.append(Trim(*target, index))

    def _add(self, write: TableWrite, table: str) -> None:
        if not len(write.keys):
            return
        self._grow(write.size_bytes, len(write.keys), table)
        self._request.writes.append(write)
        self._own.pop(write.table_id, None)

    def _grow(self, size_bytes: int, rows: int, name: str) -> None:
        self._size_bytes += size_bytes
        self._rows += rows
        if self._size_bytes > TRANSACTION_BYTES_MAX or self._rows > TRANSACTION_ROWS_MAX:
            raise TooLarge(
                f"with these rows of {name!r} the transaction has {self._rows} rows and {self._size_bytes} bytes; at "
                f"most {TRANSACTION_ROWS_MAX} rows and {TRANSACTION_BYTES_MAX} bytes are taken: split it",
                table=name,
            )

    # --- reading: the rows of the store, with this transaction's own writes over them ---

    def _get(self, table: Table, keys: Binary) -> Binary:
        self._check_open()
        if self._cache is not None and 0 < len(keys) <= self._cache.keys_max:
            return self._get_through(self._cache, table, keys)
        values = self._get_stored(table, keys)
        own = self._own_writes(table.table_id)
        if not own:
            return values
        return [own.get(key, value) for key, value in zip(to_list(keys), to_list(values), strict=True)]

    def _get_stored(self, table: Table, keys: Binary) -> Binary:
        values = super()._get(table, keys)
        self._keys_read.append(keys)
        return values

    def _get_through(self, cache: RowCache, table: Table, keys: Binary) -> Binary:
        """The values of ``keys``, the missing ones null:

        1. those that this transaction has read before, with the same values;
        2. those that the cache knows, which become preconditions of the commit;
        3. the others from the store, which become part of the read set;
        4. over all of them, what this transaction wrote itself.
        """
        requested: list[bytes] = to_list(keys)
        as_given = to_list if isinstance(keys, list) else to_array
        unseen = [key for key in requested if key not in self._seen]  # 1
        known = cache.among(unseen)  # 2
        if known:
            self._seen.update(known)
            names, values = as_given(list(known)), as_given(list(known.values()))
            self._add_precondition(Precondition(table.table_id, names, values), table.schema.name)
        unknown = [key for key in unseen if key not in known]  # 3
        if unknown:
            stored = self._get_stored(table, as_given(unknown))
            self._seen.update(zip(unknown, to_list(stored), strict=True))
        own = self._own_writes(table.table_id)  # 4
        return as_given([own[key] if key in own else self._seen[key] for key in requested])

    def _chunks(self, table: Table, key_range: KeyRange, limit: int | None, reverse: bool) -> Iterator[Chunk]:
        self._check_open()
        own = self._own_writes(table.table_id)

        def fetch(begin: bytes, end: bytes | None, rows_max: int) -> Chunk:
            return self._fetch(table, reverse, begin, end, rows_max)

        merged = overlay_writes(fetch, own, reverse) if own else fetch
        return scan_chunks(merged, key_range, limit, reverse, self._ranges_read.append)

    def _own_writes(self, table_id: int) -> dict[bytes, bytes | None]:
        """What this transaction wrote to a table, by key; built only when something is read after it."""
        if table_id not in self._own:
            own: dict[bytes, bytes | None] = {}
            for write in self._request.writes:
                if write.table_id == table_id:
                    own.update(zip(to_list(write.keys), to_list(write.values), strict=True))
            self._own[table_id] = own
        return self._own[table_id]

    # --- the end ---

    def check(self) -> None:
        """Raise now what the constraints of the tables would make of a commit. ``commit`` needs no such call."""
        self._check_open()
        for write in self._request.writes:
            self._tables[write.table_id].check(write.values)

    def commit(self) -> Committed:
        """Make everything take effect at once; when this returns, it is durable.

        Raises ``CommitConflict`` (something read has changed: nothing was written, run the transaction again),
        ``CommitUnknown`` (the response was lost: read the state again), or what is wrong with the rows, such as
        ``ConstraintViolated``. Whatever happens, the transaction is over.
        """
        self._check_open()
        self._over = "committed"
        view, self._view = self._view, None
        if view is not None:
            self._request.reads = ReadSet(view.version, self._keys_read, self._ranges_read)
        try:
            committed = self._store.commit(self._request, view)
        except BaseException as error:
            if isinstance(error, UnknownTable):
                self._handles.forget_all()
            if self._cache is not None:
                self._cache.forget()
            raise
        self.is_committed = True
        if self._cache is not None:
            self._update_cache(self._cache)
        return committed

    def _update_cache(self, cache: RowCache) -> None:
        """Put the rows of an acknowledged commit into the cache: what it read and wrote is what the store holds now."""
        writes = self._request.writes
        if any(len(write.keys) > cache.keys_max for write in writes):
            # The other rows may still be right, but a caller that writes so many rows does not look up a few of them.
            cache.forget()
            return
        for write in writes:
            self._seen.update(zip(to_list(write.keys), to_list(write.values), strict=True))
        cache.learn(self._seen)

    def abort(self) -> None:
        """Discard the transaction. After ``commit`` this does nothing, so a ``with`` may end with it."""
        if self._over is None:
            self._over = "aborted"
        self._release()

    def _check_open(self) -> None:
        if self._over is not None:
            raise BadInput(f"the transaction was {self._over} already; begin another one")

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        self._abandon()
