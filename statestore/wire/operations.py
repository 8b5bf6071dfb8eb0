"""The messages of the store and their fields, as data: what each may be, and within which bounds.

Everything that reaches the store passes one of these tables once, before any of its code sees it: the header of a
request of the data plane (``OPERATIONS``), the sections of a commit (``SECTIONS``), a request of the control plane
(``CONTROL``). What a client receives passes ``OPERATIONS`` too. ``docs/protocol.md`` shows them to people.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shuffle.errors import BadInput
from shuffle.limits import (
    BATCH_BYTES_MAX,
    MIB,
    NAME_BYTES_MAX,
    STAGED_TTL_MS_MAX,
    WAIT_MS_MAX,
)
from shuffle.support.fields import (
    INT64_MIN,
    UINT32_MAX,
    UINT64_MAX,
    Checker,
    Field,
    flag,
    number,
    shown,
    text,
)

SCAN_ROWS_MAX = 1_000_000
"""Maximum rows of one response to a scan."""

SCHEMA_BYTES_MAX = 2 * MIB
"""The description of a table or a queue: a thousand columns with names of 255 bytes, and a type each."""

_TABLE, _QUEUE, _PARTITION = number("table", UINT32_MAX), number("queue", UINT32_MAX), number("partition", UINT32_MAX)
_SESSION, _VIEW = number("session", UINT64_MAX), number("view", needs="session")
_HELD_SESSION = number("session", UINT64_MAX, optional=True)
_HELD_VIEW = number("view", optional=True, needs="session")
_ROWS = number("rows", UINT32_MAX)
_STAGED = Field("staged", str, 32, 32, pattern=re.compile("[0-9a-f]{32}"))


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the data plane: what its messages look like, and how they travel.

    Every operation can be sent over Flight. The daemon has a handler for each (``server.handlers``), and
    ``docs/protocol.md`` has a line for each; a test keeps all of them together.
    """

    request: tuple[Field, ...]
    """The fields of the request's header, beside ``op``."""
    response: tuple[Field, ...] = ()
    """The fields of the header of a response that is no error."""
    lane: bool = False
    """Whether a small request of it may be sent over the lane, where all of them share one thread."""


_OPENED = (number("view"), number("version"))

OPERATIONS: dict[str, Operation] = {
    "get": Operation(
        (_TABLE, _HELD_SESSION, _HELD_VIEW, flag("hold", needs="session")),
        (number("view", optional=True, needs="version"), number("version", optional=True), flag("elsewhere")),
        lane=True,
    ),
    "scan": Operation(
        (_TABLE, _HELD_SESSION, _HELD_VIEW, number("rows", SCAN_ROWS_MAX, low=1), flag("reverse")),
    ),
    "open": Operation((_SESSION,), _OPENED, lane=True),
    "release": Operation((_SESSION, _VIEW), lane=True),
    "commit": Operation(
        (number("version", optional=True), _HELD_SESSION, _HELD_VIEW, Field("sections", list, optional=True)),
        (number("version"), Field("appended", list)),
        lane=True,
    ),
    "stage": Operation((_QUEUE, number("ttl_ms", STAGED_TTL_MS_MAX, low=1)), (text("staged"),)),
    "discard": Operation((_STAGED,), lane=True),
    "bounds": Operation((_QUEUE,), (Field("bounds", list),), lane=True),
    "read": Operation(
        (
            _QUEUE,
            _PARTITION,
            number("begin"),
            number("rows", low=1),
            number("bytes", low=1),
            number("wait_ms", WAIT_MS_MAX),
            flag("local"),
        ),
        (
            text("file", high=16 * NAME_BYTES_MAX, optional=True, needs="offset"),
            number("offset", optional=True),
            number("segment", optional=True),
            number("end", optional=True),
            number("bytes", 2 * BATCH_BYTES_MAX, optional=True, needs="end"),
            Field("ends", list, optional=True, needs="end"),
        ),
        lane=True,
    ),
}
"""The one list of what the data plane can do."""

SECTIONS: dict[str, tuple[Field, ...]] = {
    "read": (_ROWS,),
    "range": (_ROWS,),
    "expect": (_TABLE, _ROWS),
    "write": (_TABLE, _ROWS),
    "append": (
        _QUEUE,
        _PARTITION,
        _ROWS,
        text("producer", optional=True),
        number("sequence", low=INT64_MIN, optional=True),
    ),
    "publish": (_QUEUE, _PARTITION, _STAGED),
    "trim": (_QUEUE, _PARTITION, number("index")),
}
"""The sections of a commit, each after its kind."""

_SCHEMA = text("schema_json", high=SCHEMA_BYTES_MAX)
_GROUP, _LEASE, _SESSION_ID = text("group"), number("lease_id", UINT64_MAX), number("session_id", UINT64_MAX)
_TTL = number("ttl_ms", UINT32_MAX)
"""Leases and sessions have bounds of their own, which they name."""

CONTROL: dict[str, tuple[Field, ...]] = {
    "Info": (),
    "ListTables": (),
    "ListQueues": (),
    "CreateTable": (_SCHEMA,),
    "CreateQueue": (_SCHEMA,),
    "Drop": (text("kind"), text("name")),
    "OpenSession": (_TTL,),
    "RenewSession": (_SESSION_ID,),
    "CloseSession": (_SESSION_ID,),
    "Register": (_GROUP, text("member"), _TTL),
    "Renew": (_LEASE,),
    "Leave": (_LEASE,),
    "Members": (_GROUP,),
    "Watch": (_GROUP, number("revision", UINT64_MAX), number("wait_ms", WAIT_MS_MAX)),
    "Groups": (),
    "Stats": (),
}
"""The requests of the control plane. That they have these fields, and of which type, is what protobuf sees to."""


_REQUEST_CHECKS = {name: Checker(f"the request {name!r}", one.request) for name, one in OPERATIONS.items()}
_RESPONSE_CHECKS = {name: Checker(f"the response to {name!r}", one.response) for name, one in OPERATIONS.items()}
_SECTION_CHECKS = {kind: Checker(f"the section {kind!r} of a commit", fields) for kind, fields in SECTIONS.items()}


def check_request(header: Mapping[str, Any]) -> None:
    """Raises ``BadInput`` unless the header is that of a request, with all of its fields as they should be."""
    operation = header.get("op")
    checker = _REQUEST_CHECKS.get(operation) if isinstance(operation, str) else None
    if checker is None:
        raise BadInput(f"unknown operation {shown(operation)}: client and store are of different versions")
    checker.check(header)


def check_section(kind: str, *fields: Any) -> None:
    """Raises ``BadInput`` unless these are the fields of a section of a commit."""
    _SECTION_CHECKS[kind].check_items(fields)


def check_response(operation: str, header: Mapping[str, Any]) -> None:
    """Raises ``BadInput`` unless the header is one that a store answers ``operation`` with."""
    error = header.get("error")
    if error is None:
        _RESPONSE_CHECKS[operation].check(header)
    elif not isinstance(error, str):
        raise BadInput(f"the response to {operation!r}: an error that is none")
