"""A proxy that gRPC connections go through, and what can happen to a connection: cut, delayed, or left half open.

It implements HTTP's CONNECT, which gRPC uses with a proxy; the addresses that workers find in discovery are unchanged.
One thread runs it. Faults may be requested from any other thread.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

CHUNK_BYTES = 65_536
CONNECT_S_MAX = 5.0
HEAD_BYTES_MAX = 8_192
LINKS_MAX = 1_000


class Link:
    """One connection through the proxy: two sockets, and two tasks that copy from one to the other."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.silent = asyncio.Event()
        """Set while bytes pass. While it is cleared, the connection stays open at both ends, and no bytes pass."""
        self.silent.set()

    def cut(self) -> None:
        for writer in (self.client, self.server):
            writer.transport.abort()
        self.silent.set()


class Proxy:
    """Listens on a free port of this machine until it is closed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._links: list[Link] = []
        self._delay_s = 0.0
        self._delay_until_s = 0.0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self.port = 0
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        self._ready.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    # --- faults ---

    def cut(self, share: float) -> int:
        """Reset this share of all connections, at least one; returns the number of connections reset."""
        return self._ask(lambda: self._cut(self._some(share)))

    def half_open(self, share: float, for_s: float) -> int:
        """Let no bytes pass in either direction of this share of the connections, and reset them after ``for_s``."""
        return self._ask(lambda: self._half_open(self._some(share), for_s))

    def delay(self, up_to_s: float, for_s: float) -> int:
        """Delay every piece of data by up to ``up_to_s`` seconds, for ``for_s`` seconds."""

        def begin() -> int:
            self._delay_s, self._delay_until_s = up_to_s, time.monotonic() + for_s
            return len(self._links)

        return self._ask(begin)

    def heal(self) -> None:
        """End the delays. Connections that are half open are reset when their time is over."""
        self.delay(0.0, 0.0)

    def _ask(self, what: Callable[[], int]) -> int:
        async def run() -> int:
            return what()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def _some(self, share: float) -> list[Link]:
        count = min(len(self._links), max(1, round(share * len(self._links))))
        return self._rng.sample(self._links, count)

    def _cut(self, links: list[Link]) -> int:
        for link in links:
            link.cut()
        return len(links)

    def _half_open(self, links: list[Link], for_s: float) -> int:
        for link in links:
            link.silent.clear()
        self._loop.call_later(for_s, self._cut, links)
        return len(links)

    # --- passing on ---

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for link in list(self._links):
            link.cut()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), CONNECT_S_MAX)
            method, target, _ = head.split(b" ", 2)
            host, _, port = target.decode().rpartition(":")
            if method != b"CONNECT" or len(head) > HEAD_BYTES_MAX or len(self._links) >= LINKS_MAX:
                raise ValueError("not a CONNECT")
            there, back = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), CONNECT_S_MAX)
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            with suppress(OSError):
                writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        link = Link(writer, back)
        self._links.append(link)
        try:
            await asyncio.gather(self._copy(link, reader, back), self._copy(link, there, writer))
        finally:
            link.cut()
            self._links.remove(link)

    async def _copy(self, link: Link, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(CHUNK_BYTES):
                await link.silent.wait()
                if time.monotonic() < self._delay_until_s:
                    await asyncio.sleep(self._rng.random() * self._delay_s)
                target.write(data)
                await target.drain()
        except OSError:
            pass
        link.cut()  # One direction that has ended ends both: gRPC has no use for half a connection.
