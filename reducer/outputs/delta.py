"""A Delta table as a sink: rows and the position of the outbox in one commit of the table's log.

The position is the version of an *application transaction* of ours, ``PROCESSOR/I``. A commit that was prepared before
another one with the same application id is refused by the table's own check for conflicts, which is the fence: whoever
opened the table before somebody else published cannot publish any more. Commits of others (other partitions of the
outbox, other writers that append) do not matter.

Only the exporter's process imports this module, and with it the library (129 MB). Data files of a commit that never
happened are left behind and are no part of the table; ``vacuum`` removes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, SchemaMismatchError, TableNotFoundError

from shuffle.errors import PublishUnknown, ServiceUnavailable, ShuffleError, SinkRefused, SplitBrain
from shuffle.formats.secrets import resolved
from shuffle.reducer.outputs.sink import Sink, SinkPlace

_ABOUT_THE_ROWS = ("Arrow error", "Cast error", "Schema", "schema", "Invalid data", "not supported")
"""What the library's untyped errors say when it is the rows that do not fit."""


class DeltaSink(Sink):
    keeps_position = True

    def __init__(self, place: SinkPlace) -> None:
        self._uri = str(place.config["delta"])
        self._columns = list(place.config["partition_by"])
        self._schema = place.schema
        self._app = f"{place.name}/{place.partition}"
        options = place.config["storage_options"] or {}
        self._options = {
            name: resolved(value, place.folder, f"storage_options.{name}") for name, value in options.items()
        }
        self._table: Any = None

    @property
    def identity(self) -> str:
        return f"delta {self._uri}"

    def open(self) -> int | None:
        with self._errors("opening it", ServiceUnavailable):
            try:
                self._table = DeltaTable(self._uri, storage_options=self._options)
            except TableNotFoundError:
                # Two exporters may create it at the same time: the second finds it.
                self._table = DeltaTable.create(
                    self._uri,
                    self._schema,
                    mode="ignore",
                    partition_by=self._columns or None,
                    storage_options=self._options,
                )
                self._table = DeltaTable(self._uri, storage_options=self._options)
        self._check_partitioning()
        found = self._table.transaction_version(self._app)
        return None if found is None else int(found)

    def _check_partitioning(self) -> None:
        found = list(self._table.metadata().partition_columns)
        if self._columns and found != self._columns:
            raise SinkRefused(
                f"{self.identity} is partitioned by {', '.join(found) or 'nothing'}, and the spec says "
                f"{', '.join(self._columns)}: leave partition_by out, or name another table"
            )

    def publish(self, rows: pa.Table, begin: int, end: int) -> None:
        properties = CommitProperties(app_transactions=[Transaction(self._app, end)])
        with self._errors("writing to it", PublishUnknown):
            write_deltalake(
                self._table,
                rows.cast(self._schema),
                mode="append",
                storage_options=self._options,
                commit_properties=properties,
            )

    @contextmanager
    def _errors(self, doing: str, otherwise: type[ShuffleError]) -> Iterator[None]:
        try:
            yield
        except CommitFailedError as error:
            raise SplitBrain(f"{self.identity}: {doing}: another commit came first: {error}") from None
        except (SchemaMismatchError, TypeError, ValueError, pa.ArrowException) as error:
            raise SinkRefused(f"{self.identity}: {doing}: {error}") from None
        except Exception as error:  # The library raises plain ones, too.
            if any(words in str(error) for words in _ABOUT_THE_ROWS):
                raise SinkRefused(f"{self.identity}: {doing}: {error}") from None
            raise otherwise(f"{self.identity}: {doing}: {error}; the exporter tries again") from None
