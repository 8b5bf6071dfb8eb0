"""A client of a schema registry: small, with time limits, and with a memory. Ids never change their meaning.

What can go wrong, and what becomes of it:

- it cannot be reached, is too slow, or has trouble of its own (5xx, 429): ``ServiceUnavailable``; whoever asks waits
  and asks again;
- it refuses (401, 403), or what answers is no registry: ``SpecError``, since only a person can mend that;
- it does not know the schema (404): None. The message that names it cannot be decoded.
"""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

from shuffle.errors import ServiceUnavailable, ShuffleError, SpecError
from shuffle.formats.base import short
from shuffle.limits import MIB

ANSWER_S_MAX = 10.0
"""The most seconds for one request. Schemas are small, and everything waits for this one."""
ANSWER_BYTES_MAX = 4 * MIB
CACHED_MAX = 1_000
"""The most schemas in memory. A topic has a few; one that has more gets its oldest anew."""


class RegisteredSchema(NamedTuple):
    """A schema of the registry."""

    text: str
    kind: str
    """AVRO, PROTOBUF or JSON."""
    schema_id: int


class SchemaRegistry:
    """Schemas by their ids, and by subject and version."""

    def __init__(self, url: str, user: str | None = None, password: str | None = None) -> None:
        self.url = url.rstrip("/")
        scheme = urllib.parse.urlsplit(self.url).scheme
        if scheme not in ("http", "https"):
            raise SpecError(f"schema_registry: {self.url!r} is no address of a schema registry: it begins with http")
        self._headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
        if user is not None:
            secret = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
            self._headers["Authorization"] = f"Basic {secret}"
        self._by_id: dict[tuple[int, str], RegisteredSchema] = {}

    def by_id(self, schema_id: int, form: str = "") -> RegisteredSchema | None:
        """The schema of an id; None if the registry has no such id. ``form`` asks for another form of it."""
        key = (schema_id, form)
        if key not in self._by_id:
            found = self._get(f"/schemas/ids/{schema_id}", form)
            if found is None:
                return None  # Not kept: somebody may be about to register it.
            if len(self._by_id) >= CACHED_MAX:
                del self._by_id[next(iter(self._by_id))]
            self._by_id[key] = self._schema(found, schema_id)
        return self._by_id[key]

    def by_version(self, subject: str, version: int, form: str = "") -> RegisteredSchema:
        """The schema of a version of a subject; ``SpecError`` if there is none."""
        found = self._get(f"/subjects/{urllib.parse.quote(subject, safe='')}/versions/{version}", form)
        if found is None:
            raise SpecError(f"schema_registry: {self.url} has no version {version} of {subject!r}")
        return self._schema(found, found.get("id"))

    def _schema(self, found: Mapping[str, Any], schema_id: Any) -> RegisteredSchema:
        text = found.get("schema")
        if not isinstance(text, str) or not isinstance(schema_id, int):
            raise SpecError(f"schema_registry: what answers at {self.url} is no schema registry: no schema in it")
        return RegisteredSchema(text, str(found.get("schemaType") or "AVRO"), schema_id)

    def _get(self, path: str, form: str) -> Mapping[str, Any] | None:
        where = self.url + path + (f"?format={form}" if form else "")
        try:
            with urllib.request.urlopen(
                urllib.request.Request(where, headers=self._headers), timeout=ANSWER_S_MAX
            ) as answer:
                content = answer.read(ANSWER_BYTES_MAX + 1)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
                raise self._refused(where, error.code) from None
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors.
            raise ServiceUnavailable(f"the schema registry {self.url} cannot be reached: {short(error)}") from None
        if len(content) > ANSWER_BYTES_MAX:
            raise SpecError(f"schema_registry: {where} answers with over {ANSWER_BYTES_MAX} bytes")
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise SpecError(f"schema_registry: what answers at {where} is no schema registry: no JSON object")
        return found

    def _refused(self, where: str, status: int) -> ShuffleError:
        if status == 429 or status >= 500:
            return ServiceUnavailable(f"the schema registry {self.url} has trouble: status {status}")
        return SpecError(f"schema_registry: {where} is refused with status {status}; look at user and password")
