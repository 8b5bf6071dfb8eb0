"""GetRows over Arrow Flight, as single calls and as exchanges of many, with long poll; and the action ``status``.

Handlers hold the lock only for slicing: small batches are joined, and everything is sent, outside of it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import pyarrow as pa

from shuffle.errors import BadInput, ShuffleError, StaleMapper, WrongVersion, to_wire
from shuffle.ids import Guid
from shuffle.limits import MIB
from shuffle.mapper.bucket import ServedBatch
from shuffle.mapper.shared_core import CANCEL_CHECK_S, MemoryBudget, Served, SharedCore
from shuffle.messages import METADATA_FIELDS, ROWS_EXCHANGE, STREAM_OVER, GetRows, SharedRows, Tail
from shuffle.messages_many import MANY, ManyHead, PairAnswer, decode_many
from shuffle.support import crash_points, flight
from shuffle.support.endpoint import Endpoint
from shuffle.support.shared_memory import BYTES_MIN, MemoryWriter, machine
from shuffle.support.slots import Slots

JOIN_BYTES_MAX = 1 * MIB
"""The most bytes of adjacent batches that are joined into one. Below it the cost of a message outweighs that of a
copy."""

EXCHANGES_PER_REDUCER_MAX = 8
EXCHANGES_MIN = 64
"""The number of exchanges and calls that are served at once: this many for each reducer of each mapper, and at least
``EXCHANGES_MIN``. Each has a thread. A reducer has one exchange, and for a while those that it, or an instance before
it, has abandoned; Spark's tasks and ``status`` come on top."""


MANY_BYTES_MAX = 16 * MIB
"""The most bytes of a response to many requests over the wire. Each of them gets an equal part, and what is left of the
parts of those before it."""


def joined(batches: Iterable[ServedBatch], join_bytes_max: int = JOIN_BYTES_MAX) -> Iterator[ServedBatch]:
    """The same rows in batches of a sensible size: small adjacent batches are copied into one, large ones are not
    copied."""
    batches = list(batches)
    if len(batches) == 1:
        yield batches[0]
        return
    small: list[ServedBatch] = []
    small_bytes = 0
    for served in batches:
        nbytes = served.rows.nbytes
        if small and small_bytes + nbytes > join_bytes_max:
            yield _join(small)
            small, small_bytes = [], 0
        small.append(served)
        small_bytes += nbytes
    if small:
        yield _join(small)


def _join(batches: list[ServedBatch]) -> ServedBatch:
    if len(batches) == 1:
        return batches[0]
    return ServedBatch(pa.concat_batches([served.rows for served in batches]), batches[-1].last_row_index)


def _with_tails(batches: Iterable[ServedBatch], tail: Tail) -> Iterator[tuple[pa.RecordBatch, Tail]]:
    """Each batch with its tail: the last one has ``tail``, and the tails before it speak of their own rows only."""
    before: ServedBatch | None = None
    for served in batches:
        if before is not None:
            last = before.last_row_index
            yield before.rows, Tail(last, last, None, tail.generation, True)
        before = served
    if before is not None:
        yield before.rows, tail._replace(last_row_index=before.last_row_index)


_NO_COLUMNS = pa.schema([])

_Answer = Served | ShuffleError | None
"""The answer to one of many requests; None says that the request has to be made alone."""


def _has_rows(answer: _Answer) -> TypeGuard[Served]:
    return isinstance(answer, Served) and bool(answer.rows)


def _is_empty(answer: _Answer) -> bool:
    """Whether there is nothing to tell yet, so that the response can wait."""
    return isinstance(answer, Served) and not answer.rows


def _alone_unless(answer: _Answer, schema: pa.Schema | None) -> _Answer:
    """``answer``, unless its rows are of another schema."""
    return None if _has_rows(answer) and answer.schema != schema else answer


def _about_to_be_sent(served: Served) -> Served:
    """``served``, which has rows, with their schema: spilled rows may be served before this instance has mapped any."""
    crash_points.reach("mapper.before_answer")
    return served._replace(schema=served.rows[0].rows.schema)


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


@dataclass(frozen=True, slots=True)
class HostedMapper:
    """One mapper instance, as the server sees it."""

    shared: SharedCore
    memory_budget: MemoryBudget
    status: Callable[[], dict[str, Any]]
    on_served: Callable[[int, int], None]
    """A callback that gets the numbers of rows and bytes of each response."""

    @classmethod
    def of(
        cls,
        shared: SharedCore,
        status: Callable[[], dict[str, Any]] | None = None,
        on_served: Callable[[int, int], None] = lambda rows, nbytes: None,
    ) -> HostedMapper:
        return cls(shared, MemoryBudget(shared), status or shared.status, on_served)


@dataclass(slots=True)
class _Exchange:
    """What the handler of an exchange knows from one request to the next."""

    writer: Any
    begun_with: pa.Schema | None = None
    """The schema that the exchange was begun with; None if none was known then."""
    has_begun: bool = False
    memory: MemoryWriter | None = None
    shares: int = 0
    """For how many reducers the shared memory is."""
    closing: ExitStack = field(default_factory=ExitStack)
    """What gives the shared memory back."""

    def begin(self, schema: pa.Schema | None) -> None:
        if not self.has_begun:
            self.begun_with, self.has_begun = schema, True
            self.writer.begin(schema or _NO_COLUMNS)

    def sharing(self, budget: MemoryBudget, shares: int = 1) -> MemoryWriter | None:
        """Shared memory for a response to this many reducers; None if there is none."""
        if self.memory is None or self.shares < shares:
            self.closing.close()
            self.memory, self.shares = budget.take(self.closing, shares), shares
        return None if self.memory is None or self.memory.is_refused else self.memory


class MapperServer(flight.FlightServerBase):
    """Serves the rows of the mapper instances of one process; each request names the instance that it is for."""

    def __init__(self, mappers: Iterable[HostedMapper], listen: str = "127.0.0.1:0") -> None:
        listening = Endpoint.parse_listen(listen)
        super().__init__(flight.location(listening.target))
        self.mappers: dict[Guid, HostedMapper] = {mapper.shared.core.guid: mapper for mapper in mappers}
        reducers = sum(mapper.shared.reducer_count for mapper in self.mappers.values())
        exchanges_max = max(EXCHANGES_MIN, EXCHANGES_PER_REDUCER_MAX * reducers)
        self._slots = Slots("exchanges", exchanges_max)
        self._idle = Slots("exchanges that wait for a request", exchanges_max)
        self.endpoint = replace(listening, port=self.port)
        """The endpoint on which the server listens, with the port that it was given."""
        self.address = str(self.endpoint)

    def mapper(self, guid: str) -> HostedMapper:
        """The instance that a request names. If there is only one, it is returned whatever the request names, and its
        core refuses requests for other instances."""
        mapper = self.mappers.get(Guid(guid))
        if mapper is None and len(self.mappers) == 1:
            mapper = next(iter(self.mappers.values()))
        if mapper is None:
            served = ", ".join(f"{guid} of mapper {one.shared.core.mapper_index}" for guid, one in self.mappers.items())
            raise StaleMapper(
                f"the request is for instance {guid} of a mapper, but this process serves the instances {served}: ask "
                "discovery again"
            )
        return mapper

    def do_get(self, context: Any, ticket: Any) -> Any:
        with self._slots.taken():
            request = GetRows.decode(ticket.ticket)
            mapper = self.mapper(request.mapper_id)
            served = self._rows(mapper, request, context)
        schema = served.schema or _NO_COLUMNS
        return flight.GeneratorStream(schema, self._stream(mapper, schema, served))

    def _stream(
        self, mapper: HostedMapper, schema: pa.Schema, served: Served
    ) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        if not served.rows:
            yield empty_batch(schema), served.tail.encode()
        for rows, tail in _with_tails(joined(served.rows), served.tail):
            yield rows, tail.encode()
            mapper.on_served(rows.num_rows, rows.nbytes)

    def _rows(self, mapper: HostedMapper, request: GetRows, context: Any) -> Served:
        served = mapper.shared.get_rows(request, context.is_cancelled)
        if served.rows:
            return _about_to_be_sent(served)
        if served.schema is not None and request.with_metadata:
            return served._replace(schema=pa.schema([*served.schema, *METADATA_FIELDS], served.schema.metadata))
        return served

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Serve GetRows again and again on one stream (see ``messages``), while all responses have the same schema."""
        if descriptor.command != ROWS_EXCHANGE:
            raise WrongVersion(
                f"unknown exchange {descriptor.command!r}, and not {ROWS_EXCHANGE!r}: mapper and reducer are of "
                "different versions of this project. Install the same one everywhere, and start them again"
            )
        flight.check_schema(reader, _NO_COLUMNS)
        exchange = _Exchange(writer)
        with self._slots.taken(), exchange.closing:
            while True:
                try:
                    with self._idle.taken():
                        message = flight.read_chunk(reader).app_metadata
                except StopIteration:
                    return
                ticket = b"" if message is None else bytes(message)
                serve = self._serve_many if ticket.startswith(MANY) else self._serve_one
                if not serve(exchange, ticket, context):
                    writer.write_metadata(STREAM_OVER)
                    return

    def _serve_one(self, exchange: _Exchange, ticket: bytes, context: Any) -> bool:
        """Respond to one request; False if that cannot be done on this exchange."""
        writer = exchange.writer
        sharing: MemoryWriter | None = None
        try:
            request = GetRows.decode(ticket)
            mapper = self.mapper(request.mapper_id)
            if request.machine is not None and request.machine == machine():
                sharing = exchange.sharing(mapper.memory_budget)
            if sharing is not None and request.to_row_index is None:
                request = replace(request, max_bytes=min(request.max_bytes, sharing.bytes_max))
            served = self._rows(mapper, request, context)
        except ShuffleError as refused:
            exchange.begin(exchange.begun_with)
            writer.write_metadata(to_wire(refused).encode())
            return True
        exchange.begin(served.schema)
        if served.schema != exchange.begun_with or mapper.shared.closing:
            return False
        if not served.rows:
            writer.write_metadata(served.tail.encode())
            return True
        nbytes = sum(batch.rows.nbytes for batch in served.rows)
        if sharing is None or nbytes < BYTES_MIN or not self._share(writer, sharing, served):
            for rows, tail in _with_tails(joined(served.rows), served.tail):
                writer.write_with_metadata(rows, tail.encode())
        mapper.on_served(sum(batch.rows.num_rows for batch in served.rows), nbytes)
        return True

    def _share(self, writer: Any, memory: MemoryWriter, served: Served) -> bool:
        """Respond by way of shared memory; False if there are too many rows for it."""
        batches = list(_with_tails(joined(served.rows), served.tail))
        handle = memory.put([rows for rows, _ in batches])
        if handle is None:
            return False
        writer.write_metadata(SharedRows(handle, tuple(tail for _, tail in batches)).encode())
        return True

    # -- many requests in one message ---------------------------------------------------------------------------------

    def _serve_many(self, exchange: _Exchange, message: bytes, context: Any) -> bool:
        """Respond to the requests of many pairs; False if that cannot be done on this exchange."""
        sharing: MemoryWriter | None = None
        try:
            requests = decode_many(message)
            first = requests[0]
            if first.machine is not None and first.machine == machine():
                shares = sum(request.mapper_id == first.mapper_id for request in requests)
                budget = self.mapper(first.mapper_id).memory_budget
                sharing = exchange.sharing(budget, min(shares, budget.reducers))
        except StaleMapper:
            pass  # The answer to that request says so.
        except ShuffleError as refused:
            exchange.begin(exchange.begun_with)
            exchange.writer.write_metadata(to_wire(refused).encode())
            return True
        answers = self._answers(requests, MANY_BYTES_MAX if sharing is None else sharing.bytes_max, context)
        with_rows = [answer for answer in answers if _has_rows(answer)]
        schemas = [answer.schema for answer in with_rows or answers if isinstance(answer, Served)]
        exchange.begin(next((schema for schema in schemas if schema is not None), None))
        if any(mapper.shared.closing for mapper in self.mappers.values()):
            return False
        if with_rows and exchange.begun_with is None:
            return False
        # Rows of another schema do not fit into the exchange, and the reducer gets them from one of its own.
        answers = [_alone_unless(answer, exchange.begun_with) for answer in answers]
        self._send_many(exchange, sharing, answers)
        for request, answer in zip(requests, answers, strict=True):
            if _has_rows(answer):
                rows = [batch.rows for batch in answer.rows]
                served_bytes = sum(batch.nbytes for batch in rows)
                self.mapper(request.mapper_id).on_served(sum(batch.num_rows for batch in rows), served_bytes)
        return True

    def _answers(self, requests: Sequence[GetRows], bytes_max: int, context: Any) -> list[_Answer]:
        """An answer to each request, as soon as there is one with rows or an error: None if it has to be made alone."""
        begin_s = time.monotonic()
        asked: dict[SharedCore, list[GetRows]] = {}
        for request in requests:
            mapper = self.mappers.get(request.mapper_id)
            if mapper is not None:
                asked.setdefault(mapper.shared, []).append(request)
        wakes = [core.wakes for core in asked]
        answers = self._answers_now(requests, bytes_max)
        if not all(map(_is_empty, answers)):
            return answers
        woken = threading.Event()
        with ExitStack() as stack:
            for core, of_core in asked.items():
                stack.enter_context(core.listening(of_core, woken))
            # What came between the first look and now has set no event.
            is_new = wakes != [core.wakes for core in asked]
            while True:
                if is_new:
                    answers = self._answers_now(requests, bytes_max)
                wait_s = min((core.wait_s(of_core) for core, of_core in asked.items()), default=0.0)
                left_s = begin_s + wait_s - time.monotonic()
                is_over = left_s <= 0 or context.is_cancelled() or any(core.closing for core in asked)
                if is_over or not all(map(_is_empty, answers)):
                    return answers
                is_new = woken.wait(min(left_s, CANCEL_CHECK_S))
                woken.clear()

    def _answers_now(self, requests: Sequence[GetRows], bytes_max: int) -> list[_Answer]:
        answers: list[_Answer] = []
        left_bytes = bytes_max
        for at, request in enumerate(requests):
            share_bytes = max(1, left_bytes // (len(requests) - at))
            try:
                mapper = self.mapper(request.mapper_id)
                answer = mapper.shared.get_rows_now(replace(request, max_bytes=min(request.max_bytes, share_bytes)))
            except ShuffleError as refused:
                answers.append(refused)
                continue
            if answer is not None and answer.rows:
                answer = _about_to_be_sent(answer)
                left_bytes -= sum(batch.rows.nbytes for batch in answer.rows)
            answers.append(answer)
        return answers

    def _send_many(self, exchange: _Exchange, sharing: MemoryWriter | None, answers: Sequence[_Answer]) -> None:
        """Send the head of the response, and the rows behind it or in shared memory."""
        is_early = not all(map(_is_empty, answers))
        parts = [list(_with_tails(joined(answer.rows), answer.tail)) for answer in answers if _has_rows(answer)]
        nbytes = sum(rows.nbytes for part in parts for rows, _ in part)
        shared = None
        if sharing is not None and nbytes >= BYTES_MIN:
            shared = sharing.put_many([[rows for rows, _ in part] for part in parts])
        handle, places = shared or (None, [(0, 0)] * len(parts))
        each = iter(zip(parts, places, strict=True))
        told: list[PairAnswer | ShuffleError] = []
        for answer in answers:
            if _has_rows(answer):
                part, place = next(each)
                told.append(PairAnswer(tuple(tail for _, tail in part), True, False, *place))
            elif isinstance(answer, Served):
                told.append(PairAnswer((answer.tail,), is_early=is_early))
            else:
                told.append(PairAnswer() if answer is None else answer)
        exchange.writer.write_metadata(ManyHead(told, handle).encode())
        if handle is None:
            for part in parts:
                for rows, tail in part:
                    exchange.writer.write_with_metadata(rows, tail.encode())

    def do_action(self, context: Any, action: Any) -> Any:
        if action.type != "status":
            raise BadInput(f"unknown action {action.type!r}: a mapper knows only status")
        body = b"" if action.body is None else bytes(action.body)
        return [flight.Result(pa.py_buffer(json.dumps(self._status_of(body)).encode()))]

    def _status_of(self, guid: bytes) -> dict[str, Any]:
        """The status of the instance with this guid; where there is only one, it need not be named."""
        return self.mapper(guid.decode("ascii", "replace")).status()

    def list_actions(self, context: Any) -> Any:
        return [("status", "what the mapper instance of this guid holds, as JSON")]

    def close(self, timeout_s: float = 5.0) -> bool:
        """Respond to the requests that wait, and stop; whether all calls ended in time."""
        for mapper in self.mappers.values():
            mapper.shared.close()
        return flight.shutdown(self, timeout_s, lambda: len(self._idle) == len(self._slots))
