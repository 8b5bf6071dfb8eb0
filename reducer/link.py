"""One exchange between two processes, for the requests of all their pairs of a reducer and a mapper.

Where a process hosts several reducers, or mappers, each pair would have an exchange of its own, and most of what a
request costs would be paid for each of them: a message in each direction, and the threads at both ends that it wakes.
A ``Link`` sends the requests of many pairs as one message instead (``messages_many``), and the mapper's process holds
it until it has rows for any of them.

Each pair has a fetcher with a thread, which *boards* the link and sleeps. One of those on board drives: it makes the
requests of all, one message after another, and hands the rows to their cores. A fetcher *gets off* when there is
anything that the others have nothing to do with, and goes on by itself as one without a link does:

- an error of its own, or no room for more rows, or another instance of its mapper, or its reducer is to stop;
- a request for which the mapper needs the store, so that the others would have to wait;
- a message that is under way, perhaps for seconds, and that the pair is not in (``BOARDING_S``).

If the message as a whole fails, all get off with that error. When the driver gets off, another one drives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shuffle.errors import ShuffleError
from shuffle.messages import GetRows
from shuffle.messages_many import PAIRS_MAX
from shuffle.reducer.connections import ClientPool, SharedClient
from shuffle.reducer.core import FetchPlan
from shuffle.reducer.exchange import ManyAnswer, RowsResponse, RowStream

BOARDING_S = 0.05
"""The seconds for which a pair waits for the message that is under way, before it makes a request of its own. Under
load the response comes sooner than that."""

HELD_MS_BOARDING = 20
"""The longest wait for rows, in milliseconds, of a message while pairs board, or make requests of their own because
they were late: they can be in the next one."""

HELD_MS_MAX = 1_000
"""The longest wait of any message, in milliseconds. It is that of many pairs, so it may be shorter than that of one: a
pair that comes too late for it has to make requests of its own until it is over."""

RESPONSE_S_MAX = 6.0
"""The seconds within which a response must come, after the wait for rows that was requested. A mapper that needs longer
is treated as gone."""

ALONE_REQUESTS = 8
"""The number of requests that a pair makes alone after a mapper has asked for that: what it needs the store for, rows
in the spill, is rarely over after one."""

_ASLEEP_S = 1.0
"""The seconds after which a sleeping fetcher looks around, should a wake-up ever be missed."""


class Passenger(Protocol):
    """A pair of a reducer and a mapper, as a link sees it. Its methods are called by the thread that drives."""

    def plan_on_board(self) -> FetchPlan | None:
        """Its next request to the instance for which it has boarded; None if it has none to make there."""

    def request_of(self, plan: FetchPlan) -> GetRows: ...

    def took(self, plan: FetchPlan, response: RowsResponse, seconds: float) -> int:
        """Takes the rows of a response, and returns how many bytes they have; ``ShuffleError`` if they are wrong."""

    def pause_s(self, response_bytes: int) -> float:
        """The seconds to wait after a response of so many bytes, if the load asks for it."""


@dataclass(slots=True, eq=False)
class _Seat:
    """A passenger on board."""

    passenger: Passenger
    since_s: float
    woken: threading.Event = field(default_factory=threading.Event)
    """Set when the passenger gets off, or is to drive."""
    is_off: bool = False
    is_included: bool = False
    """Whether it was in a message already."""
    error: ShuffleError | None = None
    alone: int = 0
    """How many requests it is to make by itself next."""


_Opened = tuple[RowStream | None, SharedClient | None]


class Link:
    """The exchange with the process at one address. Safe to use from many threads."""

    def __init__(self, address: str, clients: ClientPool, share_memory: bool) -> None:
        self._address = address
        self._clients = clients
        self._share_memory = share_memory
        self._lock = threading.Lock()
        self._seats: list[_Seat] = []
        self._driver: _Seat | None = None
        self._is_asking = False
        """Whether a message is under way."""
        self._late: set[Passenger] = set()
        """Those who were too late, and have not boarded again."""
        self._interrupts = 0
        self._interrupted = threading.Event()
        """Set to end a pause."""
        self._client: SharedClient | None = None
        self._stream: RowStream | None = None

    # -- boarding -----------------------------------------------------------------------------------------------------

    def ride(self, passenger: Passenger) -> int:
        """Make the requests of ``passenger`` until it has to go on by itself. Returns the number of requests that it
        has to make alone before it boards again, or raises the error because of which it got off."""
        seat = _Seat(passenger, time.monotonic())
        with self._lock:
            if len(self._seats) >= PAIRS_MAX:
                return 1
            self._seats.append(seat)
            self._late.discard(passenger)
            if self._driver is None:
                self._driver = seat
        try:
            while not self._is_off(seat):
                if self._driver is seat:
                    self._drive(seat)
                else:
                    seat.woken.wait(_ASLEEP_S if seat.is_included else BOARDING_S)
        finally:
            self._leave(seat)
        if seat.error is not None:
            raise seat.error
        return seat.alone

    def _is_off(self, seat: _Seat) -> bool:
        with self._lock:
            is_late = self._is_asking and not seat.is_included and time.monotonic() - seat.since_s >= BOARDING_S
            if is_late and not seat.is_off:
                self._late.add(seat.passenger)
                self._get_off(seat, alone=1)
            return seat.is_off

    def _get_off(self, seat: _Seat, error: ShuffleError | None = None, alone: int = 0) -> None:
        """Let a passenger go on by itself. The caller has the lock."""
        seat.is_off, seat.error, seat.alone = True, error, alone
        if seat in self._seats:
            self._seats.remove(seat)
        seat.woken.set()

    def _leave(self, seat: _Seat) -> None:
        """The thread of a passenger goes; if it drove, another one does from now on."""
        with self._lock:
            if not seat.is_off:
                self._get_off(seat)
            if self._driver is not seat:
                return
            self._driver = self._seats[0] if self._seats else None
            if self._driver is not None:
                self._driver.woken.set()
                return
            # Whoever boards next opens another one, perhaps before this one is closed.
            exchange = self._detached()
        self._close(exchange)

    @property
    def is_empty(self) -> bool:
        with self._lock:
            return self._driver is None

    def interrupt(self) -> None:
        """End the message that is under way: a reducer on board is to stop. The others board again."""
        with self._lock:
            self._interrupts += 1
            stream = self._stream
        self._interrupted.set()
        if stream is not None:
            stream.interrupt()

    # -- driving ------------------------------------------------------------------------------------------------------

    def _drive(self, driver: _Seat) -> None:
        """Make requests until the driver itself gets off."""
        while True:
            interrupts = self._interrupts
            self._interrupted.clear()
            asked, is_complete = self._next_plans()
            if not any(seat is driver for seat, _ in asked):
                return
            begin_s = time.monotonic()
            try:
                answers = self._ask([seat.passenger.request_of(plan) for seat, plan in asked], is_complete)
            except ShuffleError as error:
                self._failed([seat for seat, _ in asked], error, interrupts)
                return
            pause_s = self._hand_out(asked, answers, time.monotonic() - begin_s)
            if pause_s and not driver.is_off:
                self._interrupted.wait(pause_s)

    def _next_plans(self) -> tuple[list[tuple[_Seat, FetchPlan]], bool]:
        """The next request of everybody on board, and whether nobody else is about to board. Who has no request to make
        gets off. A different one is the first every time: the first ones get their rows even if a response is full."""
        with self._lock:
            self._seats = self._seats[1:] + self._seats[:1]
            seats = list(self._seats)
        planned = [(seat, seat.passenger.plan_on_board()) for seat in seats]
        asked: list[tuple[_Seat, FetchPlan]] = []
        with self._lock:
            is_complete = not self._late
            for seat, plan in planned:
                if plan is None:
                    self._get_off(seat)
                elif not seat.is_off:
                    is_complete = is_complete and seat.is_included
                    seat.is_included = True
                    asked.append((seat, plan))
        return asked, is_complete

    def _ask(self, requests: Sequence[GetRows], is_complete: bool) -> list[ManyAnswer]:
        held_ms_max = HELD_MS_MAX if is_complete else HELD_MS_BOARDING
        wait_ms = min(held_ms_max, *(request.wait_ms for request in requests))
        stream = self._open()
        with self._lock:
            self._is_asking = True
        try:
            return stream.get_many(requests, wait_ms, wait_ms / 1000 + RESPONSE_S_MAX)
        finally:
            with self._lock:
                self._is_asking = False

    def _hand_out(
        self, asked: Sequence[tuple[_Seat, FetchPlan]], answers: Sequence[ManyAnswer], seconds: float
    ) -> float:
        """Give each passenger its answer. Returns the seconds to wait before the next message: as long as all who got
        rows agree to."""
        fed: list[_Seat] = []
        total_bytes = 0
        for (seat, plan), answer in zip(asked, answers, strict=True):
            error = answer if isinstance(answer, ShuffleError) else None
            if isinstance(answer, RowsResponse):
                try:
                    size_bytes = seat.passenger.took(plan, answer, seconds)
                except ShuffleError as refused:
                    error = refused
                else:
                    total_bytes += size_bytes
                    if size_bytes:
                        fed.append(seat)
                    continue
            with self._lock:
                self._get_off(seat, error, 0 if error is not None else ALONE_REQUESTS)
        return min((seat.passenger.pause_s(total_bytes) for seat in fed), default=0.0)

    def _failed(self, seats: Sequence[_Seat], error: ShuffleError, interrupts: int) -> None:
        """A message has failed as a whole: all who were in it get off, with an error of their own each."""
        with self._lock:
            exchange = self._detached()
        self._close(exchange, is_broken=True)
        with self._lock:
            was_interrupted = interrupts != self._interrupts
            for seat in seats:
                own = None if was_interrupted else type(error)(error.message, **error.fields)
                self._get_off(seat, own)

    # -- the exchange -------------------------------------------------------------------------------------------------

    def _open(self) -> RowStream:
        """The exchange. Only the driver uses it, except for ``interrupt``."""
        if self._stream is None:
            client = self._clients.take(self._address)
            stream = RowStream(client.client, f"the mappers at {self._address}", self._share_memory)
            with self._lock:
                self._stream, self._client = stream, client
            return stream
        return self._stream

    def _detached(self) -> _Opened:
        """What is open, for ``_close``. The caller has the lock."""
        opened = self._stream, self._client
        self._stream = self._client = None
        return opened

    def _close(self, opened: _Opened, is_broken: bool = False) -> None:
        stream, client = opened
        if stream is not None:
            stream.close()
        if client is not None:
            self._clients.give_back(client, is_broken)


class Links:
    """The links of one process: one for each process of mappers, or several if there are very many pairs."""

    def __init__(self, clients: ClientPool, share_memory: bool, reducers: int) -> None:
        """``reducers`` is how many of them the process hosts."""
        self._clients = clients
        self._share_memory = share_memory
        self._mappers_per_link = max(1, PAIRS_MAX // reducers)
        self._lock = threading.Lock()
        self._links: dict[tuple[str, int], Link] = {}

    def to(self, address: str, mapper_index: int) -> Link:
        """The link for the requests to this mapper."""
        key = address, mapper_index // self._mappers_per_link
        with self._lock:
            link = self._links.get(key)
            if link is None:
                # Mappers that are started again have other addresses.
                self._links = {key: known for key, known in self._links.items() if not known.is_empty}
                link = self._links[key] = Link(address, self._clients, self._share_memory)
            return link
