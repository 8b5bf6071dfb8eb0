"""A commit on its way through the one writer."""

from __future__ import annotations

import threading

from shuffle.errors import ShuffleError
from statestore.request import CommitRequest, Committed


class Pending:
    """A commit that waits for its answer. The writer calls ``finish`` once."""

    __slots__ = ("request", "size_bytes")

    def __init__(self, request: CommitRequest) -> None:
        self.request = request
        self.size_bytes = request.size_bytes()

    def finish(self, answer: Committed | ShuffleError) -> None:
        raise NotImplementedError


class Awaited(Pending):
    """One for which a thread waits."""

    __slots__ = ("_unanswered", "answer")

    def __init__(self, request: CommitRequest) -> None:
        super().__init__(request)
        self.answer: Committed | ShuffleError | None = None
        # One waits and one wakes, once: a lock does that in one step, where an event takes three locks and a queue.
        self._unanswered = threading.Lock()
        self._unanswered.acquire()

    def finish(self, answer: Committed | ShuffleError) -> None:
        if self.answer is None:
            self.answer = answer
            self._unanswered.release()

    def wait(self, timeout_s: float) -> bool:
        """True when there is an answer."""
        return self._unanswered.acquire(timeout=timeout_s)
