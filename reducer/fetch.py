"""The fetch stage: one thread for each mapper, so that no mapper has to wait for another.

A fetcher has at most one request under way. It sends it to the youngest instance that discovery lists, to the next one
after a failure, and waits a little longer after each failure in a row, unless discovery changes first. The core decides
which rows to request (``FetchPlan``). Where a process hosts several reducers, or several mappers, the requests of many
fetchers are sent together (``link``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shuffle.discovery import MapperAddress, MapperDirectory
from shuffle.errors import NotServed, RowsGone, ShuffleError, StaleGeneration, StaleMapper, TooLarge
from shuffle.ids import MapperIndex, ReducerIndex, ShuffleIndex
from shuffle.limits import BATCH_BYTES_MAX
from shuffle.messages import GetRows, Tail
from shuffle.metrics import ReducerMetrics
from shuffle.reducer.connections import ClientPool, SharedClient
from shuffle.reducer.core import FetchedBatch, FetchPlan
from shuffle.reducer.exchange import RowsResponse, RowStream
from shuffle.reducer.link import RESPONSE_S_MAX, Link, Links
from shuffle.reducer.shared_core import SharedCore
from shuffle.support import crash_points, flight
from shuffle.support.logs import get_logger
from shuffle.support.retry import Backoff
from shuffle.support.vital_threads import start_vital

ALONE_WAIT_MS = 250
"""The longest wait, in milliseconds, of a request that is made alone by a fetcher that could board a link."""

LOCATE_S_MAX = 2.0
"""The seconds for finding the exact position of one dead letter, which is not worth a long wait."""

_log = get_logger(__name__)


def get_rows(client: Any, request: GetRows, *, who: str, timeout_s: float) -> RowsResponse:
    """One GetRows as a single call."""
    response = RowsResponse()
    size_bytes = 0
    with flight.typed_errors(who):
        reader = client.do_get(flight.Ticket(request.encode()), flight.call_options(timeout_s))
        for chunk in reader:
            if chunk.app_metadata is None:
                raise ShuffleError(f"{who} sent rows without their shuffle index: is it a mapper of this version?")
            tail = Tail.decode(bytes(chunk.app_metadata))
            if chunk.data is None or chunk.data.num_rows == 0:
                response.tails.append(tail)
                continue
            chunk.data.validate()
            size_bytes += chunk.data.nbytes
            if size_bytes > request.max_bytes + BATCH_BYTES_MAX:
                reader.cancel()
                raise TooLarge(f"{who} sent more than {size_bytes} bytes, and {request.max_bytes} were asked for")
            response.add(chunk.data, tail)
    return response


class Connections:
    """At most one Flight client, to the instance in use, and an exchange on it; used by one thread, except for
    ``interrupt``.

    The client may be shared with other fetchers that use the same address; the exchange is not.
    """

    def __init__(self, share_memory: bool = True, clients: ClientPool | None = None) -> None:
        self._share_memory = share_memory
        self._clients = clients or ClientPool()
        self._shared: SharedClient | None = None
        self._stream: RowStream | None = None

    def to(self, address: str) -> Any:
        if self._shared is None or address != self._shared.address:
            self.close()
            self._shared = self._clients.take(address)
        return self._shared.client

    def stream_to(self, address: str, who: str) -> RowStream:
        client = self.to(address)
        if self._stream is None:
            self._stream = RowStream(client, who, self._share_memory)
        return self._stream

    def interrupt(self) -> None:
        """End the request that is under way, if there is one. Any thread may call it."""
        stream = self._stream
        if stream is not None:
            stream.interrupt()

    def close(self, is_broken: bool = False) -> None:
        shared, self._shared = self._shared, None
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        if shared is not None:
            self._clients.give_back(shared, is_broken)


class InstanceChoice:
    """Chooses the instance of a mapper to use: the youngest listed, and after a failure the next one, in turn."""

    def __init__(self) -> None:
        self._listed: Sequence[MapperAddress] = ()
        self._turn = 0

    def choose(self, listed: Sequence[MapperAddress]) -> MapperAddress | None:
        if list(listed) != list(self._listed):
            self._listed, self._turn = list(listed), 0
        return self._listed[self._turn % len(self._listed)] if self._listed else None

    def failed(self) -> None:
        self._turn += 1


class Fetcher:
    """Fetches the rows of one mapper until the core is stopped."""

    def __init__(
        self,
        mapper_index: MapperIndex,
        reducer_index: ReducerIndex,
        shared: SharedCore,
        directory: MapperDirectory,
        backoff: Backoff,
        metrics: ReducerMetrics,
        on_rows_gone: Callable[[], None],
        share_memory: bool = True,
        clients: ClientPool | None = None,
        links: Links | None = None,
    ) -> None:
        """``links`` are those of the process, if it sends requests together."""
        self._mapper_index = mapper_index
        self._reducer_index = reducer_index
        self._shared = shared
        self._directory = directory
        self._backoff = backoff
        self._metrics = metrics
        self._on_rows_gone = on_rows_gone
        self._choice = InstanceChoice()
        self._connections = Connections(share_memory, clients)
        self._links = links
        self._link: Link | None = None
        """The link that the fetcher has boarded last."""
        self._boarded_for: MapperAddress | None = None
        self._alone = 0
        """The number of requests to make before it boards again."""

        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = start_vital(self._run, f"fetch-{self._mapper_index}", self._shared.fail)

    def interrupt(self) -> None:
        """End a wait for rows, after the core was stopped: nobody needs the response any more."""
        self._connections.interrupt()
        if self._link is not None:
            self._link.interrupt()

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (plan := self._shared.next_plan(self._mapper_index)) is not None:
                self._step(plan)
        except ShuffleError as error:
            self._shared.fail(error)
        finally:
            self._connections.close()

    def _step(self, plan: FetchPlan) -> None:
        changes = self._directory.changes
        mapper = self._choice.choose(self._directory.mappers().get(self._mapper_index, []))
        if mapper is None:
            self._wait(changes)
            return
        try:
            if self._links is None:
                self._fetch(mapper, plan)
            elif self._alone:
                self._alone -= 1
                self._fetch(mapper, replace(plan, wait_ms=min(plan.wait_ms, ALONE_WAIT_MS)))
            else:
                self._boarded_for = mapper
                self._link = self._links.to(mapper.address, self._mapper_index)
                self._alone = self._link.ride(self)
        except ShuffleError as error:
            self._failed(mapper, error, changes)

    def _fetch(self, mapper: MapperAddress, plan: FetchPlan) -> None:
        begin_s = time.monotonic()
        try:
            stream = self._connections.stream_to(mapper.address, self._who(mapper))
            request = self._request(mapper, plan)
            response = stream.get_rows(request, timeout_s=plan.wait_ms / 1000 + RESPONSE_S_MAX)
        except ShuffleError:
            self._metrics.fetch_seconds.observe(time.monotonic() - begin_s)
            raise
        size_bytes = self.took(plan, response, time.monotonic() - begin_s)
        if size_bytes:
            self._shared.pause(size_bytes)

    def took(self, plan: FetchPlan, response: RowsResponse, seconds: float) -> int:
        """Hand over a response, which took so many seconds; the number of its bytes that are of use."""
        self._metrics.fetch_seconds.observe(seconds)
        if response.batches:
            crash_points.reach("reducer.after_fetch")
        rows = self._shared.fetched(plan, response.batches, response.tails, response.is_early)
        if self._backoff.failures:
            _log.info("mapper answers again", mapper=self._mapper_index)
            self._backoff.reset()
        if not rows:
            return 0
        size_bytes: int = sum(batch.get_total_buffer_size() for batch, _ in response.batches)
        self._metrics.fetched_rows.inc(rows)
        self._metrics.fetched_bytes.inc(size_bytes)
        return size_bytes

    def _request(self, mapper: MapperAddress, plan: FetchPlan) -> GetRows:
        return GetRows(
            mapper_id=mapper.guid,
            reducer_index=self._reducer_index,
            committed_row_index=plan.committed_row_index,
            from_row_index=plan.from_row_index,
            max_rows=plan.max_rows,
            max_bytes=plan.max_bytes,
            wait_ms=plan.wait_ms,
            processor=self._directory.processor,
            generation=plan.generation,
        )

    # -- on board of a link: the thread that drives calls these --------------------------------------------------------

    def plan_on_board(self) -> FetchPlan | None:
        listed = self._directory.mappers().get(self._mapper_index, [])
        if self._choice.choose(listed) != self._boarded_for:
            return None
        return self._shared.plan_now(self._mapper_index)

    def request_of(self, plan: FetchPlan) -> GetRows:
        assert self._boarded_for is not None
        return self._request(self._boarded_for, plan)

    def pause_s(self, response_bytes: int) -> float:
        return self._shared.pause_s(response_bytes)

    def _failed(self, mapper: MapperAddress, error: ShuffleError, changes: int) -> None:
        if self._shared.stopping:
            return
        # Only the first of several failures in a row is logged: a mapper may be away for hours.
        if self._backoff.failures == 0:
            _log.warning("mapper passed over", mapper=self._mapper_index, address=mapper.address, error=error)
        self._choice.failed()
        if isinstance(error, RowsGone | NotServed | StaleGeneration):
            # Rows are gone from a window only when this reducer has committed them, so another instance of it has done
            # so; or this instance takes rows for committed that are not, because the store was replaced or restored; or
            # the processor is of another generation by now.
            self._on_rows_gone()
        elif not isinstance(error, StaleMapper):
            # A new channel: the old one would add gRPC's back-off to ours.
            self._connections.close(is_broken=True)
        self._wait(changes)

    def _wait(self, changes: int) -> None:
        """Wait out the back-off, or until discovery changes: most failures end with such a change."""
        self._directory.wait_for_change(self._backoff.next_s(), since=changes)

    def _who(self, mapper: MapperAddress) -> str:
        return f"mapper {self._mapper_index} at {mapper.address}"


class RowLocator:
    """Finds the shuffle index of a single row: it requests the rows of the part again, up to this row, and the tail of
    the response has the index of the last one."""

    def __init__(self, reducer_index: ReducerIndex, shared: SharedCore, directory: MapperDirectory) -> None:
        self._reducer_index = reducer_index
        self._shared = shared
        self._directory = directory

    def __call__(self, part: FetchedBatch, row: int) -> ShuffleIndex | None:
        """The shuffle index of row number ``row`` of ``part``; None if no mapper responds in time."""
        for mapper in self._directory.mappers().get(part.mapper_index, []):
            connections = Connections()
            try:
                response = get_rows(
                    connections.to(mapper.address),
                    self._request(part, row, mapper),
                    who=mapper.address,
                    timeout_s=LOCATE_S_MAX,
                )
            except ShuffleError:
                continue
            finally:
                connections.close()
            if sum(batch.num_rows for batch, _ in response.batches) == row + 1:
                return response.batches[-1][1]
        return None

    def _request(self, part: FetchedBatch, row: int, mapper: MapperAddress) -> GetRows:
        return GetRows(
            mapper_id=mapper.guid,
            reducer_index=self._reducer_index,
            committed_row_index=self._shared.committed_row_index(part.mapper_index),
            from_row_index=part.from_row_index,
            max_rows=row + 1,
            max_bytes=BATCH_BYTES_MAX,
            processor=self._directory.processor,
            generation=self._shared.generation,
        )
