"""The state store: sorted tables, queues, transactions over both, and leases; embedded in a process or served."""

from __future__ import annotations

from shuffle.statestore.client.appender import Appender
from shuffle.statestore.client.client import StateClient
from shuffle.statestore.client.leases import Lease, Leases
from shuffle.statestore.client.queue import Queue
from shuffle.statestore.client.transaction import PreparedRows, Snapshot, Transaction
from shuffle.statestore.codec.schema import QueueSchema, TableSchema
from shuffle.statestore.request import Committed
from shuffle.statestore.store import Member

__all__ = [
    "Appender",
    "Committed",
    "Lease",
    "Leases",
    "Member",
    "PreparedRows",
    "Queue",
    "QueueSchema",
    "Snapshot",
    "StateClient",
    "TableSchema",
    "Transaction",
]
