"""The store's control plane: every method with broken requests, as protobuf and as Flight actions."""

from __future__ import annotations

import json
import random
from typing import Any

from google.protobuf import json_format, message_factory

from shuffle.statestore.codec.schema import QueueSchema, TableSchema
from shuffle.statestore.wire.proto import control_pb2 as pb
from tests.fuzz import arrow, calls
from tests.fuzz.calls import FLIGHT, Reply
from tests.fuzz.findings import Outcome
from tests.fuzz.mutate import changed, damaged, odd_value, to_json
from tests.fuzz.oracles import answer_problems
from tests.fuzz.targets.base import bounded
from tests.fuzz.world import ANSWER_S_MAX, FUZZ_QUEUE, KEY, VALUE, World

SERVICE = pb.DESCRIPTOR.services_by_name["Control"]
METHODS = {method.name: message_factory.GetMessageClass(method.input_type) for method in SERVICE.methods}
WATCH_S = 0.05
"""A watch may wait for a minute; it is given up after so long."""

OTHER_METHODS = (
    *("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/statestore.v1.Control/Nothing", "/", "/x/y"),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
GROUPS_OF_OTHERS = ("job/", "victim/")


class ControlTarget:
    """Calls one method after the other; what it creates, opens and registers, it removes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._channel: Any = None
        self._epoch = -1
        self._session = self._lease = 0

    def run(self, number: int, chance: random.Random) -> Outcome:
        if self._epoch != self._world.epoch:
            self._forget()
        kind = chance.randrange(10)
        if kind <= 5:
            return self._action(chance)
        if kind <= 8:
            return self._binary(chance)
        method = chance.choice(OTHER_METHODS)
        data = chance.choice((b"", b"\x0a\x00", chance.randbytes(20), arrow.ticket(b"statestore.v1.Control")))
        reply = calls.answers(self._channel, method, data, WATCH_S if method.endswith("Watch") else ANSWER_S_MAX, 1)
        return self._judged(reply, method, None, f"{method} {data!r}")

    # --- requests ---

    def _request(self, method: str, chance: random.Random) -> dict[str, Any]:
        """One that the store understands."""
        name = f"made_{chance.randrange(5)}"
        table = TableSchema(name, KEY, VALUE, {"positive": "n >= 0"} if chance.random() < 0.3 else {})
        made: dict[str, dict[str, Any]] = {
            "CreateTable": {"schema_json": table.to_json(), "if_not_exists": chance.random() < 0.5},
            "CreateQueue": {"schema_json": QueueSchema(name, FUZZ_QUEUE, 2).to_json(), "if_not_exists": False},
            "Drop": {"kind": chance.choice(("table", "queue")), "name": name},
            "OpenSession": {"ttl_ms": 1000},
            "RenewSession": {"session_id": self._session},
            "CloseSession": {"session_id": self._session + 1},
            "Register": {"group": "fuzz", "member": name, "attributes": {"a": "b"}, "ttl_ms": 1000},
            "Renew": {"lease_id": self._lease},
            "Leave": {"lease_id": self._lease},
            "Members": {"group": "fuzz"},
            "Watch": {"group": "fuzz", "revision": 2**64 - 1, "wait_ms": 10},
        }
        return made.get(method, {})

    def _broken(self, method: str, chance: random.Random) -> Any:
        request: Any = self._request(method, chance)
        if chance.random() < 0.2:
            return request
        if "schema_json" in request and chance.random() < 0.8:  # What is inside the text is a structure, too.
            inner = changed(json.loads(request["schema_json"]), chance)
            return {**request, "schema_json": to_json(inner).decode("utf-8", "replace")}
        if not request:
            return {"x": odd_value(chance)}
        return changed(request, chance)

    def _is_harmful(self, method: str, request: Any) -> bool:
        """Whether it would, rightly, take something from the job or the canaries."""
        text = json.dumps(request)
        if method == "Drop":
            known = (*self._world.places.table_ids, *self._world.places.queue_ids)
            return any(f'"{name}"' in text for name in known)
        return any(group in text for group in GROUPS_OF_OTHERS)

    def _action(self, chance: random.Random) -> Outcome:
        method = chance.choice(list(METHODS))
        request = self._broken(method, chance)
        if self._is_harmful(method, request):
            return Outcome("skipped")
        body = to_json(request, chance)
        if chance.random() < 0.05:
            body = damaged(body, chance)
        name = method if chance.random() < 0.95 else chance.choice(("", "x", "info", method * 9, "\x00"))
        timeout_s = WATCH_S if method == "Watch" else ANSWER_S_MAX
        reply = calls.answers(self._channel, f"{FLIGHT}DoAction", arrow.action(name, body), timeout_s)
        found = json.loads(arrow.proto_fields(reply.messages[0])[1]) if reply.code == "OK" and reply.messages else None
        return self._judged(reply, method, found, f"{name} {bounded(request)}", request)

    def _binary(self, chance: random.Random) -> Outcome:
        method = chance.choice(list(METHODS))
        request = self._request(method, chance) if chance.random() < 0.5 else self._broken(method, chance)
        try:
            data = json_format.ParseDict(request, METHODS[method]()).SerializeToString()
        except (json_format.ParseError, ValueError, UnicodeError, AttributeError, TypeError, SystemError):
            request = self._request(method, chance)
            data = json_format.ParseDict(request, METHODS[method]()).SerializeToString()
        if chance.random() < 0.4:
            data = damaged(data, chance)
            if method == "Drop" or any(group.encode() in data for group in GROUPS_OF_OTHERS):
                return Outcome("skipped")
        if self._is_harmful(method, request):
            return Outcome("skipped")
        timeout_s = WATCH_S if method == "Watch" else ANSWER_S_MAX
        reply = calls.unary(self._channel, f"/{SERVICE.full_name}/{method}", data, timeout_s)
        found = None
        if reply.code == "OK":
            answer = message_factory.GetMessageClass(SERVICE.methods_by_name[method].output_type).FromString(
                reply.messages[0]
            )
            found = json_format.MessageToDict(answer, preserving_proto_field_name=True)
        return self._judged(reply, method, found, f"{method} {data.hex()[:600]}", request)

    # --- answers ---

    def _judged(self, reply: Reply, method: str, found: Any, shown: str, request: Any = None) -> Outcome:
        problems = answer_problems(reply.all_bytes)
        if found is not None:
            self._undo(method, found, request)
        if reply.code in ("OK", "LEFT"):
            return Outcome("accepted", problems, False, shown)
        return calls.refused(reply, problems, shown, may_wait="Watch" in method, timeout_s=ANSWER_S_MAX)

    def _undo(self, method: str, found: dict[str, Any], request: Any) -> None:
        """Give back what an accepted request took."""
        if method == "OpenSession":
            self._quietly("CloseSession", session_id=found.get("session_id", 0))
        elif method == "Register":
            self._quietly("Leave", lease_id=found.get("lease_id", 0))
        elif method in ("CreateTable", "CreateQueue"):
            kind = "table" if method == "CreateTable" else "queue"
            listed = self._quietly("ListTables" if kind == "table" else "ListQueues") or {}
            known = {**self._world.places.table_ids, **self._world.places.queue_ids}
            for text in listed.get("schema_json", []):
                name = json.loads(text)["name"]
                if name not in known and not name.startswith(GROUPS_OF_OTHERS):
                    self._quietly("Drop", kind=kind, name=name)

    def _quietly(self, method: str, **fields: Any) -> Any:
        body = arrow.action(method, json.dumps(fields).encode())
        reply = calls.answers(self._channel, f"{FLIGHT}DoAction", body, ANSWER_S_MAX)
        return json.loads(arrow.proto_fields(reply.messages[0]).get(1, b"{}")) if reply.messages else None

    def _forget(self) -> None:
        self.close()
        self._epoch = self._world.epoch
        self._channel = calls.channel_to(self._world.address)
        self._session = self._world.open_session()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
