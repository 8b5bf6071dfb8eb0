"""What all targets have in common, and the requests to the store that the targets lane and Flight begin with."""

from __future__ import annotations

import json
import random
from typing import Any, Protocol

from shuffle.statestore.codec.keys import table_prefix
from shuffle.statestore.codec.small_batch import SmallKeyCodec, SmallValueCodec
from shuffle.statestore.wire.messages import Header
from tests.fuzz import arrow
from tests.fuzz.findings import Outcome, Problem
from tests.fuzz.world import FUZZ_PARTITIONS, FUZZ_QUEUE, KEY, VALUE, World

KEYS = 200
"""Different keys of a fuzzed table: it does not grow, and writes meet rows that are there."""

STAGED_MS = 2000
"""Staged rows end after so long, if nobody publishes them."""

LaneRows = tuple[list[bytes | None], list[bytes | None]]

_OPTIONAL_FIELDS = ("view", "version")
_SECTION_INTEGERS = {"read": 1, "range": 1, "expect": 2, "write": 2, "append": 3, "publish": 2, "trim": 3}
"""How many of the parts of a section, from the first on, are whole numbers."""
_CHANGING = ("commit", "stage")


class Target(Protocol):
    """Runs one input after the other against a world."""

    def run(self, number: int, chance: random.Random) -> Outcome: ...

    def close(self) -> None: ...


class Questions:
    """Valid questions about the fuzzed table and queue of one target."""

    def __init__(self, world: World, table: str, queue: str) -> None:
        self.world = world
        self._table, self._queue = table, queue
        self._keys, self._values = SmallKeyCodec(KEY), SmallValueCodec(VALUE)
        self.session = 0
        self.views: list[tuple[int, int]] = []
        """Moments that are held, with the version of each."""
        self.staged: list[str] = []

    @property
    def table_id(self) -> int:
        return self.world.places.table_ids[self._table]

    @property
    def queue_id(self) -> int:
        return self.world.places.queue_ids[self._queue]

    def key(self, chance: random.Random, table_id: int | None = None) -> bytes:
        prefix = table_prefix(self.table_id if table_id is None else table_id)
        return prefix + f"k{chance.randrange(KEYS):04}".encode()

    def value(self, chance: random.Random) -> bytes:
        return self._values.encode(arrow.some_batch(chance, VALUE, rows=1).columns, 1)[0]

    def payload(self, chance: random.Random) -> bytes:
        """A batch of the queue as one IPC message, sometimes with a lie in it."""
        message = arrow.Message.of(arrow.some_batch(chance, FUZZ_QUEUE))
        if chance.random() < 0.25:
            message, _ = arrow.lying(message, chance)
        return message.encapsulated()

    def make(self, chance: random.Random) -> tuple[Header, LaneRows | None]:
        """A question that the store understands, and the rows that go with it."""
        kind = chance.choice(("get", "get", "scan", "open", "release", "commit", "commit", "commit", "bounds", "read"))
        kind = chance.choice((kind, kind, kind, kind, kind, "stage", "discard"))
        made: tuple[Header, LaneRows | None] = getattr(self, f"_{kind}")(chance)
        return made

    def _view(self, chance: random.Random) -> Header:
        if not self.views or chance.random() < 0.7:
            return {}
        view, version = chance.choice(self.views)
        return {"session": self.session, "view": view, "version": version}

    def _get(self, chance: random.Random) -> tuple[Header, LaneRows | None]:
        keys: list[bytes | None] = [self.key(chance) for _ in range(chance.choice((1, 1, 2, 20)))]
        header: Header = {"op": "get", "table": self.table_id}
        if chance.random() < 0.1:
            header |= {"hold": True, "session": self.session}
        else:
            view = self._view(chance)
            header |= {name: view[name] for name in ("session", "view") if name in view}
        return header, (keys, [None] * len(keys))

    def _scan(self, chance: random.Random) -> tuple[Header, LaneRows | None]:
        begin, end = sorted((self.key(chance), self.key(chance)))
        header = {"op": "scan", "table": self.table_id, "rows": chance.choice((1, 10, 1000)), "reverse": False}
        header["reverse"] = chance.random() < 0.3
        return header, ([begin], [end if chance.random() < 0.8 else None])

    def _open(self, chance: random.Random) -> tuple[Header, LaneRows | None]:
        return {"op": "open", "session": self.session}, None

    def _release(self, chance: random.Random) -> tuple[Header, LaneRows | None]:
        view = self.views.pop()[0] if self.views else 1
        return {"op": "release", "session": self.session, "view": view}, None

    def _bounds(self, chance: random.Random) -> tuple[Header, LaneRows | None]:
        return {"op": "bounds", "queue": self.queue_id}, None

    def _read(self, chance: random.Random) -> tuple[Header, LaneRows | None]:
        header: Header = {"op": "read", "queue": self.queue_id, "partition": chance.randrange(FUZZ_PARTITIONS)}
        header |= {"begin": chance.choice((0, 0, 1, 50, 1000)), "rows": 100, "bytes": 65536, "wait_ms": 0}
        if chance.random() < 0.5:
            header |= {"queue": self.world.places.queue_ids["bulk"], "partition": 0, "begin": chance.randrange(3000)}
        if chance.random() < 0.3:
            header["local"] = True
        if chance.random() < 0.1:
            header["wait_ms"] = chance.choice((1, 10, 30))
        return header, None

    def _stage(self, chance: random.Random) -> tuple[Header, LaneRows | None]:
        payloads: list[bytes | None] = [self.payload(chance) for _ in range(chance.choice((0, 1, 1, 3)))]
        return {"op": "stage", "queue": self.queue_id, "ttl_ms": STAGED_MS}, ([None] * len(payloads), payloads)

    def _discard(self, chance: random.Random) -> tuple[Header, LaneRows | None]:
        return {"op": "discard", "staged": self.staged.pop() if self.staged else "00ff"}, None

    def _commit(self, chance: random.Random) -> tuple[Header, LaneRows | None]:
        sections: list[list[Any]] = []
        keys: list[bytes | None] = []
        values: list[bytes | None] = []
        header: Header = {"op": "commit", **self._view(chance)}
        for _ in range(chance.choice((1, 1, 2, 4))):
            kind = chance.choice(("read", "range", "expect", "write", "write", "write", "append", "append", "trim"))
            count = chance.choice((0, 1, 1, 3))
            some: list[bytes | None] = [self.key(chance) for _ in range(count)]
            partition = chance.randrange(FUZZ_PARTITIONS)
            if kind in ("read", "range"):
                sections.append([kind, count])
                keys += some
                values += [None] * count if kind == "read" else [bytes(8) + b"t\xff" for _ in range(count)]
                header.setdefault("version", chance.choice((1, 10, 2**40)))
            elif kind in ("expect", "write"):
                sections.append([kind, self.table_id, count])
                keys += some
                values += [self.value(chance) if chance.random() < 0.8 else None for _ in range(count)]
            elif kind == "append":
                producer = ["p", chance.randrange(1000)] if chance.random() < 0.2 else [None, None]
                sections.append(["append", self.queue_id, partition, count, *producer])
                keys += [None] * count
                values += [self.payload(chance) for _ in range(count)]
            else:
                sections.append(["trim", self.queue_id, partition, chance.choice((0, 0, 1, 5))])
        if self.staged and chance.random() < 0.5:
            sections.append(["publish", self.queue_id, 0, self.staged.pop()])
        header["sections"] = sections
        return header, ((keys, values) if keys else None)

    # --- what is not done, and what must not be accepted ---

    def is_harmful(self, header: Any) -> bool:
        """Whether it would, rightly, change what the canaries and the job rely on."""
        if not isinstance(header, dict) or header.get("op") not in _CHANGING:
            return False
        both = {**self.world.places.table_ids, **self.world.places.queue_ids}
        closed = set(both.values()) - self.world.places.open_ids
        named = [header.get("queue")]
        sections = header.get("sections")
        for section in sections if isinstance(sections, list) else []:
            named += section[1:2] if isinstance(section, list) and section[:1] not in (["read"], ["range"]) else []
        if sections is None and header.get("op") == "commit":
            return False  # They are in the first row, which this module never writes there for another table.
        return any(isinstance(name, int | float) and name in closed for name in named)

    def unasked(self, problems: list[Problem], header: Any) -> list[Problem]:
        """Without the leaks that are none: whoever asks for the secret table, by its own id, is given its rows."""
        asked = header.get("table") if isinstance(header, dict) else None
        is_asked = asked == self.world.places.table_ids["secret"]
        return [problem for problem in problems if not (is_asked and problem.kind == "leak")]

    def nonsense(self, header: Header) -> str | None:
        """Why an answer that is no error cannot be right: a number that is none, or a table that is not there."""
        for name in _FIELDS_OF.get(header.get("op", ""), ()):
            is_left_out = name not in header or (header[name] is None and name in _OPTIONAL_FIELDS)
            if not (is_left_out or is_number(header[name])):
                return f"{header.get('op')} with {name}={header[name]!r}"
        if header.get("op") in ("get", "scan") and header.get("table") not in self.world.places.table_ids.values():
            return f"{header['op']} of table {header['table']!r}, which is not there"
        if header.get("op") == "commit" and isinstance(header.get("sections"), list):
            for section in header["sections"]:
                for part in section[1 : 1 + _SECTION_INTEGERS.get(section[0], 0)]:
                    if not is_number(part):
                        return f"a section {json.dumps(section)[:80]}"
        return None


_FIELDS_OF: dict[str, tuple[str, ...]] = {
    "get": ("table", "view"),
    "scan": ("table", "rows", "view"),
    "commit": ("version", "view"),
    "read": ("queue", "partition", "begin", "rows", "bytes", "wait_ms"),
    "bounds": ("queue",),
    "stage": ("queue", "ttl_ms"),
}
"""The numbers that each operation looks at; another field of that name says nothing."""


def is_number(value: Any) -> bool:
    """A whole number of 64 bits, and nothing else that Python takes for one."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64


def bounded(value: Any) -> str:
    """For a report."""
    text = repr(value)
    return text if len(text) <= 1000 else f"{text[:1000]}… ({len(text)} characters)"
