"""A bounded number of slots for peers that are served at the same time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shuffle.errors import TooBusy


class Slots:
    """At most ``most`` slots in all, and ``most_per_peer`` for each peer. Safe to use from many threads."""

    def __init__(self, what: str, most: int, most_per_peer: int | None = None) -> None:
        self._what = what
        self._most = most
        self._most_per_peer = most if most_per_peer is None else most_per_peer
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._taken.total()

    @contextmanager
    def taken(self, peer: str = "") -> Iterator[None]:
        """Holds a slot for ``peer`` during the block. Raises ``TooBusy`` if there is none."""
        with self._lock:
            if self._taken.total() >= self._most or self._taken[peer] >= self._most_per_peer:
                raise TooBusy(
                    f"no more than {self._most} {self._what} are served at a time, and {self._most_per_peer} of one "
                    "peer: nothing was done; ask again later, and close what is not needed"
                )
            self._taken[peer] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[peer] -= 1
                if not self._taken[peer]:
                    del self._taken[peer]


def machine_of(peer: str) -> str:
    """The address of a peer as gRPC names it, without the port, which differs for each connection."""
    return peer.rpartition(":")[0]
