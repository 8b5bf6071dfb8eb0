"""One query at a time: the lease that a streaming query holds on the processor it reads.

A query commits instead of the reducers: of two queries on one processor each would get some of the rows, and some rows
would go to both. The first one writes a row into ``<processor>/meta`` and keeps a lease; the second one finds both and
is refused with an error that names the first. A query whose driver has died is replaced:

- on the same machine at once, since it can be seen that the process which held the lease is gone;
- on another machine when its lease has ended.

The lease only says when a query may be replaced; it does not protect against a driver that was paused and comes back.
The row does: every commit of positions reads it in its own transaction, and it is checked before rows are handed out
and when a task begins.
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
    pid_namespace,
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
"""The time in milliseconds without a renewal after which a query whose driver is on another machine may be replaced."""

RENEW_S = 1.0
"""The time in seconds between two renewals of the lease."""

ABSENT_S = 3 * RENEW_S
"""The time in seconds after which a holder without a lease counts as dead. If only the store was restarted, the holder
has registered again by then."""

ENDING_S = 3.0
"""The time in seconds that a query on this machine which was just stopped may need to end."""

LOOK_S = 0.1
"""The time in seconds between two looks at the holder while this query waits for the processor."""

QUERY_ID = "sql.streaming.queryId"
"""The property of a task that says which query it belongs to."""


class QueryLease:
    """The lease of one query, held by the Python process that Spark keeps for it beside its driver."""

    def __init__(self, processor: Processor, ttl_ms: int = LEASE_TTL_MS) -> None:
        self._processor = processor
        self._ttl_ms = ttl_ms
        self.holder = QueryHolder(
            guid=new_guid(),
            host=socket.gethostname(),
            driver_pid=os.getppid(),
            pid=os.getpid(),
            started=process_started(os.getpid()),
            place=pid_namespace(),
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        )
        self._lease: Lease | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="query-lease", daemon=True)

    def take(self) -> None:
        """Return when this query holds the processor; raise ``BadInput`` when another query that is alive holds it.

        1. If there is no holder, or the holder has certainly ended: take the processor.
        2. If the holder has had no lease for ``ABSENT_S``: take the processor.
        3. If the holder's lease does not end in the time in which that of a dead one would: the holder is alive, and
           this query is refused.
        """
        began_s = absent_s = time.monotonic()
        reported = False
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
            if not reported:
                reported = True
                say(f"processor {self._processor.name}: waiting to see whether {other.described()} has ended")
            time.sleep(LOOK_S)
        self._renew()
        self._thread.start()

    def check(self) -> None:
        """Raise ``SplitBrain`` if another query has replaced this one."""
        self.check_in(None)

    def check_in(self, tx: Any) -> None:
        """The same as a read of ``tx``, which then conflicts if this query is replaced before it commits."""
        name = self._processor.name
        holder = stored_holder(tx, name) if tx is not None else stored_now(self._processor)
        if holder is None or holder.guid != self.holder.guid:
            raise replaced(name, holder)

    def release(self) -> None:
        """Release the processor at the end of the query. If the store cannot be reached, the lease ends by itself."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(RENEW_S)
        with suppress(ShuffleError):
            client = self._processor.store.client()
            with client.transaction() as tx:
                holder = stored_holder(tx, self._processor.name)
                if holder is not None and holder.guid == self.holder.guid:
                    tx.delete(meta_table(self._processor.name), holder_key())
                    tx.commit()
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(ShuffleError):
                lease.leave()

    def _look(self, take_absent: bool) -> tuple[QueryHolder | None, bool]:
        """The other query that holds the processor, and whether it has a lease; None if this query holds it now."""
        name = self._processor.name

        def attempt(client: StateClient) -> tuple[QueryHolder | None, bool]:
            with client.transaction() as tx:
                holder = stored_holder(tx, name)
                if holder is not None and holder.guid == self.holder.guid:
                    return None, False  # An earlier attempt was committed, and its response was lost.
                if holder is not None and not holder.is_dead:
                    alive = has_lease(client, name, holder)
                    if alive or not take_absent:
                        return holder, alive
                tx.write(meta_table(name), holder_row(self.holder))
                tx.commit()
                return None, False

        return self._processor.store.in_transaction(attempt)

    def _keep(self) -> None:
        while not self._stopping.wait(RENEW_S):
            if os.getppid() != self.holder.driver_pid:
                # The driver is dead. The main thread of this process may be in a long wait, and would not notice.
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
                # This process was paused for too long. Whether it was replaced is decided by the row: see ``check``.
                self._lease = None
            except ShuffleError:
                # The store may have been restarted at another address.
                self._lease = None
                raise
            client = self._processor.store.client()
            holder = stored_holder(client, self._processor.name)
            if holder is not None and holder.guid == self.holder.guid:
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
    """The query that holds the processor now, from the store; None if none does."""
    return processor.store.with_retries(lambda client: stored_holder(client, processor.name))


def replaced(processor: str, by: QueryHolder | None) -> SplitBrain:
    now = f"{by.described()} has taken its place" if by is not None else "it has given the processor back"
    return SplitBrain(
        f"processor {processor}: this query was away for longer than its lease, and {now}. It hands out no more rows. "
        "If this is the one that is to run, stop the other and start it again from its checkpoint",
        processor=processor,
    )


def begin_task(processor: Processor, guid: str, reducer: int) -> None:
    """Check in a task that the query which has planned it still holds the processor. The first task of a query also
    writes the query's name and id into the holder's row.

    Only tasks know these: Spark does not pass them to the Python process of a source.
    """
    holder = stored_now(processor)
    if holder is None or holder.guid != guid:
        raise replaced(processor.name, holder)
    context: Any = TaskContext.get()
    if holder.query_id or reducer or context is None:
        return
    # The description is written for Spark's own pages: the name, then the ids, one on each line.
    name, ids, _ = (context.getLocalProperty("spark.job.description") or "").partition("\nid = ")
    query_id = context.getLocalProperty(QUERY_ID) or ""
    named = replace(holder, query_id=query_id, query_name=name.strip() if ids else "")
    # The name is only for error messages, so a failed commit is ignored: another attempt may have written it.
    with suppress(CommitConflict, CommitUnknown), processor.store.client().transaction() as tx:
        again = stored_holder(tx, processor.name)
        if again is not None and again.guid == guid:
            tx.write(meta_table(processor.name), holder_row(named))
            tx.commit()
