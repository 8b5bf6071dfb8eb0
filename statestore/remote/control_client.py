"""The client's end of the control plane: its methods as Flight actions.

The daemon's control plane is a gRPC service, for tools, probes and clients in any language. Arrow Flight is gRPC too,
so the library that transfers the rows can call it as well. Python's own gRPC library would be a second implementation
of that in each worker, which takes 20 MB of memory.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Any

from shuffle.errors import BadInput, StoreUnavailable
from shuffle.support import flight

RECONNECT_S_MAX = 1.5
"""The most seconds that a call waits for a daemon that the call before could not reach: it may be starting."""

RECONNECT_PAUSE_S = 0.05
"""The seconds between two attempts to reach it."""


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """The store that a daemon serves, and the addresses of its data plane: ``InfoReply`` of ``proto/control.proto``."""

    flight_address: str
    folder: str
    store_id: str
    lane_address: str
    lane_local_name: str


class ControlClient:
    """The control plane at ``address``. Safe to use from many threads; reconnects by itself."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = flight.connect(address)
        self._unreachable = False
        self._closed = threading.Event()

    def info(self, timeout_s: float) -> StoreInfo:
        reply = self.call("Info", timeout_s)
        return StoreInfo(**{name: str(reply.get(name, "")) for name in StoreInfo.__dataclass_fields__})

    def call(self, method: str, timeout_s: float, /, **fields: Any) -> dict[str, Any]:
        """The reply of ``method`` to the request with these fields, both as protobuf's JSON."""
        try:
            body = json.dumps(fields).encode()
        except (TypeError, ValueError) as error:
            raise BadInput(f"not a request that {method} understands: {error}") from None
        if self._unreachable:
            self._reconnect()
        return self._send(self._client, method, body, timeout_s)

    def _reconnect(self) -> None:
        """Open a new connection: the old one refuses calls until its back-off ends, though the daemon may be back."""
        deadline_s = time.monotonic() + RECONNECT_S_MAX
        while True:
            client = flight.connect(self._address)
            try:
                self._send(client, "Info", b"{}", RECONNECT_S_MAX)
            except StoreUnavailable:
                if time.monotonic() >= deadline_s or self._closed.wait(RECONNECT_PAUSE_S):
                    raise
            else:
                self._client, self._unreachable = client, False
                return

    def _send(self, client: Any, method: str, body: bytes, timeout_s: float) -> dict[str, Any]:
        if self._closed.is_set():
            raise StoreUnavailable("the client is closed", address=self._address)
        try:
            response = flight.do_action(
                client, method, body, who=f"the state store at {self._address}", timeout_s=timeout_s
            )
            reply: dict[str, Any] = json.loads(response)
            return reply
        except StoreUnavailable as error:
            self._unreachable = True
            raise StoreUnavailable(error.message, address=self._address) from error.__cause__
        except ValueError as error:
            raise StoreUnavailable("what answers there is not a state store", address=self._address) from error

    def close(self) -> None:
        self._closed.set()
        self._client.close()
