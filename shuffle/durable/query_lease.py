"""The one Spark query that reads a processor, as other processes see it.

A row of ``<processor>/meta`` names the query that reads. It is written in a transaction, so that of two queries that
start at the same time one gets it. A lease, as workers have, shows that the query still runs. Both are written by
``spark_connector.source.query_lease``; this module needs no Spark, so that reducers can check them, too.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shuffle.durable.tables import meta_table, query_group
from shuffle.errors import BadInput

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

HOLDER = "spark_query"
"""The name of the row in ``<processor>/meta`` that holds the query."""


@dataclass(frozen=True)
class QueryHolder:
    """One run of a query: a process that Spark's driver has started, and that lives as long as the query runs."""

    guid: str
    """The name of this run; each run of a query has another one."""
    host: str
    """The name of the machine on which the query runs."""
    driver_pid: int
    """The pid of Spark's driver, which is the process that the user knows."""
    pid: int
    """The pid of the process that runs the query."""
    started: str
    """The start time of the process ``pid``, in the kernel's own count: another process may have the same pid later."""
    place: str
    """The boot id of the machine and its pid namespace: processes see each other's pids if both are the same."""
    since: str
    """The time at which the query has taken the processor, as text."""
    query_id: str = ""
    """Spark's id of the query; it is known once the first task of the query runs."""
    query_name: str = ""
    """The name of the query, if it has one; it is known once the first task of the query runs."""

    def described(self) -> str:
        name = f" {self.query_name!r}" if self.query_name else ""
        query_id = f" (id {self.query_id})" if self.query_id else ""
        return (
            f"the query{name}{query_id} of the Spark driver on {self.host}, pid {self.driver_pid}, since {self.since}"
        )

    @property
    def is_here(self) -> bool:
        """Whether this process can see the pid of the query's process."""
        return bool(self.place) and self.place == pid_namespace()

    @property
    def is_dead(self) -> bool:
        """Whether the query's process is known to have ended; False for a process that cannot be seen from here."""
        return self.is_here and process_started(self.pid) != self.started


def pid_namespace() -> str:
    """The boot id and the pid namespace of this process; empty where the kernel does not tell."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_started(pid: int) -> str:
    """The start time of a process of this machine; empty if it has ended."""
    try:
        # The name before the last bracket may contain anything; the state is the first field after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""


def stored_holder(source: Any, processor: str) -> QueryHolder | None:
    """The query that has taken the processor, as ``source`` (a client, a transaction) sees it. It may have ended
    without giving the processor back."""
    rows = source.lookup(meta_table(processor), holder_key())
    return QueryHolder(**json.loads(rows["value"][0].as_py())) if rows.num_rows else None


def holder_key() -> pa.Table:
    return pa.table({"name": [HOLDER]})


def holder_row(holder: QueryHolder) -> pa.Table:
    return holder_key().append_column("value", pa.array([json.dumps(asdict(holder))]))


def has_lease(client: StateClient, processor: str, holder: QueryHolder) -> bool:
    return any(member.name == holder.guid for member in client.leases.members(query_group(processor)))


def refuse_beside_query(client: StateClient, processor: str) -> None:
    """Raises ``BadInput`` if a query reads the processor: reducers would count the rows of that query a second time."""
    holder = stored_holder(client, processor)
    if holder is not None and not holder.is_dead and has_lease(client, processor, holder):
        raise BadInput(
            f"processor {processor} is read by {holder.described()}: its rows would be counted by reducers as well. "
            "Stop the query, or run only the mappers (`shuffle run SPEC --mappers-only`)",
            processor=processor,
        )
