"""The tables and queues of a store by their names, as the store has described them last."""

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
    """What a client, its transactions and its snapshots know of the names in a store. Safe to use from many threads.

    A table that is dropped and created anew has another id, so what is known of a name can be out of date: whoever is
    told ``UnknownTable`` by the store calls ``forget`` or ``forget_all``, and the store is asked again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._tables: dict[str, Table] = {}
        self._queues: dict[str, Queue] = {}

    def table(self, name: str) -> Table:
        """Raises ``UnknownTable`` if there is none of that name."""
        with self._lock:
            found = self._tables.get(name)
        if found is None:
            schemas = {schema.name: schema for schema in self._store.tables()}
            found = Table(_named(schemas, name, "table"))
            with self._lock:
                self._tables[name] = found
        return found

    def queue(self, name: str) -> Queue:
        """Raises ``UnknownTable`` if there is none of that name."""
        with self._lock:
            found = self._queues.get(name)
        if found is None:
            schemas = {schema.name: schema for schema in self._store.queues()}
            found = Queue(self._store, _named(schemas, name, "queue"), on_gone=partial(self.forget, name))
            with self._lock:
                self._queues[name] = found
        return found

    def forget(self, name: str) -> None:
        with self._lock:
            self._tables.pop(name, None)
            self._queues.pop(name, None)

    def forget_all(self) -> None:
        """The store did not know a table by its id, and it is not known by which name that was looked up."""
        with self._lock:
            self._tables.clear()
            self._queues.clear()


def _named(schemas: Mapping[str, Any], name: str, kind: str) -> Any:
    if name in schemas:
        return schemas[name]
    similar = difflib.get_close_matches(name, schemas, 1)
    hint = f"; did you mean {similar[0]!r}?" if similar else ""
    raise UnknownTable(f"there is no {kind} {name!r}{hint}", table=name)
