"""The state store: sorted tables, queues, transactions over both, and leases; embedded in a process or served."""

from __future__ import annotations

from statestore.client import Lease, Leases, Queue, StateClient
from statestore.leases import Member
from statestore.request import Committed
from statestore.schema import QueueSchema, TableSchema
from statestore.transaction import Snapshot, Transaction

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
