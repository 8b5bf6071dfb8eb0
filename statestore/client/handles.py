"""The handles of a store's tables and queues by their names, as the store described them last."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from shuffle.errors import UnknownTable
from shuffle.statestore.client.queue import Queue
from shuffle.statestore.codec.sorted_table import Table
from shuffle.statestore.store import Store


class Handles:
    """The handles that a client shares with its transactions and snapshots. Safe to use from many threads.

    A table that is dropped and created anew has another id, so a handle can be out of date: a caller that gets
    ``UnknownTable`` from the store calls ``forget`` or ``forget_all``, and the next use reads the schema again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._tables: dict[str, Table] = {}
        self._queues: dict[str, Queue] = {}

    def table(self, name: str) -> Table:
        """Raises ``UnknownTable`` if there is none of that name."""
        with self._lock:
            table = self._tables.get(name)
        if table is None:
            schemas = {schema.name: schema for schema in self._store.tables()}
            table = Table(_named(schemas, name, "table"))
            with self._lock:
                self._tables[name] = table
        return table

    def queue(self, name: str) -> Queue:
        """Raises ``UnknownTable`` if there is none of that name."""
        with self._lock:
            queue = self._queues.get(name)
        if queue is None:
            schemas = {schema.name: schema for schema in self._store.queues()}
            queue = Queue(self._store, _named(schemas, name, "queue"), on_gone=partial(self.forget, name))
            with self._lock:
                self._queues[name] = queue
        return queue

    def forget(self, name: str) -> None:
        with self._lock:
            self._tables.pop(name, None)
            self._queues.pop(name, None)

    def forget_all(self) -> None:
        """Forget all handles: the store did not know an id, and it is not known to which name that id belonged."""
        with self._lock:
            self._tables.clear()
            self._queues.clear()


def _named(schemas: Mapping[str, Any], name: str, kind: str) -> Any:
    if name in schemas:
        return schemas[name]
    similar = difflib.get_close_matches(name, schemas, 1)
    hint = f"; did you mean {similar[0]!r}?" if similar else ""
    raise UnknownTable(f"there is no {kind} {name!r}{hint}", table=name)
