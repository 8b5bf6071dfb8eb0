"""The life of a window entry: its states, what can happen to it, and which state follows.

All of it is in the table ``TRANSITIONS``. The window moves an entry on by ``after``, which refuses what the table does
not have, and the picture in ``docs/entry-life.md`` is drawn from it (``python -m tools.entry_life``).

There is one verb for each event, and they are used for nothing else:

- **serve**: rows of the entry are in a response. They stay where they are, and may be served again.
- **commit**: the last row that the entry held is committed by its reducer (or it never held any). Its memory is freed.
- **spill**: the rows that it still held are durable in the spill, and are served from there. Its memory is freed.
- **retire**: it leaves the front of the window. The persisted state may follow now.
- **persist**: the persisted state is behind it. It will never be mapped again.

Rows are *freed* when their part of an entry leaves memory, by a commit or a spill. A restart of the instance forgets
all entries in whatever state they are; those that were not persisted are mapped again, and are new entries then.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

SERVE: Final = "serve"
COMMIT: Final = "commit"
SPILL: Final = "spill"
RETIRE: Final = "retire"
PERSIST: Final = "persist"
EVENTS: Final = (SERVE, COMMIT, SPILL, RETIRE, PERSIST)


class Life(Enum):
    """The states of a window entry."""

    HELD = "held"
    """The entry is in the window with rows, and no response has had any of them since this instance mapped them."""
    SERVED = "served"
    """The entry is in the window with rows that are not all committed, and some of them were in a response."""
    COMMITTED = "committed"
    """The entry is in the window without rows, since all are committed. It waits for the entries before it."""
    SPILLED = "spilled"
    """The entry is in the window without rows; those that were not committed are in the spill."""
    RETIRED = "retired"
    """The entry has left the window, and waits for the transaction that moves the persisted state behind it."""
    PERSISTED = "persisted"
    """The persisted state is behind the entry."""

    __hash__ = object.__hash__  # The one of ``Enum`` is a Python function, which would be called for each lookup below.


TRANSITIONS: Final[dict[tuple[Life, str], Life]] = {
    (Life.HELD, SERVE): Life.SERVED,
    (Life.HELD, COMMIT): Life.COMMITTED,
    (Life.HELD, SPILL): Life.SPILLED,
    (Life.SERVED, SERVE): Life.SERVED,
    (Life.SERVED, COMMIT): Life.COMMITTED,
    (Life.SERVED, SPILL): Life.SPILLED,
    (Life.COMMITTED, RETIRE): Life.RETIRED,
    (Life.SPILLED, RETIRE): Life.RETIRED,
    (Life.RETIRED, PERSIST): Life.PERSISTED,
}


def after(life: Life, event: str) -> Life:
    """The state that follows upon ``event``. An event that the table does not allow is a bug, and asserted against."""
    following = TRANSITIONS.get((life, event))
    assert following is not None, f"a window entry that is {life.value} cannot {event}"
    return following
