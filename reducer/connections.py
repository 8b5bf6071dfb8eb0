"""Flight clients of a reducer: one for each address, used by all fetchers of mappers at that address.

A process may host several mappers. Their requests share one connection, and each mapper has an exchange of its own on
it, so that a response that is slow to come, or to be read, does not delay the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shuffle.support import flight


@dataclass(slots=True, eq=False)
class SharedClient:
    """A Flight client, and the number of fetchers that use it."""

    address: str
    client: Any
    users: int = 0


class ClientPool:
    """Hands out one client for each address. Safe to use from many threads."""

    def __init__(self, connect: Callable[[str], Any] = flight.connect) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._shared: dict[str, SharedClient] = {}

    def take(self, address: str) -> SharedClient:
        with self._lock:
            shared = self._shared.get(address)
            if shared is None:
                shared = self._shared[address] = SharedClient(address, self._connect(address))
            shared.users += 1
            return shared

    def give_back(self, shared: SharedClient, is_broken: bool = False) -> None:
        """Stop using a client. It is closed when nobody uses it any more. If it ``is_broken``, the next caller of
        ``take`` gets a new one: gRPC's back-off on a channel that has failed is longer than that of a fetcher."""
        with self._lock:
            shared.users -= 1
            is_unused = shared.users == 0
            if (is_unused or is_broken) and self._shared.get(shared.address) is shared:
                del self._shared[shared.address]
        if is_unused:
            shared.client.close()
