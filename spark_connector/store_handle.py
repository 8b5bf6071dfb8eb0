"""Clients of the state store inside Spark's Python processes, and retries while a store cannot be reached.

Spark's workers are forked, and a client does not survive a fork. So a ``StoreHandle``, which is plain data, is sent to
the workers, and each process makes one client from it when it first needs one. Such a process serves many queries, and
a table may be dropped and created anew between two of them: whoever begins a query calls ``StateClient.refresh``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shuffle.errors import CommitConflict, CommitUnknown, StoreUnavailable
from shuffle.spark_connector.waiting import Waiting
from shuffle.statestore import StateClient
from shuffle.statestore.client.open_store import folder_of
from shuffle.statestore.wire.announcement import served_at
from shuffle.support.retry import Backoff

RETRY_MS = 50
RETRY_MS_MAX = 1_000
"""Bounds of the waits in milliseconds between attempts while a store or a mapper cannot be reached."""

T = TypeVar("T")

_clients: dict[tuple[int, str], StateClient] = {}
_lock = threading.Lock()


def retry_backoff() -> Backoff:
    """The waits between attempts while a store or a mapper cannot be reached."""
    return Backoff(RETRY_MS, RETRY_MS_MAX, jitter=0.0)


@dataclass(frozen=True, slots=True)
class StoreHandle:
    """Where a store is and how long it is waited for. Plain data, so that Spark can send it to its workers."""

    state: str
    """An address as ``grpc://host:port``, or a folder that a daemon serves."""
    timeout_s: float

    def with_retries(self, call: Callable[[StateClient], T]) -> T:
        """The result of ``call``, which is repeated while the store cannot be reached, for up to ``timeout_s``."""
        waiting = Waiting(self.timeout_s)
        backoff = retry_backoff()
        while True:
            try:
                return call(self.client())
            except StoreUnavailable as error:
                waiting.report(error.message)
                wait_s = backoff.next_s()
                if waiting.waited_s + wait_s > self.timeout_s:
                    raise StoreUnavailable(
                        f"{error.message}. It was waited for {self.timeout_s:g} s; start it again, or raise the option "
                        "'timeout'",
                        **error.fields,
                    ) from error
            time.sleep(wait_s)

    def in_transaction(self, attempt: Callable[[StateClient], T]) -> T:
        """Run ``attempt``, which reads, writes and commits in one transaction, until the commit is known to be done.

        When a response was lost, the commit may have happened. So each attempt must read whether an earlier one has
        been committed before it writes.
        """

        def call(client: StateClient) -> T:
            try:
                return attempt(client)
            except (CommitConflict, CommitUnknown) as error:
                raise StoreUnavailable(f"the state store did not take the commit: {error.message}") from error

        return self.with_retries(call)

    def client(self) -> StateClient:
        """The client of this process. Raises ``StoreUnavailable`` when the store cannot be reached."""
        address = self._address()
        with _lock:
            client = _clients.get((os.getpid(), address))
        if client is None:
            client = self._connect(address)
            with _lock:
                # Another thread may have connected meanwhile; then its client is used, and this one is dropped.
                client = _clients.setdefault((os.getpid(), address), client)
        return client

    def _connect(self, address: str) -> StateClient:
        folder = self._folder
        if folder is None:
            return StateClient.connect(address)
        client = StateClient.serving(folder)
        if client is None:
            raise self._not_served()
        return client

    def _address(self) -> str:
        folder = self._folder
        if folder is None:
            return self.state
        address = served_at(folder)
        if address is None:
            raise self._not_served()
        return address

    @property
    def _folder(self) -> Path | None:
        """The folder that a daemon serves; None if the state is the address of a store."""
        folder = folder_of(self.state)
        return None if folder is None else folder.absolute()

    def _not_served(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"no daemon serves the state store in {self.state}: Spark's processes cannot share a folder without "
            f"one. Start it with `shuffle statestore --path {self.state} --listen 127.0.0.1:0`",
            address=self.state,
        )
