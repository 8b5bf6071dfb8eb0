"""Reading a queue ahead: whatever is asked, in whatever order, gets its own answer, and the bounds are kept."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from shuffle.errors import OutOfRange, StoreUnavailable
from shuffle.statestore.remote.read_ahead import AHEAD_MAX, ReadAhead
from shuffle.statestore.remote.transport import ReadRequest, ReadResponse

RECORD_ROWS = 10
ROWS = 1_000


class Daemon:
    """Answers reads of partitions of ``ROWS`` rows in records of ``RECORD_ROWS``, and counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[ReadRequest] = []
        self.failing: Callable[[ReadRequest], bool] = lambda request: False
        self.rows = ROWS
        self._lock = threading.Lock()

    def __call__(
        self, request: ReadRequest, wait_ms: int, on_end: Callable[[int], None] | None = None
    ) -> ReadResponse | None:
        with self._lock:
            self.asked.append(request)
        if self.failing(request):
            raise StoreUnavailable("not now")
        if request.begin > self.rows:
            raise OutOfRange("behind the end")
        if request.begin == self.rows:
            return None
        end = self.end(request)
        if on_end is not None:
            on_end(end)
        return ReadResponse(f"{request.queue_id}/{request.partition}", request.begin, [], 0, end)

    def end(self, request: ReadRequest) -> int:
        """Answers are whole records: they may go beyond what was asked for."""
        last = min(request.begin + request.max_rows, self.rows) - 1
        return min((last // RECORD_ROWS + 1) * RECORD_ROWS, self.rows)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def ahead(daemon: Daemon) -> Iterator[ReadAhead]:
    made = ReadAhead(daemon)
    yield made
    made.close()


def check(daemon: Daemon, request: ReadRequest, found: ReadResponse | None) -> None:
    assert found is not None
    assert (found.file, found.offset) == (f"{request.queue_id}/{request.partition}", request.begin)
    assert found.end == daemon.end(request)


def test_partition_read_in_order_is_asked_for_once_and_not_far_ahead(daemon: Daemon, ahead: ReadAhead) -> None:
    request = ReadRequest(1, 0, 0, 25, 1 << 20)
    while request.begin < ROWS:
        found = ahead.read(request, 0)
        check(daemon, request, found)
        assert found is not None
        assert max(asked.begin for asked in daemon.asked) <= request.begin + (AHEAD_MAX + 1) * 25
        request = request.after(found.end)
    begins = [asked.begin for asked in daemon.asked if asked.begin < ROWS]
    assert sorted(begins) == list(range(0, ROWS, 25))


def test_reader_that_jumps_gets_what_it_asks_for(daemon: Daemon, ahead: ReadAhead) -> None:
    chance = random.Random(3)
    position = {(queue, partition): 0 for queue in (1, 2) for partition in range(3)}
    for _ in range(2_000):
        place = chance.choice(list(position))
        if chance.random() < 0.1 or position[place] >= ROWS:
            position[place] = chance.randrange(ROWS)
        request = ReadRequest(*place, position[place], chance.choice([1, 25, 25, 25, 100]), 1 << 20)
        found = ahead.read(request, 0)
        check(daemon, request, found)
        assert found is not None
        position[place] = request.after(found.end).begin


def test_end_of_the_partition_is_asked_for_again(daemon: Daemon, ahead: ReadAhead) -> None:
    for begin in (0, 500):
        check(daemon, ReadRequest(1, 0, begin, 500, 1), ahead.read(ReadRequest(1, 0, begin, 500, 1), 0))
    at_end = ReadRequest(1, 0, ROWS, 500, 1)
    assert ahead.read(at_end, 0) is None
    daemon.rows += 7
    check(daemon, at_end, ahead.read(at_end, 0))
    with pytest.raises(OutOfRange):
        ahead.read(ReadRequest(1, 0, 2 * ROWS, 500, 1), 0)


def test_failure_ahead_of_the_reader_is_not_the_readers(daemon: Daemon, ahead: ReadAhead) -> None:
    failed: set[int] = set()

    def fail_once(request: ReadRequest) -> bool:
        if request.begin in failed or request.begin < 100:
            return False
        failed.add(request.begin)
        return True

    request = ReadRequest(1, 0, 0, 50, 1)
    daemon.failing = fail_once
    while request.begin < ROWS:
        try:
            found = ahead.read(request, 0)
        except StoreUnavailable:
            # Its own request failed, which it may see; it asks again.
            continue
        check(daemon, request, found)
        assert found is not None
        request = request.after(found.end)


def test_nothing_is_asked_after_the_end(daemon: Daemon, ahead: ReadAhead) -> None:
    for begin in (0, 50):
        ahead.read(ReadRequest(1, 0, begin, 50, 1), 0)
    ahead.close()
    count = len(daemon.asked)
    assert count <= 2 + AHEAD_MAX
