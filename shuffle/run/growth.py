"""Partitions that an input gets while its processor runs: they become new mappers without a restart.

1. The input is asked, every few seconds and in a thread of its own, how many partitions it has.
2. If there are more, they are numbered after all others, and that is persisted with the fingerprint, in one transaction
   (``shuffle.preflight``). From then on every worker that starts knows of them.
3. The controller starts mappers for them. A new mapper's numbering begins at zero, and it registers as all do.
4. A reducer that finds a mapper in the directory whose index it does not know begins again from its persisted row,
   which it widens first. Nothing of a new mapper is committed before that.

An input whose ``partitions`` returns None never grows, and is never asked.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from shuffle.errors import ShuffleError
from shuffle.mapper.readers.opening import open_input
from shuffle.preflight.check import check_against_store, count_partitions
from shuffle.spec.config import ProcessorSpec
from shuffle.support.logs import get_logger

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

LOOK_S = 5.0
"""Seconds between two looks at the input."""

_log = get_logger(__name__)


class Growth:
    """Looks for new partitions, and says which mappers to start for them."""

    def __init__(self, spec: ProcessorSpec, client: StateClient, mapper_count: int) -> None:
        self._spec = spec
        self._client = client
        self._started = mapper_count
        self._found = mapper_count
        self._can_grow = True
        self._next_s = 0.0
        self._looking: threading.Thread | None = None

    def look(self, now_s: float) -> range:
        """The indexes of new mappers, each once. Begins another look if one is due; returns at once."""
        new = range(self._started, max(self._started, self._found))
        self._started = new.stop
        is_idle = self._looking is None or not self._looking.is_alive()
        if self._can_grow and is_idle and now_s >= self._next_s:
            self._next_s = now_s + LOOK_S
            self._looking = threading.Thread(target=self._look, name="growth", daemon=True)
            self._looking.start()
        return new

    def _look(self) -> None:
        try:
            with open_input(self._spec, self._client) as opened:
                if opened.partitions() is None:
                    self._can_grow = False
                    return
                if count_partitions(self._spec, opened) <= self._started:
                    return
            self._found = check_against_store(self._spec, self._client)
        except ShuffleError as error:
            # Whatever is wrong with the input, its readers find it, too, and it is theirs to say.
            _log.warning("no look for new partitions", error=error)
