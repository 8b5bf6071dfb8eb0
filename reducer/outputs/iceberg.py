"""An Iceberg table as a sink: rows and the position of the outbox in one snapshot of the table.

The position is a property of the snapshot's summary, ``shuffle.PROCESSOR.I``. Each of our snapshots has the positions
of all exporters that were known when it was made, so that the newest one is enough even when older ones were expired;
the snapshots of others (compaction, other writers) have none, and are passed over.

A commit names the snapshot that it follows, and the catalog refuses it if there is another one by then. By default the
library then does it again by itself, *whatever the other one was*: the rows of an exporter that has been replaced would
come in a second time. So the table gets ``commit.retry.num-retries=0``, and what to do about a refused commit is
decided here: if our own position is what it was, another writer came first, and the rows are appended again; else
another instance of this exporter lives.

Only the exporter's process imports this module, and with it the library.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    ForbiddenError,
    NoSuchTableError,
    TableAlreadyExistsError,
    UnauthorizedError,
)

from shuffle.errors import PublishUnknown, ServiceUnavailable, ShuffleError, SinkRefused, SplitBrain
from shuffle.formats.secrets import resolved
from shuffle.reducer.outputs.sink import Sink, SinkPlace

RETRIES = "commit.retry.num-retries"
ATTEMPTS_MAX = 20
"""The most appends of one batch that other writers may come before."""

_one_at_a_time = threading.Lock()
"""Held while a batch is appended: the exporters of one process would only refuse each other's commits."""


class IcebergSink(Sink):
    keeps_position = True

    def __init__(self, place: SinkPlace) -> None:
        self._name = str(place.config["iceberg"])
        self._schema = place.schema
        self._property = f"shuffle.{place.name}.{place.partition}"
        given = place.config["catalog"] or {}
        self._settings = {name: resolved(value, place.folder, f"catalog.{name}") for name, value in given.items()}
        # Some catalogs keep the tables of each name apart, and settings may be in the library's own file, by this name.
        self._catalog = self._settings.pop("name", "default")
        self._table: Any = None
        self._seen: int | None = None

    @property
    def identity(self) -> str:
        return f"iceberg {self._name}"

    def open(self) -> int | None:
        with _one_at_a_time, self._errors("opening it", ServiceUnavailable):
            self._table = self._loaded()
            if self._table.properties.get(RETRIES) != "0":
                with self._table.transaction() as change:
                    change.set_properties({RETRIES: "0"})
            self._seen = self._positions().get(self._property)
        return self._seen

    def _loaded(self) -> Any:
        catalog = load_catalog(self._catalog, **self._settings)
        try:
            return catalog.load_table(self._name)
        except NoSuchTableError:
            catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
        try:
            return catalog.create_table(self._name, schema=self._schema, properties={RETRIES: "0"})
        except TableAlreadyExistsError:  # Another exporter was first.
            return catalog.load_table(self._name)

    def _positions(self) -> dict[str, int]:
        """The positions in the newest snapshot that has any, going back from the current one."""
        snapshot = self._table.current_snapshot()
        while snapshot is not None:
            found = snapshot.summary.additional_properties if snapshot.summary is not None else {}
            positions = {name: int(value) for name, value in found.items() if name.startswith("shuffle.")}
            if positions:
                return positions
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
        return {}

    def publish(self, rows: pa.Table, begin: int, end: int) -> None:
        with _one_at_a_time, self._errors("writing to it", PublishUnknown):
            for _ in range(ATTEMPTS_MAX):
                # Another exporter of this process may have appended. The commit is compared with what is loaded here.
                self._table.refresh()
                positions = self._positions()
                if positions.get(self._property) != self._seen:
                    raise SplitBrain(f"{self.identity}: another instance of the exporter has published")
                positions[self._property] = end
                properties = {name: str(value) for name, value in positions.items()}
                try:
                    self._table.append(rows, snapshot_properties=properties)
                except CommitFailedException:
                    continue
                self._seen = end
                return
        raise ServiceUnavailable(f"{self.identity}: {ATTEMPTS_MAX} commits in a row came after those of other writers")

    @contextmanager
    def _errors(self, doing: str, otherwise: type[ShuffleError]) -> Iterator[None]:
        text = f"{self.identity}: {doing}"
        try:
            yield
        except ShuffleError:
            raise
        except (CommitStateUnknownException, CommitFailedException) as error:
            raise otherwise(f"{text}: {error}; the exporter tries again") from None
        except (ValueError, TypeError, NotImplementedError, ForbiddenError, UnauthorizedError) as error:
            raise SinkRefused(f"{text}: {error}") from None
        except Exception as error:  # Those of catalogs and file systems, which the library passes on.
            raise otherwise(f"{text}: {type(error).__name__}: {error}; the exporter tries again") from None
