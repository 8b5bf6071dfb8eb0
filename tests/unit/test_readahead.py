"""Reading a queue ahead: whatever is asked, in whatever order, gets its own answer, and the bounds are kept."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from shuffle.errors import OutOfRange, StoreUnavailable
from shuffle.statestore.remote.read_ahead import AHEAD_MAX, Question, ReadAhead
from shuffle.statestore.store import QueueRead

RECORD_ROWS = 10
ROWS = 1_000


class Daemon:
    """Answers reads of partitions of ``ROWS`` rows in records of ``RECORD_ROWS``, and counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Question] = []
        self.failing: Callable[[Question], bool] = lambda question: False
        self.rows = ROWS
        self._lock = threading.Lock()

    def __call__(
        self, question: Question, wait_ms: int, on_end: Callable[[int], None] | None = None
    ) -> QueueRead | None:
        with self._lock:
            self.asked.append(question)
        if self.failing(question):
            raise StoreUnavailable("not now")
        if question.begin > self.rows:
            raise OutOfRange("behind the end")
        if question.begin == self.rows:
            return None
        end = self.end(question)
        if on_end is not None:
            on_end(end)
        return QueueRead(f"{question.queue_id}/{question.partition}", question.begin, [], 0, end)

    def end(self, question: Question) -> int:
        """Answers are whole records: they may go beyond what was asked for."""
        last = min(question.begin + question.max_rows, self.rows) - 1
        return min((last // RECORD_ROWS + 1) * RECORD_ROWS, self.rows)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def ahead(daemon: Daemon) -> Iterator[ReadAhead]:
    made = ReadAhead(daemon)
    yield made
    made.close()


def check(daemon: Daemon, question: Question, found: QueueRead | None) -> None:
    assert found is not None
    assert (found.file, found.offset) == (f"{question.queue_id}/{question.partition}", question.begin)
    assert found.end == daemon.end(question)


def test_partition_read_in_order_is_asked_for_once_and_not_far_ahead(daemon: Daemon, ahead: ReadAhead) -> None:
    question = Question(1, 0, 0, 25, 1 << 20)
    while question.begin < ROWS:
        found = ahead.read(question, 0)
        check(daemon, question, found)
        assert found is not None
        assert max(asked.begin for asked in daemon.asked) <= question.begin + (AHEAD_MAX + 1) * 25
        question = question.after(found.end)
    begins = [asked.begin for asked in daemon.asked if asked.begin < ROWS]
    assert sorted(begins) == list(range(0, ROWS, 25))


def test_reader_that_jumps_gets_what_it_asks_for(daemon: Daemon, ahead: ReadAhead) -> None:
    chance = random.Random(3)
    position = {(queue, partition): 0 for queue in (1, 2) for partition in range(3)}
    for _ in range(2_000):
        place = chance.choice(list(position))
        if chance.random() < 0.1 or position[place] >= ROWS:
            position[place] = chance.randrange(ROWS)
        question = Question(*place, position[place], chance.choice([1, 25, 25, 25, 100]), 1 << 20)
        found = ahead.read(question, 0)
        check(daemon, question, found)
        assert found is not None
        position[place] = question.after(found.end).begin


def test_end_of_the_partition_is_asked_for_again(daemon: Daemon, ahead: ReadAhead) -> None:
    for begin in (0, 500):
        check(daemon, Question(1, 0, begin, 500, 1), ahead.read(Question(1, 0, begin, 500, 1), 0))
    at_end = Question(1, 0, ROWS, 500, 1)
    assert ahead.read(at_end, 0) is None
    daemon.rows += 7
    check(daemon, at_end, ahead.read(at_end, 0))
    with pytest.raises(OutOfRange):
        ahead.read(Question(1, 0, 2 * ROWS, 500, 1), 0)


def test_failure_ahead_of_the_reader_is_not_the_readers(daemon: Daemon, ahead: ReadAhead) -> None:
    failed: set[int] = set()

    def fail_once(question: Question) -> bool:
        if question.begin in failed or question.begin < 100:
            return False
        failed.add(question.begin)
        return True

    question = Question(1, 0, 0, 50, 1)
    daemon.failing = fail_once
    while question.begin < ROWS:
        try:
            found = ahead.read(question, 0)
        except StoreUnavailable:
            # Its own question failed, which it may see; it asks again.
            continue
        check(daemon, question, found)
        assert found is not None
        question = question.after(found.end)


def test_nothing_is_asked_after_the_end(daemon: Daemon, ahead: ReadAhead) -> None:
    for begin in (0, 50):
        ahead.read(Question(1, 0, begin, 50, 1), 0)
    ahead.close()
    count = len(daemon.asked)
    assert count <= 2 + AHEAD_MAX
