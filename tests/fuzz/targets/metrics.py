"""The HTTP ports of mappers and reducers: requests of every sort."""

from __future__ import annotations

import contextlib
import random
import socket

from tests.fuzz.findings import Outcome
from tests.fuzz.mutate import damaged
from tests.fuzz.oracles import answer_problems
from tests.fuzz.world import World

ANSWER_S_MAX = 5.0
LINGERING_MAX = 20

_METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"OPTIONS", b"get", b"", b"G\0T", b"X" * 3000)
_PATHS = (
    b"/metrics",
    b"/",
    b"/metrics?name[]=x",
    b"/metrics?name[]=" + b"a" * 3000,
    b"/../../etc/passwd",
    b"*",
    b"",
    b"http://x/",
    b"/%00%ff",
)
_VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b"HTTP/1.1.1", b"", b"HTTP/-1", b"SSH-2.0")
_HEADERS = (
    *(b"Host: x", b"Accept: application/openmetrics-text", b"Accept-Encoding: gzip", b"Content-Length: -1"),
    *(
        b"Content-Length: 99999999999999999999",
        b"Transfer-Encoding: chunked",
        b"Connection: keep-alive",
        b"Expect: 100-continue",
    ),
    *(b"no colon", b": empty", b"A: " + b"b" * 70_000, b"\0: \0", b"Accept: " + b",".join([b"a/b;q=x"] * 100)),
)


class MetricsTarget:
    """A connection for each input: these servers close it after every answer."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._addresses: list[tuple[str, int]] = []
        self._lingering: list[socket.socket] = []
        self._restarts = -1

    def run(self, number: int, chance: random.Random) -> Outcome:
        if self._restarts != self._world.restarts or not self._addresses:
            self._restarts = self._world.restarts
            self._addresses = self._world.metrics_addresses()
        request = self._request(chance)
        shown = f"{request[:300]!r} ({len(request)} bytes)"
        kind = chance.randrange(10)
        try:
            sock = socket.create_connection(chance.choice(self._addresses), ANSWER_S_MAX)
        except OSError:
            self._addresses = []
            return Outcome("closed", [], True, shown)
        with contextlib.suppress(OSError):
            sock.sendall(request)
        if kind == 0:
            self._lingering.append(sock)
            if len(self._lingering) > LINGERING_MAX:
                self._lingering.pop(0).close()
            return Outcome("left", shown=shown)
        if kind == 1:
            sock.close()
            return Outcome("left", shown=shown)
        return self._answered(sock, request, shown)

    def _request(self, chance: random.Random) -> bytes:
        headers = [chance.choice(_HEADERS) for _ in range(chance.choice((0, 0, 1, 1, 2, 5, 150)))]
        parts = (_METHODS, _PATHS, _VERSIONS)  # The first of each is right, and is taken more often than not.
        line = b" ".join(part[0] if chance.random() < 0.7 else chance.choice(part) for part in parts)
        request = b"\r\n".join([line, *headers, b"", b""])
        return damaged(request, chance) if chance.random() < 0.2 else request

    def _answered(self, sock: socket.socket, request: bytes, shown: str) -> Outcome:
        """Half a request has no answer, and is then ended from here."""
        data = b""
        with contextlib.closing(sock), contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(1 << 16):
                data += piece
        status = data[9:12].decode("ascii", "replace") if data.startswith(b"HTTP/") else "other" if data else "closed"
        return Outcome("accepted" if status == "200" else status, answer_problems(data), False, shown)

    def close(self) -> None:
        while self._lingering:
            self._lingering.pop().close()
