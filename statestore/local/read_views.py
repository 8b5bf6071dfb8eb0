"""The read views of a store: the newest published version, and older ones that readers keep open.

Plain bookkeeping without a lock of its own: the store holds its lock around every call but ``abandon``.
"""

from __future__ import annotations

from collections import Counter, deque

from shuffle.errors import Expired
from shuffle.statestore.engine.storage import ClosedView
from shuffle.statestore.local.store_view import StoreView
from shuffle.statestore.store import ReadView


class ReadViews:
    """The version that was published last, and the read views that are still open at it or at earlier ones."""

    def __init__(self, version: int, view: StoreView) -> None:
        self._version = version
        self._view = view
        self._open: dict[int, tuple[int, StoreView]] = {}
        self._open_versions: Counter[int] = Counter()
        self._last_id = 0
        self._abandoned: deque[ReadView] = deque()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def oldest_version(self) -> int:
        """The version of the oldest read view that is open; where none is open, the version that was published last."""
        return min(self._open_versions, default=self._version)

    def publish(self, version: int, view: StoreView) -> None:
        """A group of commits is durable: from now on, new readers see ``view``."""
        self._version, self._view = version, view

    @property
    def newest(self) -> StoreView:
        """The view that was published last."""
        return self._view

    def open(self) -> ReadView:
        self._last_id += 1
        self._open[self._last_id] = self._version, self._view
        self._open_versions[self._version] += 1
        return ReadView(self._last_id, self._version)

    def view(self, view: ReadView | None) -> StoreView:
        """The keys as the read view ``view`` sees them; for None, as they were published last."""
        if view is None:
            return self._view
        entry = self._open.get(view.view_id)
        if entry is None:
            raise Expired("the snapshot or transaction is over: it was released, or its client was silent too long")
        return entry[1]

    def release(self, view: ReadView) -> None:
        entry = self._open.pop(view.view_id, None)
        if entry is not None:
            version = entry[0]
            self._open_versions[version] -= 1
            if not self._open_versions[version]:
                del self._open_versions[version]

    def abandon(self, view: ReadView) -> None:
        """Have ``view`` released by the next ``release_abandoned``. For finalisers, which may run inside any lock."""
        self._abandoned.append(view)

    def release_abandoned(self) -> None:
        while self._abandoned:
            self.release(self._abandoned.popleft())

    def close(self) -> None:
        """Nothing can be read any more."""
        self._open.clear()
        self._view = StoreView(ClosedView(), {})
