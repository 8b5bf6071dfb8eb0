"""Flight clients of a reducer: one for each address, used by all fetchers that ask a mapper there.

A process may host several mappers, and they are asked over one connection, each on an exchange of its own: an answer
that is slow to come, or to be read, keeps nobody else waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shuffle.support import flight


@dataclass(slots=True, eq=False)
class SharedClient:
    """A Flight client, and how many use it."""

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
            found = self._shared.get(address)
            if found is None:
                found = self._shared[address] = SharedClient(address, self._connect(address))
            found.users += 1
            return found

    def give_back(self, shared: SharedClient, is_broken: bool = False) -> None:
        """The client is closed when nobody uses it any more. After one that ``is_broken`` the next to come gets a new
        one: a channel that has failed waits before it tries again, longer than its users would."""
        with self._lock:
            shared.users -= 1
            is_unused = shared.users == 0
            if (is_unused or is_broken) and self._shared.get(shared.address) is shared:
                del self._shared[shared.address]
        if is_unused:
            shared.client.close()
