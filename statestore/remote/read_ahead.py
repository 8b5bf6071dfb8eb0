"""Reading a queue ahead: while one answer is being used, the next ones are on their way.

Only for reads over the wire, and only once a reader is seen to go through a partition in order. An answer says at its
front where it ends, so the next question is asked while its rows are still coming: the daemon is never without one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from shuffle.statestore.store import QueueRead

PARTITIONS_MAX = 64
"""Partitions that are followed at once."""

ANSWERS_MAX = 64
"""Answers that are on their way, or wait to be used, at once; each has as many bytes as its reader asks for."""

AHEAD_MAX = 1
"""Of those, for one partition, beside the one that its reader waits for or uses. A second gains nothing."""

_THREADS = 4


@dataclass(frozen=True, slots=True)
class Question:
    """One read of a queue."""

    queue_id: int
    partition: int
    begin: int
    max_rows: int
    max_bytes: int

    def after(self, end: int) -> Question:
        """The next one, when the answer to this goes up to ``end``: no more is used of it than was asked for."""
        begin = min(end, self.begin + self.max_rows)
        return Question(self.queue_id, self.partition, begin, self.max_rows, self.max_bytes)


class Ask(Protocol):
    """Asks the daemon. ``on_end`` is called as soon as it is known where the answer ends."""

    def __call__(
        self, question: Question, wait_ms: int, on_end: Callable[[int], None] | None = None
    ) -> QueueRead | None: ...


@dataclass(slots=True, eq=False)
class _Run:
    """A reader's way through a partition, from answer to answer."""

    expected: int = -1
    """Where its next question begins, if it goes on in order."""
    asked: deque[tuple[Question, Future[QueueRead | None]]] = field(default_factory=deque)
    following: Question | None = None
    """What to ask after the last of those, as soon as there is room."""


class ReadAhead:
    """Asks for the reads that are likely to come next. Safe to use from many threads."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="read-ahead")
        self._runs: dict[tuple[int, int], _Run] = {}
        self._closed = False

    def read(self, question: Question, wait_ms: int) -> QueueRead | None:
        place = question.queue_id, question.partition
        with self._lock:
            run = self._runs.get(place)
            in_order = run is not None and run.expected == question.begin
            if run is None or not in_order or (run.asked and run.asked[0][0] != question):
                run = self._begin(place)
            answer = run.asked.popleft()[1] if run.asked else None
            self._ask_more(run)
        found = answer.result() if answer is not None else None
        if found is None:
            # What was asked after an answer that did not come is of no use either.
            with self._lock:
                run = self._begin(place)
            found = self._ask(question, wait_ms, self._listener(run, question) if in_order else None)
        if found is not None:
            with self._lock:
                run.expected = question.after(found.end).begin
        return found

    def _begin(self, place: tuple[int, int]) -> _Run:
        if len(self._runs) >= PARTITIONS_MAX:
            self._runs.clear()
        run = self._runs[place] = _Run()
        return run

    def _listener(self, run: _Run, question: Question) -> Callable[[int], None]:
        def on_end(end: int) -> None:
            with self._lock:
                run.following = question.after(end)
                self._ask_more(run)

        return on_end

    def _ask_more(self, run: _Run) -> None:
        """Ask what follows, if that is known and there is room for it."""
        question = run.following
        if question is None or self._closed or len(run.asked) >= AHEAD_MAX:
            return
        if self._runs.get((question.queue_id, question.partition)) is not run:
            return  # Its reader has gone elsewhere.
        if sum(len(each.asked) for each in self._runs.values()) < ANSWERS_MAX:
            run.following = None
            run.asked.append((question, self._pool.submit(self._quietly, question, self._listener(run, question))))

    def _quietly(self, question: Question, on_end: Callable[[int], None]) -> QueueRead | None:
        """What goes wrong here is not the caller's business yet: it asks again, and learns then."""
        try:
            return self._ask(question, 0, on_end)
        except Exception:
            return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
