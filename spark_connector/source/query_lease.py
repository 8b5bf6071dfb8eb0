"""One query at a time: the lease that a streaming query holds on the processor it reads.

A query commits in the reducers' place: of two queries on one processor each would get some of the rows, and some rows
would go to both. The first one writes itself down in ``<processor>/meta`` and keeps a lease; the second one finds both
and is refused, with the name of the first. A query whose driver has died is replaced:

- on the same machine at once, since the process that held the lease is seen to be gone;
- else when its lease has ended.

The lease says when one may be replaced; it protects nobody from a driver that was only paused and comes back. The row
does: every commit of positions reads it in its own transaction, and it is looked at before rows are handed out and
when a task begins.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pyspark import TaskContext

from shuffle.durable.query_lease import (
    QueryHolder,
    has_lease,
    holder_key,
    holder_row,
    process_place,
    process_started,
    stored_holder,
)
from shuffle.durable.tables import meta_table, query_group
from shuffle.errors import BadInput, CommitConflict, CommitUnknown, Expired, ShuffleError, SplitBrain
from shuffle.ids import new_guid
from shuffle.spark_connector.source.processor import Processor
from shuffle.spark_connector.waiting import say
from shuffle.statestore import Lease, StateClient

LEASE_TTL_MS = 10_000
"""How long a driver on another machine must have been silent before its query may be replaced."""

RENEW_S = 1.0
ABSENT_S = 3 * RENEW_S
"""A holder without a lease may be alive if the store was restarted; then it has registered again by now."""

ENDING_S = 3.0
"""A query that was stopped a moment ago on this machine may need so long to end."""

LOOK_S = 0.1

QUERY_ID = "sql.streaming.queryId"
"""The property of a task that says which query it belongs to."""


class QueryLease:
    """Held by the process that Spark keeps for the query in its driver."""

    def __init__(self, processor: Processor, ttl_ms: int = LEASE_TTL_MS) -> None:
        self._processor = processor
        self._ttl_ms = ttl_ms
        self.holder = QueryHolder(
            guid=new_guid(),
            host=socket.gethostname(),
            driver_pid=os.getppid(),
            pid=os.getpid(),
            started=process_started(os.getpid()),
            place=process_place(),
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        )
        self._lease: Lease | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="query-lease", daemon=True)

    def take(self) -> None:
        """Returns when the processor is this query's; raises ``BadInput`` when it is another's that lives.

        1. Nobody has it, or one that has certainly ended: take it.
        2. The lease of the one that has it is gone, and stays away: take it.
        3. Its lease does not end in the time that a dead one's would: it lives, and this query is refused.
        """
        began_s = absent_s = time.monotonic()
        told = False
        while True:
            now_s = time.monotonic()
            other, alive = self._look(take_absent=now_s - absent_s > ABSENT_S)
            if other is None:
                break
            if alive:
                absent_s = now_s
                patience_s = ENDING_S if other.is_here else self._ttl_ms / 1000 + RENEW_S
                if now_s - began_s > patience_s:
                    raise self._refused(other)
            if not told:
                told = True
                say(f"processor {self._processor.name}: waiting to see whether {other.described()} has ended")
            time.sleep(LOOK_S)
        self._renew()
        self._thread.start()

    def check(self) -> None:
        """Raises ``SplitBrain`` when another query has taken the place of this one."""
        self.check_in(None)

    def check_in(self, tx: Any) -> None:
        """The same as a part of ``tx``, which is not committed if the place is taken meanwhile."""
        name = self._processor.name
        found = stored_holder(tx, name) if tx is not None else stored_now(self._processor)
        if found is None or found.guid != self.holder.guid:
            raise replaced(name, found)

    def release(self) -> None:
        """At the end of the query; if the store cannot be told, the lease ends by itself."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(RENEW_S)
        with suppress(ShuffleError):
            client = self._processor.store.client()
            with client.transaction() as tx:
                found = stored_holder(tx, self._processor.name)
                if found is not None and found.guid == self.holder.guid:
                    tx.delete(meta_table(self._processor.name), holder_key())
                    tx.commit()
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(ShuffleError):
                lease.leave()

    def _look(self, take_absent: bool) -> tuple[QueryHolder | None, bool]:
        """Who else has the processor, and whether they have a lease; nobody, if it is this query's now."""
        name = self._processor.name

        def attempt(client: StateClient) -> tuple[QueryHolder | None, bool]:
            with client.transaction() as tx:
                found = stored_holder(tx, name)
                if found is not None and found.guid == self.holder.guid:
                    return None, False  # An answer was lost: it is ours.
                if found is not None and not found.is_dead:
                    alive = has_lease(client, name, found)
                    if alive or not take_absent:
                        return found, alive
                tx.write(meta_table(name), holder_row(self.holder))
                tx.commit()
                return None, False

        return self._processor.store.in_transaction(attempt)

    def _keep(self) -> None:
        while not self._stopping.wait(RENEW_S):
            if os.getppid() != self.holder.driver_pid:
                # The driver is dead. This process may be in the middle of a long wait, for nobody.
                self.release()
                return
            self._renew()

    def _renew(self) -> None:
        with suppress(ShuffleError):
            try:
                if self._lease is not None:
                    self._lease.renew()
                    return
            except Expired:
                # Paused for too long. What matters is the row: see ``check``.
                self._lease = None
            except ShuffleError:
                # The store may be another process by now, at another address.
                self._lease = None
                raise
            client = self._processor.store.client()
            found = stored_holder(client, self._processor.name)
            if found is not None and found.guid == self.holder.guid:
                attributes = {"pid": str(self.holder.driver_pid), "host": self.holder.host}
                group = query_group(self._processor.name)
                self._lease = client.leases.register(group, self.holder.guid, attributes, self._ttl_ms)

    def _refused(self, other: QueryHolder) -> BadInput:
        own = other.driver_pid == self.holder.driver_pid and other.is_here
        hint = " (In this very driver: a stream that is joined with itself is read twice, too.)" if own else ""
        return BadInput(
            f"processor {self._processor.name} is already read by {other.described()}: one processor has one query, or "
            "each would get a part of the rows. Stop that query, or give this one a processor of its own on a queue of "
            f"its own{hint}",
            processor=self._processor.name,
        )


def stored_now(processor: Processor) -> QueryHolder | None:
    return processor.store.with_retries(lambda client: stored_holder(client, processor.name))


def replaced(processor: str, by: QueryHolder | None) -> SplitBrain:
    whom = f"{by.described()} has taken its place" if by is not None else "it has given the processor back"
    return SplitBrain(
        f"processor {processor}: this query was away for longer than its lease, and {whom}. It hands out no more rows. "
        "If this is the one that is to run, stop the other and start it again from its checkpoint",
        processor=processor,
    )


def begin_task(processor: Processor, guid: str, reducer: int) -> None:
    """In a task: the query that has planned it must still have the processor. The first task says what it is called.

    Only tasks know that: Spark does not tell the process of a source which query it is for.
    """
    found = stored_now(processor)
    if found is None or found.guid != guid:
        raise replaced(processor.name, found)
    context: Any = TaskContext.get()
    if found.query_id or reducer or context is None:
        return
    # The description is written for Spark's own pages: the name, then the ids, one on each line.
    name, ids, _ = (context.getLocalProperty("spark.job.description") or "").partition("\nid = ")
    query_id = context.getLocalProperty(QUERY_ID) or ""
    named = replace(found, query_id=query_id, query_name=name.strip() if ids else "")
    # Only for those who read it. Another attempt of the task may have been faster.
    with suppress(CommitConflict, CommitUnknown), processor.store.client().transaction() as tx:
        again = stored_holder(tx, processor.name)
        if again is not None and again.guid == guid:
            tx.write(meta_table(processor.name), holder_row(named))
            tx.commit()
