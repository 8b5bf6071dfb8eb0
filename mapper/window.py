"""The window: mapped batches held in memory until every reducer has committed its rows of them.

An entry is one mapped batch, cut into parts: for each reducer that has rows in it, one Arrow batch with the offsets of
its rows in the entry. Parts are freed one by one, as soon as their reducer has committed their last row or their rows
are in the spill, so that a slow reducer holds memory for its own rows only. The entry itself, a few numbers by then,
stays in the window until all entries before it have retired, because the persisted state is one position and cannot
have holes. ``entry_life`` has the states of an entry, and the verbs for what happens to it.

No I/O, no threads, no clocks in here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from shuffle.ids import InputIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.mapper.entry_life import COMMIT, RETIRE, SPILL, Life, after

ENTRY_OVERHEAD_BYTES = 1024
"""The bytes that are counted for an entry besides its rows: objects, a token, an item of the queue. Without them, very
many very small entries behind a reducer that is down would grow past the memory limit."""

PART_OVERHEAD_BYTES = 512
"""The bytes that are counted for a part besides its rows: the Arrow batch's own objects."""

RowOffsets = np.ndarray[Any, np.dtype[np.uint32]]
"""The offsets of rows in the mapped batch that they belong to, counted from 0 and rising."""


class MappedPart(NamedTuple):
    """One reducer's rows of a mapped batch, and the offset of each in the batch."""

    reducer_index: ReducerIndex
    rows: pa.RecordBatch
    row_offsets: RowOffsets


@dataclass(frozen=True, slots=True)
class MappedBatch:
    """The result of mapping one batch of input rows."""

    schema: pa.Schema
    rows_out: int
    parts: Sequence[MappedPart]
    dead_letters: pa.Table | None = None
    """The rows for the dead-letter queue, in its schema; None if there are none."""
    ingested_us: int = 0
    """The time at which the rows were read, in microseconds since 1970, UTC."""
    front: int | None = None
    """The mapper's clock behind the last row: no row that comes after it is below this. None if there is no clock."""


class EntryPart:
    """One reducer's rows of one window entry."""

    __slots__ = (
        "batch",
        "begin",
        "entry",
        "first_row_index",
        "last_row_index",
        "nbytes",
        "reducer_index",
        "row_offsets",
    )

    def __init__(
        self, entry: WindowEntry, reducer_index: ReducerIndex, batch: pa.RecordBatch, row_offsets: RowOffsets
    ) -> None:
        assert batch.num_rows == len(row_offsets) > 0
        self.entry = entry
        self.reducer_index = reducer_index
        self.batch: pa.RecordBatch | None = batch
        self.row_offsets: RowOffsets | None = row_offsets
        """The offset of each row in the entry. The row's shuffle index is ``entry.shuffle_begin`` plus this."""
        self.begin = 0
        """The number of the first row of the batch that is not committed."""
        self.first_row_index = ShuffleIndex(entry.shuffle_begin + int(row_offsets[0]))
        self.last_row_index = ShuffleIndex(entry.shuffle_begin + int(row_offsets[-1]))
        # Whole buffers, not the visible slice of them: a slice keeps all of what it was cut from.
        self.nbytes = int(batch.get_total_buffer_size()) + int(row_offsets.nbytes) + PART_OVERHEAD_BYTES

    @property
    def rows(self) -> int:
        """The number of rows that are not committed."""
        return 0 if self.row_offsets is None else len(self.row_offsets) - self.begin

    def row_after(self, row_index: int) -> int:
        """The number, in the batch, of the first row whose shuffle index is above ``row_index``."""
        assert self.row_offsets is not None
        if row_index < self.first_row_index:
            return 0
        if row_index >= self.last_row_index:
            return len(self.row_offsets)
        # If it were of another type, numpy would first cast all offsets to that type.
        offset = np.uint32(row_index - self.entry.shuffle_begin)
        return int(np.searchsorted(self.row_offsets, offset, side="right"))

    def row_index_at(self, row: int) -> ShuffleIndex:
        assert self.row_offsets is not None
        return ShuffleIndex(self.entry.shuffle_begin + int(self.row_offsets[row]))

    def commit(self, row_index: int) -> int:
        """Rows up to ``row_index`` are committed. Returns how many of them were not before. The window frees the part
        after its last row."""
        before = self.begin
        self.begin = max(self.begin, self.row_after(row_index))
        return self.begin - before

    @property
    def is_committed(self) -> bool:
        return self.rows == 0

    def free(self) -> None:
        self.batch = None
        self.row_offsets = None


class WindowEntry:
    """One mapped batch: its range in both numberings, the token after it, and its parts."""

    __slots__ = (
        "dead_letters",
        "front",
        "front_before",
        "ingested_us",
        "input_begin",
        "input_end",
        "life",
        "parts",
        "pointer_count",
        "shuffle_begin",
        "shuffle_end",
        "token_after",
    )

    def __init__(
        self,
        input_begin: InputIndex,
        input_end: InputIndex,
        shuffle_begin: ShuffleIndex,
        shuffle_end: ShuffleIndex,
        token_after: Token,
        dead_letters: pa.Table | None = None,
        ingested_us: int = 0,
        front_before: int | None = None,
        front: int | None = None,
    ) -> None:
        self.life = Life.HELD
        self.input_begin = input_begin
        self.input_end = input_end
        self.shuffle_begin = shuffle_begin
        self.shuffle_end = shuffle_end
        self.token_after = token_after
        self.dead_letters = dead_letters
        """Input rows that ``map`` refused, to be set aside in the transaction that advances the state past them."""
        self.ingested_us = ingested_us
        """The time at which this instance ingested the batch, in microseconds since 1970, UTC."""
        self.front_before = front_before
        """The mapper's clock at the begin of the entry: no row from there on is below this. None if there is no
        clock."""
        self.front = front
        """The mapper's clock at the end of the entry: no row after it is below this. None if there is no clock."""
        self.parts: dict[ReducerIndex, EntryPart] = {}
        """The parts that still hold rows, by reducer."""
        self.pointer_count = 0
        """The bucket pointer count: the number of buckets whose first uncommitted row is in this entry."""

    def add_part(self, reducer_index: ReducerIndex, batch: pa.RecordBatch, row_offsets: RowOffsets) -> EntryPart:
        part = EntryPart(self, reducer_index, batch, row_offsets)
        self.parts[reducer_index] = part
        return part

    def happens(self, event: str) -> None:
        """Move the entry to its next state (``entry_life``); an event that the table does not allow is a bug."""
        self.life = after(self.life, event)

    @property
    def overhead_bytes(self) -> int:
        dead_letter_bytes = 0 if self.dead_letters is None else int(self.dead_letters.get_total_buffer_size())
        return ENTRY_OVERHEAD_BYTES + dead_letter_bytes

    @property
    def nbytes(self) -> int:
        return self.overhead_bytes + sum(part.nbytes for part in self.parts.values())

    @property
    def is_bare(self) -> bool:
        """Whether the entry has nothing but positions: all rows were filtered away, or committed before they were
        mapped again."""
        return not self.parts and self.dead_letters is None


@dataclass(frozen=True, slots=True)
class WindowSize:
    """What the window holds at one time."""

    entries: int
    rows: int
    nbytes: int


class Window:
    """The mapper's queue of entries."""

    def __init__(self) -> None:
        self._entries: deque[WindowEntry] = deque()
        self.first_entry_index = 0
        """The absolute index, within the life of this instance, of the entry at the front."""
        self.nbytes = 0
        self.rows = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Sequence[WindowEntry]:
        return self._entries

    def push(self, entry: WindowEntry) -> None:
        if self._entries:
            last = self._entries[-1]
            assert (last.input_end, last.shuffle_end) == (entry.input_begin, entry.shuffle_begin)
            if entry.is_bare:
                # It has nothing to wait for but the entry before it, so its range is added to that one. Without this, a
                # stretch of rows that are all filtered away would fill the window with entries without rows.
                last.input_end, last.shuffle_end = entry.input_end, entry.shuffle_end
                last.token_after = entry.token_after
                last.front = entry.front
                return
        if not entry.parts:
            entry.happens(COMMIT)
        self._entries.append(entry)
        self.nbytes += entry.nbytes
        self.rows += sum(part.rows for part in entry.parts.values())

    def commit(self, part: EntryPart, row_index: int) -> int:
        """The rows of ``part`` up to ``row_index`` are committed: free it if none is left. Returns how many rows were
        newly committed."""
        return self._free_up_to(part, row_index, COMMIT)

    def spill(self, part: EntryPart) -> int:
        """Free ``part``, whose rows are in the spill now. Returns how many they were."""
        return self._free_up_to(part, part.last_row_index, SPILL)

    def _free_up_to(self, part: EntryPart, row_index: int, event: str) -> int:
        rows = part.commit(row_index)
        self.rows -= rows
        if part.is_committed:
            entry = part.entry
            self.nbytes -= part.nbytes
            del entry.parts[part.reducer_index]
            part.free()
            if not entry.parts:
                entry.happens(event)
        return rows

    def front_at(self, row_index: int) -> int | None:
        """The mapper's clock behind the last entry that ends at ``row_index`` or before it."""
        at = bisect_right(self._entries, row_index + 1, key=attrgetter("shuffle_end"))
        return self._entries[at - 1].front if at else self._entries[0].front_before

    def retire_front(self) -> list[WindowEntry]:
        """TrimWindowEntries: retire the entries at the front that no bucket points to, and return them.

        An uncommitted row in the entry at the front is the first of its bucket, so a count of 0 there means that there
        is none.
        """
        retired = []
        while self._entries and self._entries[0].pointer_count == 0:
            entry = self._entries.popleft()
            assert not entry.parts
            entry.happens(RETIRE)
            self.first_entry_index += 1
            self.nbytes -= entry.overhead_bytes
            retired.append(entry)
        return retired

    def size(self) -> WindowSize:
        return WindowSize(len(self._entries), self.rows, self.nbytes)
