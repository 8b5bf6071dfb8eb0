"""The store's data plane over Flight: the exchange with false frames, and every other call of Flight."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pyarrow as pa

from shuffle.statestore.wire.messages import EXCHANGE, FRAME, Header, frame
from tests.fuzz import arrow, calls
from tests.fuzz.calls import FLIGHT, Exchange, Reply
from tests.fuzz.findings import Outcome, Problem
from tests.fuzz.mutate import as_read, changed, damaged, to_json
from tests.fuzz.oracles import answer_problems, has_records, records_problems
from tests.fuzz.targets.base import STAGED_MS, LaneRows, Questions, bounded
from tests.fuzz.targets.lane import LONG_WAIT_S, VALUE_BYTES_MAX, appended_problems
from tests.fuzz.world import ANSWER_S_MAX, FUZZ_QUEUE, World

STREAM_QUESTIONS_MAX = 200
"""Questions on one stream before another is opened: streams that end are an input too."""

STAGED_MAX = 3
"""Staged rows that wait for a commit to publish them."""

METHODS = (
    "Handshake",
    "ListFlights",
    "GetFlightInfo",
    "GetSchema",
    "DoGet",
    "DoPut",
    "DoAction",
    "ListActions",
    "PollFlightInfo",
    "Nothing",
)

_DAMAGED_PIECE = 4
"""Of the pieces of an odd stream: the one whose header may say anything."""

WAIT_MS_TAKEN = 100
"""A read that waits longer is left."""


class FlightTarget:
    """Keeps an exchange open for as long as the store does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._questions = Questions(world, "fuzz_flight", "fuzz_flight_q")
        self._channel: Any = None
        self._exchange: Exchange | None = None
        self._asked = 0
        self._epoch = -1

    def run(self, number: int, chance: random.Random) -> Outcome:
        if self._epoch != self._world.epoch:
            self._forget()
        kind = chance.randrange(20)
        if kind <= 8:
            return self._ask(chance)
        if kind <= 15:
            return self._lie(chance)
        if kind == 16:
            return self._other_schema(chance)
        if kind == 17:
            return self._odd_stream(chance)
        return self._other_call(chance)

    # --- kinds of inputs ---

    def _ask(self, chance: random.Random) -> Outcome:
        """Broken fields, rows that are right."""
        header, rows = self._questions.make(chance)
        broken: Any = changed(header, chance) if chance.random() < 0.6 else header
        data = to_json(broken, chance)
        broken = as_read(data, broken)
        if self._questions.is_harmful(broken):
            return Outcome("skipped")
        if may_wait(broken):
            return self._leave_waiting(data, bounded(broken))
        message = None if rows is None else arrow.Message.of(frame(*rows))
        return self._exchanged(message, data, broken, rows, bounded((broken, rows)))

    def _leave_waiting(self, data: bytes, shown: str) -> Outcome:
        """A read that may wait long, whose client goes away."""
        exchange = Exchange(self._channel, f"{FLIGHT}DoExchange", ANSWER_S_MAX)
        exchange.send(arrow.flight_data(arrow.Message.of_schema(FRAME), None, EXCHANGE))
        exchange.send(arrow.flight_data(None, data))
        time.sleep(LONG_WAIT_S)
        exchange.end(abruptly=True)
        return Outcome("left", shown=shown)

    def _lie(self, chance: random.Random) -> Outcome:
        """Fields that are right, rows that lie."""
        header, rows = self._questions.make(chance)
        while rows is None:
            header, rows = self._questions.make(chance)
        message, about = arrow.lying(arrow.Message.of(frame(*rows)), chance)
        shown = (
            f"{bounded(header)}, and the batch lies: {about}; {message.header.hex()[:300]} {message.body.hex()[:300]}"
        )
        sound = arrow.is_sound_for_flight(message, FRAME)
        seen = arrow.columns_of(message, FRAME) if sound else None
        return self._exchanged(message, to_json(header), header, seen, shown, lies=not sound)

    def _other_schema(self, chance: random.Random) -> Outcome:
        """A stream whose schema is not the agreed one, with batches of that schema, some of which lie."""
        schema = chance.choice([schema for schema in arrow.OTHER_SCHEMAS if not _has_dictionary(schema)])
        first = arrow.Message.of_schema(schema)
        if chance.random() < 0.3:
            first = arrow.Message(damaged(first.header, chance), first.body)
        message = arrow.Message.of(arrow.some_batch(chance, schema))
        about = "nothing"
        if chance.random() < 0.7:
            message, about = arrow.lying(message, chance)
        header, _ = self._questions.make(chance)
        exchange = Exchange(self._channel, f"{FLIGHT}DoExchange", ANSWER_S_MAX)
        exchange.send(arrow.flight_data(first, None, EXCHANGE))
        exchange.send(arrow.flight_data(message, to_json(header)))
        return self._judged(exchange.drained(), None, None, f"schema {schema}, lie: {about}, {bounded(header)}")

    def _odd_stream(self, chance: random.Random) -> Outcome:
        """Streams that begin wrongly, end early, or are cancelled."""
        exchange = Exchange(self._channel, f"{FLIGHT}DoExchange", ANSWER_S_MAX)
        schema = arrow.Message.of_schema(FRAME)
        command = chance.choice((EXCHANGE, EXCHANGE, b"", b"getrows/1", b"\xff\xfe", b"x" * 5000, None))
        header, rows = self._questions.make(chance)
        batch = arrow.Message.of(frame(*(rows or ([b"k"], [b"v"]))))
        pieces = [
            arrow.flight_data(schema, None, command),
            arrow.flight_data(batch, to_json(header)),
            arrow.flight_data(None, to_json(header)),
            arrow.flight_data(schema, to_json(header)),
            damaged(arrow.flight_data(batch, to_json(header), command), chance),
            b"",
            chance.randbytes(30),
        ]
        order = [0, *(chance.randrange(len(pieces)) for _ in range(chance.randrange(4)))]
        if chance.random() < 0.3:
            order.pop(0)
        for piece in order:
            exchange.send(pieces[piece])
        asked = None if _DAMAGED_PIECE in order else header
        shown = f"exchange {command!r}: pieces {order} of {bounded(header)}"
        if chance.random() < 0.3:
            exchange.end(abruptly=True)
            return Outcome("left", shown=shown)
        return self._judged(exchange.drained(), None, None, shown, asked)

    def _other_call(self, chance: random.Random) -> Outcome:
        """Calls that the store does not serve, or on its other port."""
        method = chance.choice(METHODS)
        data = chance.choice((b"", arrow.ticket(b"x"), arrow.action("Info", b"{}"), chance.randbytes(20), b"\x08\x02"))
        reply = calls.answers(self._channel, f"{FLIGHT}{method}", data, ANSWER_S_MAX)
        return self._judged(reply, None, None, f"{method} {data!r}")

    # --- one question ---

    def _exchanged(
        self,
        message: arrow.Message | None,
        metadata: bytes,
        header: Any,
        rows: LaneRows | None,
        shown: str,
        lies: bool = False,
    ) -> Outcome:
        if self._exchange is None or self._asked >= STREAM_QUESTIONS_MAX:
            self._end()
            self._exchange = Exchange(self._channel, f"{FLIGHT}DoExchange", ANSWER_S_MAX)
            self._exchange.send(arrow.flight_data(arrow.Message.of_schema(FRAME), None, EXCHANGE))
            self._asked = 0
            reply = self._exchange.receive()  # The schema of the answers.
            if reply.code:
                return self._over(reply, shown)
        self._asked += 1
        self._exchange.send(arrow.flight_data(message, metadata))
        reply = self._exchange.receive()
        outcome = self._over(reply, shown) if reply.code else self._judged(reply, header, rows, shown)
        if lies and outcome.result == "accepted":
            outcome.problems.append(Problem("wrong", "a batch that lies was accepted"))
        return outcome

    def _over(self, reply: Reply, shown: str) -> Outcome:
        self._end()
        return self._judged(reply, None, None, shown)

    def _judged(self, reply: Reply, header: Any, rows: LaneRows | None, shown: str, asked: Any = None) -> Outcome:
        """``asked`` is the header of every request of a stream, where ``header`` is not that of the only one."""
        problems = self._questions.unasked(answer_problems(reply.all_bytes), header)
        if reply.code not in ("", "OK", "LEFT"):
            return calls.refused(reply, problems, shown, may_wait=False, timeout_s=ANSWER_S_MAX)
        result = "accepted"
        for message in reply.messages:
            _, metadata, _ = calls.parts_of(message)
            told = json.loads(metadata) if metadata else {}
            if "error" in told:
                error = json.loads(told["error"])
                result = error["code"]
                if result == "internal":
                    problems.append(Problem("untyped", error["message"][:200]))
                continue
            problems += _leaks(message, told, header or asked)
            if isinstance(header, dict):
                problems += self._accepted(header, rows, told)
        return Outcome(result, problems, result in calls.SUSPICIOUS, shown)

    def _accepted(self, header: Header, rows: LaneRows | None, told: Header) -> list[Problem]:
        why = self._questions.nonsense(header)
        problems = [Problem("wrong", f"accepted: {why}")] if why is not None else []
        if header.get("op") in ("open", "get") and "view" in told:
            self._questions.views = [*self._questions.views[-20:], (told["view"], told["version"])]
        if "staged" in told and header.get("op") == "stage":
            if rows is not None and not all(arrow.is_sound(value or b"", FUZZ_QUEUE) for value in rows[1]):
                problems.append(Problem("wrong", "a batch that lies was staged for a queue"))
            if header["ttl_ms"] == STAGED_MS and len(self._questions.staged) < STAGED_MAX:
                self._questions.staged.append(told["staged"])
            else:
                self._discard(told["staged"])
        if header.get("op") == "commit" and isinstance(header.get("sections"), list) and rows is not None:
            problems += appended_problems(header["sections"], rows)
        return problems

    def _discard(self, staged: str) -> None:
        """Staged rows may live long, and files are counted at the end."""
        assert self._exchange is not None
        self._exchange.send(arrow.flight_data(None, to_json({"op": "discard", "staged": staged})))
        self._exchange.receive()

    # --- streams ---

    def _end(self) -> None:
        if self._exchange is not None:
            self._exchange.end(abruptly=True)
            self._exchange = None

    def _forget(self) -> None:
        self.close()
        self._epoch = self._world.epoch
        self._channel = calls.channel_to(self._world.places.flight)
        self._questions.session = self._world.open_session()
        self._questions.views.clear()
        self._questions.staged.clear()

    def close(self) -> None:
        self._end()
        if self._channel is not None:
            self._channel.close()


def may_wait(header: Any) -> bool:
    """Whether a request is a read that waits for rows longer than an answer may take."""
    wait_ms = header.get("wait_ms") if isinstance(header, dict) and header.get("op") == "read" else None
    return isinstance(wait_ms, int) and wait_ms > WAIT_MS_TAKEN


def _has_dictionary(schema: pa.Schema) -> bool:
    return any(pa.types.is_dictionary(column.type) for column in schema)


def _leaks(message: bytes, told: Header, asked: Any) -> list[Problem]:
    """Rows of a response that cannot be: lying themselves, larger than any value, or no records of the queue."""
    head, _, body = calls.parts_of(message)
    if not head or not body:
        return []
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(arrow.Message(head, body).encapsulated()), FRAME)
        batch.validate(full=True)
    except (pa.ArrowException, OSError):
        return [Problem("leak", "an answer with a batch that lies")]
    keys, values = (column.to_pylist() for column in batch.columns)
    if has_records(told):
        if keys != [None] or len(values) != 1 or values[0] is None:
            return [Problem("leak", f"records of a queue as {len(values)} values with {len(keys)} keys")]
        return records_problems(told, values[0], asked)
    longest = max((len(value) for value in (*keys, *values) if value is not None), default=0)
    if longest <= VALUE_BYTES_MAX:
        return []
    return [Problem("leak", f"a value of {longest} bytes, and none so large was ever written")]
