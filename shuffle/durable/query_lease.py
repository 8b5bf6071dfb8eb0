"""The one Spark query that reads a processor, as everybody else sees it.

Who reads is a row of ``<processor>/meta``, which changes hands in a transaction: of two queries that start at once one
gets it. Whether that query is still there is told by a lease, as for workers. Both are written by
``spark_connector.lease``; this module needs no Spark, so that reducers can look, too.
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
"""The name of the row in ``<processor>/meta``."""


@dataclass(frozen=True)
class QueryHolder:
    """One run of a query: a process that Spark has started in its driver, for as long as the query runs."""

    guid: str
    host: str
    driver_pid: int
    """Of the process that the user knows: Spark's driver."""
    pid: int
    started: str
    """When that process was started, in the kernel's own count: a pid alone may be somebody else's by now."""
    place: str
    """Which processes can see each other's pids: the machine since its last boot, and the namespace on it."""
    since: str
    query_id: str = ""
    query_name: str = ""
    """The id and the name are known as soon as the first task of the query runs."""

    def described(self) -> str:
        name = f" {self.query_name!r}" if self.query_name else ""
        query_id = f" (id {self.query_id})" if self.query_id else ""
        return (
            f"the query{name}{query_id} of the Spark driver on {self.host}, pid {self.driver_pid}, since {self.since}"
        )

    @property
    def is_here(self) -> bool:
        """Whether this process would see that one."""
        return bool(self.place) and self.place == pid_namespace()

    @property
    def is_dead(self) -> bool:
        """Whether it is certain that the process is gone; one elsewhere may be, too."""
        return self.is_here and process_started(self.pid) != self.started


def pid_namespace() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_started(pid: int) -> str:
    """When a process of this machine was started; nothing for one that has ended."""
    try:
        # The name before the last bracket may hold anything; the state is the first field after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""


def stored_holder(source: Any, processor: str) -> QueryHolder | None:
    """Who has taken the processor, as ``source`` (a client, a transaction) sees it; perhaps gone without a word."""
    found = source.lookup(meta_table(processor), holder_key())
    return QueryHolder(**json.loads(found["value"][0].as_py())) if found.num_rows else None


def holder_key() -> pa.Table:
    return pa.table({"name": [HOLDER]})


def holder_row(holder: QueryHolder) -> pa.Table:
    return holder_key().append_column("value", pa.array([json.dumps(asdict(holder))]))


def has_lease(client: StateClient, processor: str, holder: QueryHolder) -> bool:
    return any(member.name == holder.guid for member in client.leases.members(query_group(processor)))


def refuse_beside_query(client: StateClient, processor: str) -> None:
    """For reducers: a query that reads the processor has the rows that they would count a second time."""
    holder = stored_holder(client, processor)
    if holder is not None and not holder.is_dead and has_lease(client, processor, holder):
        raise BadInput(
            f"processor {processor} is read by {holder.described()}: its rows would be counted by reducers as well. "
            "Stop the query, or run only the mappers (`shuffle run SPEC --mappers-only`)",
            processor=processor,
        )
