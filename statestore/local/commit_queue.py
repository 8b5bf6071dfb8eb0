"""Commits on their way to the one writer, and how they become groups."""

from __future__ import annotations

import contextlib
import queue
import threading

from shuffle.errors import ShuffleError
from shuffle.limits import MIB
from shuffle.statestore.engine.commit_group import GROUP_COMMITS_MAX
from shuffle.statestore.request import CommitRequest, Committed

GROUP_BYTES_MAX = 64 * MIB
"""Bytes in one group; the commit that exceeds it is still taken."""

_STOP = None


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


class CommitQueue:
    """The commits that wait for the writer. Anybody puts them in; the writer alone takes them out."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._left_over: list[Pending | None] = []
        """Taken out of the queue, but not fit for the group at hand: the next one begins with it."""

    def put(self, pending: Pending) -> None:
        self._waiting.put(pending)

    def stop(self) -> None:
        """What was put in before this is still taken out."""
        self._waiting.put(_STOP)

    def next_group(self, timeout_s: float) -> list[Pending] | None:
        """The next commits to write together: none if none came in time, and None after ``stop``."""
        try:
            first = self._left_over.pop() if self._left_over else self._waiting.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return None if first is _STOP else self._gather(first)

    def _gather(self, first: Pending) -> list[Pending]:
        """``first`` and whatever waits behind it, within the bounds of a group."""
        group = [first]
        size_bytes = first.size_bytes
        # Changes of the catalogue go alone: what the others were checked against must not change under them.
        while first.request.catalogue is None and len(group) < GROUP_COMMITS_MAX and size_bytes < GROUP_BYTES_MAX:
            try:
                pending = self._waiting.get_nowait()
            except queue.Empty:
                break
            if pending is _STOP or pending.request.catalogue is not None:
                self._left_over.append(pending)
                break
            group.append(pending)
            size_bytes += pending.size_bytes
        return group

    def refuse_all(self, refusal: ShuffleError) -> None:
        """Nobody will write what still waits."""
        with contextlib.suppress(queue.Empty):
            while True:
                pending = self._waiting.get_nowait()
                if pending is not _STOP:
                    pending.finish(refusal)
