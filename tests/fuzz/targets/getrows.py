"""A mapper's GetRows: false tickets for rows that exist; by single calls, exchanges and shared memory."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pyarrow as pa

from shuffle.discovery import MapperAddress
from shuffle.messages import ROWS_EXCHANGE, SHARED_ROWS, STREAM_OVER, SharedRows
from shuffle.messages_many import MANY_HEAD, PAIRS_MAX, ManyHead, PairAnswer
from shuffle.support.shared_memory import MemoryReader, NotShared, machine
from tests.fuzz import arrow, calls, job
from tests.fuzz.calls import FLIGHT, Exchange, Reply
from tests.fuzz.findings import Outcome, Problem
from tests.fuzz.mutate import as_read, changed, damaged, to_json
from tests.fuzz.oracles import answer_problems
from tests.fuzz.targets.base import bounded
from tests.fuzz.targets.flight import METHODS
from tests.fuzz.world import ANSWER_S_MAX, VICTIM_PAD, VICTIM_REDUCERS, VICTIM_ROWS, World, ticket_fields

HONEST_REDUCERS = 4
"""For the reducers before this one nothing is ever said to be committed that could be: the canary asks for their rows.
For the others it may be, and what is forgotten for it in memory must still be there durably."""

OF_JOB = 50
"""One input in so many goes to a mapper of the job."""

LONG_WAIT_S = 0.1
STREAM_QUESTIONS_MAX = 100


class GetRowsTarget:
    """Asks the mapper that nobody commits to, and now and then those of the job."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._guid = ""
        self._channel: Any = None
        self._exchange: Exchange | None = None
        self._asked = 0
        self._schema: pa.Schema | None = None
        self._job_mappers: list[MapperAddress] = []

    def run(self, number: int, chance: random.Random) -> Outcome:
        assert self._world.mapper is not None
        if self._guid != self._world.mapper.guid:
            self._forget()
        if chance.randrange(OF_JOB) == 0 and self._world.job.workers:
            return self._to_job(chance)
        kind = chance.randrange(20)
        if kind <= 9:
            return self._single(chance)
        if kind <= 15:
            return self._on_exchange(chance)
        if kind == 16:
            return self._left(chance)
        if kind == 17:
            return self._odd_exchange(chance)
        if kind == 18:
            return self._many(chance)
        return self._other_call(chance)

    # --- tickets ---

    def _ticket(self, chance: random.Random) -> dict[str, Any]:
        """One that the mapper understands."""
        cursor = chance.choice((-1, -1, chance.randrange(VICTIM_ROWS), VICTIM_ROWS - 1))
        return ticket_fields("victim", self._guid, chance.randrange(VICTIM_REDUCERS)) | {
            "from_row_index": cursor,
            "max_rows": chance.choice((1, 10, 200)),
            "max_bytes": chance.choice((1, 4096, 1 << 20)),
            "wait_ms": 0,
            "to_row_index": chance.choice((None, None, None, cursor + 5, 3)),
            "with_metadata": chance.random() < 0.2,
            "machine": machine() if chance.random() < 0.3 else None,
        }

    def _broken(self, chance: random.Random) -> Any:
        ticket: Any = self._ticket(chance)
        step = chance.randrange(10)
        if step == 0:
            return ticket
        if step <= 2:  # Beyond what was ever served: no reducer can have committed it.
            forged = VICTIM_ROWS + chance.choice((0, 1, 10_000, 2**31, 2**62, 2**63 - 1, 2**64))
            return {**ticket, "committed_row_index": forged, "from_row_index": forged + chance.choice((0, 0, 1))}
        if step == 3 and chance.random() < 0.2:  # A lie that could be true.
            committed = chance.randrange(VICTIM_ROWS)
            reducer = chance.randrange(HONEST_REDUCERS, VICTIM_REDUCERS)
            return {**ticket, "reducer_index": reducer, "committed_row_index": committed, "from_row_index": committed}
        if step == 4:
            return {**ticket, "committed_row_index": 10, "from_row_index": 5}
        if step == 5:
            wrong = chance.choice((self._guid[:-1], self._guid.upper(), "", "x" * 1000, 7, None))
            return {**ticket, "mapper_id": wrong}
        if step == 6:
            return {**ticket, "machine": chance.choice(((machine() or "") + "0", "", "../..", 5, "x" * 5000))}
        made = changed(ticket, chance)
        # What could be true of an honest reducer, by chance, is not said.
        if _is_possible(made):
            made["committed_row_index"] = -1
        return made

    # --- kinds of inputs ---

    def _single(self, chance: random.Random) -> Outcome:
        ticket = self._broken(chance)
        data = to_json(ticket, chance)
        if chance.random() < 0.05:
            data, ticket = damaged(to_json(self._ticket(chance)), chance), None
        if _is_possible(_parsed(data)):
            return Outcome("skipped")
        if ticket is not None:
            ticket = as_read(data, ticket)
        waits = ticket is None or _waits(ticket)
        channel, schema = self._channel, self._schema
        reply = calls.answers(channel, f"{FLIGHT}DoGet", arrow.ticket(data), LONG_WAIT_S if waits else ANSWER_S_MAX)
        return self._judged(reply, ticket, schema, waits, bounded(data))

    def _to_job(self, chance: random.Random) -> Outcome:
        """The same lies, to mappers whose rows are being counted: the job must come out exact all the same."""
        if not self._job_mappers:
            self._job_mappers = self._world.job_mappers()
        if not self._job_mappers:
            return Outcome("skipped")
        mapper = chance.choice(self._job_mappers)
        own = ticket_fields(job.PROCESSOR, mapper.guid, chance.randrange(job.REDUCERS))
        ticket = own if chance.random() < 0.3 else changed(own, chance)
        if isinstance(ticket, dict) and chance.random() < 0.5:
            forged = chance.choice((0, 100, 5_000, 10**6, 2**40, 2**63 - 1))
            ticket |= {"committed_row_index": forged, "from_row_index": forged}
        with calls.channel_to(mapper.address) as channel:
            reply = calls.answers(channel, f"{FLIGHT}DoGet", arrow.ticket(to_json(ticket)), 1.0)
        if reply.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            self._job_mappers = []
            return Outcome("left", answer_problems(reply.all_bytes), reply.code == "UNAVAILABLE", bounded(ticket))
        return self._judged(reply, None, None, False, f"to a mapper of the job: {bounded(ticket)}")

    def _on_exchange(self, chance: random.Random) -> Outcome:
        if self._exchange is None or self._asked >= STREAM_QUESTIONS_MAX:
            self._end()
            self._exchange = Exchange(self._channel, f"{FLIGHT}DoExchange", ANSWER_S_MAX)
            self._exchange.send(arrow.flight_data(arrow.Message.of_schema(pa.schema([])), None, ROWS_EXCHANGE))
            self._asked = 0
        ticket = self._broken(chance)
        if _waits(ticket):
            ticket["wait_ms"] = 1
        self._asked += 1
        self._exchange.send(arrow.flight_data(None, to_json(ticket)))
        messages: list[bytes] = []
        while True:
            reply = self._exchange.receive()
            messages += reply.messages
            if reply.code == "OK" and not messages:
                self._end()
                return Outcome("over", [], True, f"the exchange ended without an answer: {bounded(ticket)}")
            if reply.code:
                self._end()
                return self._judged(
                    Reply(messages, reply.code, reply.told), ticket, self._schema, False, bounded(ticket)
                )
            head, told, body = calls.parts_of(messages[-1])
            if head and not body and not told:
                self._schema = _schema_of(head) or self._schema
                continue
            if told == STREAM_OVER:
                self._end()
            if not (told.startswith(b"#") and told[1] & 1):  # The flag that says that there is more.
                return self._judged(Reply(messages, "OK"), ticket, self._schema, False, bounded(ticket))

    def _many(self, chance: random.Random) -> Outcome:
        """Requests of several reducers in one message, some of them false: each gets an answer of its own, or the
        message is refused as a whole."""
        tickets = [self._broken(chance) for _ in range(chance.choice((0, 1, 2, 5, 5, PAIRS_MAX + 1)))]
        for ticket in tickets:
            if isinstance(ticket, dict):
                ticket |= {"wait_ms": 1} if _waits(ticket) else {}
        data = b"[" + b",".join(to_json(ticket) for ticket in tickets) + b"]"
        if chance.random() < 0.1:
            data = b"[" + damaged(data, chance)
        parsed = _parsed(data)
        if isinstance(parsed, list) and any(map(_is_possible, parsed)):
            return Outcome("skipped")
        exchange = Exchange(self._channel, f"{FLIGHT}DoExchange", ANSWER_S_MAX)
        exchange.send(arrow.flight_data(arrow.Message.of_schema(pa.schema([])), None, ROWS_EXCHANGE))
        exchange.send(arrow.flight_data(None, data))
        reply = exchange.drained()
        problems = []
        heads = [told for _, told, _ in map(calls.parts_of, reply.messages) if told.startswith(MANY_HEAD)]
        for ticket, answer in zip(tickets, ManyHead.decode(heads[0]).answers if heads else (), strict=False):
            if isinstance(answer, PairAnswer) and answer.tails and isinstance(ticket, dict) and _was_forged(ticket):
                problems.append(Problem("wrong", f"committed_row_index {ticket['committed_row_index']} was accepted"))
        judged = self._judged(reply, None, None, False, bounded(data))
        return replace(judged, problems=judged.problems + problems) if problems else judged

    def _left(self, chance: random.Random) -> Outcome:
        """A caller that leaves in the middle, or while it waits."""
        ticket = {**self._ticket(chance), "max_rows": 6000, "max_bytes": 1 << 26, "wait_ms": 60_000}
        calls.answers(
            self._channel, f"{FLIGHT}DoGet", arrow.ticket(to_json(ticket)), 0.02, take_max=chance.choice((1, 2))
        )
        return Outcome("left", shown=f"left while it was answered: {bounded(ticket)}")

    def _odd_exchange(self, chance: random.Random) -> Outcome:
        exchange = Exchange(self._channel, f"{FLIGHT}DoExchange", ANSWER_S_MAX)
        command = chance.choice((ROWS_EXCHANGE, ROWS_EXCHANGE, b"statestore/1", b"", None, b"\xff"))
        schema = arrow.Message.of_schema(chance.choice(arrow.OTHER_SCHEMAS[:4]))
        batch = arrow.Message.of(arrow.some_batch(chance, arrow.OTHER_SCHEMAS[2]))
        pieces = [
            arrow.flight_data(schema, None, command),
            arrow.flight_data(None, to_json(self._ticket(chance))),
            arrow.flight_data(arrow.lying(batch, chance)[0], to_json(self._ticket(chance))),
            arrow.flight_data(None, b""),
            damaged(arrow.flight_data(batch, to_json(self._ticket(chance)), command), chance),
        ]
        order = [0, *(chance.randrange(len(pieces)) for _ in range(chance.randrange(4)))]
        for piece in order[chance.randrange(2) :]:
            exchange.send(pieces[piece])
        shown = f"exchange {command!r}, pieces {order}"
        if chance.random() < 0.3:
            exchange.end(abruptly=True)
            return Outcome("left", shown=shown)
        return self._judged(exchange.drained(), None, None, False, shown)

    def _other_call(self, chance: random.Random) -> Outcome:
        method = chance.choice(METHODS)
        actions = (("status", b""), ("status", b"\xff" * 50), ("", b""), ("x" * 4000, b"{}"), ("Info", b"{}"))
        data = chance.choice((b"", arrow.ticket(b"x"), arrow.action(*chance.choice(actions)), chance.randbytes(20)))
        if method == "DoPut":
            exchange = Exchange(self._channel, f"{FLIGHT}DoPut", ANSWER_S_MAX)
            exchange.send(data)
            reply = exchange.drained()
        else:
            reply = calls.answers(self._channel, f"{FLIGHT}{method}", data, ANSWER_S_MAX)
        return self._judged(reply, None, None, False, f"{method} {data[:100]!r}")

    # --- answers ---

    def _judged(self, reply: Reply, ticket: Any, schema: pa.Schema | None, waits: bool, shown: str) -> Outcome:
        problems = answer_problems(reply.all_bytes)
        if reply.code not in ("", "OK", "LEFT"):
            return calls.refused(reply, problems, shown, may_wait=waits, timeout_s=ANSWER_S_MAX)
        for message in reply.messages:
            head, told, body = calls.parts_of(message)
            if told.startswith(b"{"):
                code = str(json.loads(told)["code"])
                if code == "internal":
                    problems.append(Problem("untyped", told[:200].decode()))
                return Outcome(code, problems, code == "internal", shown)
            if head and not body and not told:
                schema = _schema_of(head) or schema
            elif told.startswith(SHARED_ROWS):
                problems += self._shared(told, ticket)
            elif body and schema is not None:
                problems += _wrong_rows(arrow.Message(head, body), schema, ticket)
        if isinstance(ticket, dict) and _was_forged(ticket):
            problems.append(Problem("wrong", f"committed_row_index {ticket['committed_row_index']} was accepted"))
        return Outcome("accepted", problems, bool(problems), shown)

    def _shared(self, told: bytes, ticket: Any) -> list[Problem]:
        """The rows that a note tells of are right, too."""
        try:
            batches = MemoryReader().take(SharedRows.decode(told).handle)
        except NotShared as error:
            return [Problem("wrong", f"shared memory that cannot be opened: {error}")]
        return [problem for batch in batches for problem in _wrong_in(batch, ticket)]

    # --- streams ---

    def _end(self) -> None:
        if self._exchange is not None:
            self._exchange.end(abruptly=True)
            self._exchange = None

    def _forget(self) -> None:
        self.close()
        assert self._world.mapper is not None
        self._guid = self._world.mapper.guid
        self._channel = calls.channel_to(self._world.mapper.address)

    def close(self) -> None:
        self._end()
        if self._channel is not None:
            self._channel.close()


def _waits(ticket: Any) -> bool:
    wait_ms = ticket.get("wait_ms") if isinstance(ticket, dict) else None
    return isinstance(wait_ms, int) and wait_ms > 1


def _parsed(data: bytes) -> Any:
    """As the mapper reads it; None if it cannot."""
    try:
        return json.loads(data)
    except ValueError:
        return None


def _is_possible(ticket: Any) -> bool:
    """Whether an honest reducer could have committed that: the mapper cannot tell, and the canary would."""
    if not isinstance(ticket, dict):
        return False
    committed, reducer = ticket.get("committed_row_index"), ticket.get("reducer_index")
    if not isinstance(committed, int | float) or not isinstance(reducer, int | float):
        return False
    return reducer < HONEST_REDUCERS and 0 <= committed < VICTIM_ROWS


def _was_forged(ticket: dict[str, Any]) -> bool:
    """Whether it says that rows are committed that there never were."""
    committed = ticket.get("committed_row_index")
    return isinstance(committed, int) and committed >= VICTIM_ROWS


def _schema_of(head: bytes) -> pa.Schema | None:
    try:
        return pa.ipc.read_schema(pa.py_buffer(arrow.Message(head, b"").encapsulated()))
    except (pa.ArrowException, OSError):
        return None


def _wrong_rows(message: arrow.Message, schema: pa.Schema, ticket: Any) -> list[Problem]:
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(message.encapsulated()), schema)
    except (pa.ArrowException, OSError) as error:
        return [Problem("wrong", f"an answer that is no batch of its schema: {error}")]
    return _wrong_in(batch, ticket)


def _wrong_in(batch: pa.RecordBatch, ticket: Any) -> list[Problem]:
    """Rows are those that were appended, of the reducer that was asked for."""
    if not batch.num_rows or not isinstance(ticket, dict):
        return []
    batch.validate(full=True)
    reducer = ticket.get("reducer_index")
    numbers = batch.column("n").to_pylist()
    pads = set(batch.column("pad").to_pylist())
    if pads != {VICTIM_PAD} or any(n % VICTIM_REDUCERS != reducer or not 0 <= n < VICTIM_ROWS for n in numbers):
        return [Problem("wrong", f"rows that were not asked for: {numbers[:5]}, {list(pads)[:2]}")]
    return []
