"""The queue of commits for the one writer, which takes them out in groups."""

from __future__ import annotations

import contextlib
import queue
import threading

from shuffle.errors import ShuffleError
from shuffle.limits import MIB
from shuffle.statestore.engine.commit_group import GROUP_COMMITS_MAX
from shuffle.statestore.request import CommitRequest, Committed

GROUP_BYTES_MAX = 64 * MIB
"""The most bytes of one group of commits. The commit that exceeds it is still taken."""

_STOP = None


class Pending:
    """A commit that waits for its outcome. The writer calls ``finish`` once."""

    __slots__ = ("request", "size_bytes")

    def __init__(self, request: CommitRequest) -> None:
        self.request = request
        self.size_bytes = request.size_bytes()

    def finish(self, outcome: Committed | ShuffleError) -> None:
        raise NotImplementedError


class Awaited(Pending):
    """A commit for whose outcome a thread waits."""

    __slots__ = ("_unfinished", "outcome")

    def __init__(self, request: CommitRequest) -> None:
        super().__init__(request)
        self.outcome: Committed | ShuffleError | None = None
        # One thread waits and one wakes it, once: a lock does that in one step, an event takes three locks and a queue.
        self._unfinished = threading.Lock()
        self._unfinished.acquire()

    def finish(self, outcome: Committed | ShuffleError) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self._unfinished.release()

    def wait(self, timeout_s: float) -> bool:
        """Whether the commit has an outcome within ``timeout_s``."""
        return self._unfinished.acquire(timeout=timeout_s)


class CommitQueue:
    """The commits that wait for the writer. Any thread puts them in; only the writer takes them out."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._left_over: list[Pending | None] = []
        """At most one entry that was taken out of the queue and does not fit the current group: the next group begins
        with it."""

    def put(self, pending: Pending) -> None:
        self._waiting.put(pending)

    def stop(self) -> None:
        """End the queue: the commits that were put in before this call are still taken out."""
        self._waiting.put(_STOP)

    def next_group(self, timeout_s: float) -> list[Pending] | None:
        """The next commits to write together: an empty list if none came in time, and None after ``stop``."""
        try:
            first = self._left_over.pop() if self._left_over else self._waiting.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return None if first is _STOP else self._gather(first)

    def _gather(self, first: Pending) -> list[Pending]:
        """``first`` and the commits that wait behind it, within the bounds of a group."""
        group = [first]
        size_bytes = first.size_bytes
        # A change of the catalogue is a group of its own: the schemas that other commits were checked against must not
        # change within their group. So is the replacement of a log, which takes over all rows that the log has.
        while not first.request.stands_alone and len(group) < GROUP_COMMITS_MAX and size_bytes < GROUP_BYTES_MAX:
            try:
                pending = self._waiting.get_nowait()
            except queue.Empty:
                break
            if pending is _STOP or pending.request.stands_alone:
                self._left_over.append(pending)
                break
            group.append(pending)
            size_bytes += pending.size_bytes
        return group

    def refuse_all(self, refusal: ShuffleError) -> None:
        """Finish every commit that still waits with ``refusal``, since nobody will write them."""
        with contextlib.suppress(queue.Empty):
            while True:
                pending = self._waiting.get_nowait()
                if pending is not _STOP:
                    pending.finish(refusal)
