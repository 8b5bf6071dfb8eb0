"""The state store: sorted tables, queues, transactions over both, and leases; embedded in a process or served."""

from __future__ import annotations

from shuffle.statestore.client import Lease, Leases, Queue, StateClient
from shuffle.statestore.leases import Member
from shuffle.statestore.request import Committed
from shuffle.statestore.schema import QueueSchema, TableSchema
from shuffle.statestore.transaction import Snapshot, Transaction

__all__ = [
    "Committed",
    "Lease",
    "Leases",
    "Member",
    "Queue",
    "QueueSchema",
    "Snapshot",
    "StateClient",
    "TableSchema",
    "Transaction",
]
