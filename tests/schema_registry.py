"""A schema registry to test with: the few endpoints that a client needs, over real HTTP, and what can go wrong."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit


class Registry:
    """Schemas by id. ``fail_with`` makes it answer every request with that status."""

    def __init__(self, user: str | None = None, password: str = "") -> None:
        self.schemas: dict[int, dict[str, Any]] = {}
        self.versions: dict[tuple[str, int], int] = {}
        self.requests: list[str] = []
        self.fail_with: int | None = None
        self.body: bytes | None = None
        self.delay = threading.Event()
        self.delay.set()
        wanted = None if user is None else "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.requests.append(self.path)
                registry.delay.wait(30)
                if wanted is not None and self.headers.get("Authorization") != wanted:
                    status, answer = 401, {}
                else:
                    status, answer = registry.answer(self.path)
                content = json.dumps(answer).encode() if registry.body is None else registry.body
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def add(self, subject: str, schema: str, kind: str = "AVRO", serialized: str | None = None) -> int:
        """Registers the next version of a subject; returns its id."""
        schema_id = len(self.schemas) + 1
        self.schemas[schema_id] = {"schema": schema, "schemaType": kind, "serialized": serialized}
        version = 1 + sum(name == subject for name, _ in self.versions)
        self.versions[subject, version] = schema_id
        return schema_id

    def answer(self, target: str) -> tuple[int, dict[str, Any]]:
        if self.fail_with is not None:
            return self.fail_with, {}
        place = urlsplit(target)
        parts = [unquote(part) for part in place.path.strip("/").split("/")]
        if parts[:2] == ["schemas", "ids"]:
            schema_id = int(parts[2])
        else:
            schema_id = self.versions.get((parts[1], int(parts[3])), 0)
        if schema_id not in self.schemas:
            return 404, {"error_code": 40403}
        found = dict(self.schemas[schema_id])
        serialized = found.pop("serialized")
        if parse_qs(place.query).get("format") == ["serialized"]:
            found["schema"] = serialized
        return 200, found | {"id": schema_id}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.delay.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
