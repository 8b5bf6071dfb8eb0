"""Reading a queue ahead: while one answer is being used, the next one is on its way.

Only for reads over the wire, and only once a reader is seen to go through a partition in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from statestore.segment import decode_head
from statestore.store import QueueRead

PARTITIONS_MAX = 64
"""Partitions that are read ahead at once; each may hold one answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """One read of a queue."""

    queue_id: int
    partition: int
    begin: int
    max_rows: int
    max_bytes: int


class ReadAhead:
    """Asks for the read that is likely to come next. Safe to use from many threads."""

    def __init__(self, ask: Callable[[Question, int], QueueRead | None]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="read-ahead")
        self._expected: dict[tuple[int, int], int] = {}
        self._ahead: dict[tuple[int, int], tuple[Question, Future[QueueRead | None]]] = {}

    def read(self, question: Question, wait_ms: int) -> QueueRead | None:
        place = (question.queue_id, question.partition)
        with self._lock:
            asked, answer = self._ahead.pop(place, (None, None))
            in_order = self._expected.get(place) == question.begin
        found = answer.result() if answer is not None and asked == question else None
        if found is None:
            found = self._ask(question, wait_ms)
        if found is not None:
            self._go_on(question, found, in_order)
        return found

    def _go_on(self, question: Question, found: QueueRead, in_order: bool) -> None:
        place = (question.queue_id, question.partition)
        head = decode_head(memoryview(found.records[-1]), 0, found.file)
        end = min(found.segment_begin + head.first_row + head.rows, question.begin + question.max_rows)
        following = Question(*place, end, question.max_rows, question.max_bytes)
        with self._lock:
            if len(self._expected) >= PARTITIONS_MAX:
                self._expected.clear()
            self._expected[place] = end
            if in_order and len(self._ahead) < PARTITIONS_MAX:
                self._ahead[place] = following, self._pool.submit(self._quietly, following)

    def _quietly(self, question: Question) -> QueueRead | None:
        """What goes wrong here is not the caller's business yet: it asks again, and learns then."""
        try:
            return self._ask(question, 0)
        except Exception:
            return None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
