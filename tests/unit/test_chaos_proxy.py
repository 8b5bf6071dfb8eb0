"""The proxy of the chaos run: what goes in comes out, until it is told otherwise."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from perf.chaos import ProxiedSockets
from perf.parts.chaos_proxy import Proxy

PIECE = b"0123456789" * 5_000


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        try:
            while data := self.request.recv(4096):
                self.request.sendall(data)
        except OSError:
            pass


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as made:
        made.daemon_threads = True
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made.server_address[0], made.server_address[1]  # type: ignore[misc]
        made.shutdown()
        thread.join(5)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy(seed=1)
    yield made
    made.close()


def echoed(connection: socket.socket, data: bytes) -> bytes:
    sender = threading.Thread(target=connection.sendall, args=(data,))
    sender.start()
    found = b""
    while len(found) < len(data):
        piece = connection.recv(65_536)
        if not piece:
            break
        found += piece
    sender.join(10)
    return found


def test_bytes_pass_unchanged_and_also_while_they_are_delayed(proxy: Proxy, server: tuple[str, int]) -> None:
    with ProxiedSockets(proxy.url).create_connection(server, 10) as connection:
        assert echoed(connection, PIECE) == PIECE
        assert proxy.delay(0.01, 60) == 1
        assert echoed(connection, PIECE) == PIECE
        proxy.heal()
        assert echoed(connection, PIECE) == PIECE


def test_cut_connection_ends_and_a_new_one_can_be_made(proxy: Proxy, server: tuple[str, int]) -> None:
    tunnels = ProxiedSockets(proxy.url)
    with tunnels.create_connection(server, 10) as connection:
        assert echoed(connection, b"before") == b"before"
        assert proxy.cut(1.0) == 1
        with suppress(ConnectionError):
            assert connection.recv(1) == b""
    with tunnels.create_connection(server, 10) as connection:
        assert echoed(connection, b"after") == b"after"


def test_half_open_connection_is_silent_and_then_reset(proxy: Proxy, server: tuple[str, int]) -> None:
    with ProxiedSockets(proxy.url).create_connection(server, 10) as connection:
        assert echoed(connection, b"before") == b"before"
        assert proxy.half_open(1.0, 0.2) == 1
        connection.sendall(b"lost")
        with suppress(ConnectionError):
            assert connection.recv(4) == b"", "nothing comes back, not even late"


def test_server_that_is_not_there_is_refused(proxy: Proxy) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = free.getsockname()
    with pytest.raises(ConnectionRefusedError):
        ProxiedSockets(proxy.url).create_connection(nobody, 10)
