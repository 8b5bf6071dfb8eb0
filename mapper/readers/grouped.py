"""Several partitions of an input as one: what one mapper reads (``mapper.partitions_per_mapper``).

Rows of different partitions have no order of their own, and a mapper needs one that is the same whenever it reads them
again. So the order is made durable (``ReadOrder``) before the rows are returned:

- *advancing*: read from whichever partitions have rows, write down how many came from each, and return them;
- *catching up*: an entry is there already, of this instance before a restart or of another one. Read the same numbers
  of rows from the same partitions, and return them in the same order.

Whether an instance advances or catches up follows from whether there is an entry, not from what it remembers. Of two
instances that advance at the same time one writes the entry; the other finds it there, and catches up.

A token names the next entry, the rows of it that are already read, and the token of every partition.

Which partitions are a group is settled when the processor first knows of them, and never changes: entries and tokens of
a group name partitions by their place in it. An input that gets more partitions gets more groups, of the new partitions
alone, even if the last group before them has room. Where each group ends is persisted with the numbers of the
partitions (``Input.partitions``), in the transaction that lets mappers know of them.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from shuffle.durable.read_order import Entry, ReadBatch, ReadOrder
from shuffle.errors import BadInput, OutOfRange, SpecError
from shuffle.formats.base import BadValue, Decoded
from shuffle.ids import MapperIndex, Token
from shuffle.limits import TOKEN_BYTES_MAX
from shuffle.mapper.reader import Input, PartitionReader

POLL_S = 0.05
"""The seconds after which partitions that had no rows are looked at again."""

PLACE = "_place_in_group"
"""The column that rows have until they are decoded, if that is for the readers to do: which of them has read each."""

ENTRIES_LOADED_MAX = 1_000
"""The most entries that are loaded at once."""

ENTRIES_KEPT = 100
"""The number of entries that are remembered behind the one that is read: a mapper that stops before a bad row reads the
last ones again."""

_HEAD = struct.Struct("<QQH")
_LENGTH = struct.Struct("<H")
_KNOWN = "groups "
"""How the persisted numbers of grouped partitions begin."""


class GroupToken(NamedTuple):
    """What is in a token of a group of partitions."""

    entry: int
    """The number of the entry whose rows come next."""
    rows_done: int
    """The number of its rows that were returned already."""
    tokens: tuple[Token, ...]
    """The token of each partition, in the order of the group."""

    def encode(self) -> Token:
        parts = [_HEAD.pack(self.entry, self.rows_done, len(self.tokens))]
        for token in self.tokens:
            parts += [_LENGTH.pack(len(token)), token]
        encoded = b"".join(parts)
        if len(encoded) > TOKEN_BYTES_MAX:
            raise SpecError(
                f"the positions of {len(self.tokens)} partitions have {len(encoded)} bytes, more than the"
                f" {TOKEN_BYTES_MAX} of a token: set a smaller mapper.partitions_per_mapper",
                field="mapper.partitions_per_mapper",
            )
        return Token(encoded)

    @staticmethod
    def decode(encoded: Token, partitions: int) -> GroupToken:
        try:
            entry, rows_done, count = _HEAD.unpack_from(encoded)
            tokens, at = [], _HEAD.size
            for _ in range(count):
                (length,) = _LENGTH.unpack_from(encoded, at)
                at += _LENGTH.size + length
                tokens.append(Token(encoded[at - length : at]))
        except struct.error:
            raise BadInput(_not_a_token(encoded)) from None
        if at != len(encoded) or count != partitions:
            raise BadInput(_not_a_token(encoded))
        return GroupToken(entry, rows_done, tuple(tokens))


def _not_a_token(encoded: Token) -> str:
    return f"a token of {len(encoded)} bytes is not that of a group of partitions: was the input changed?"


class GroupedReader(PartitionReader):
    """The partitions of one mapper, in the order of their entries (see the module's text)."""

    def __init__(
        self,
        readers: Sequence[PartitionReader],
        order: ReadOrder | None,
        with_rows: Callable[[Sequence[Token]], Sequence[int]],
        trim_all: Callable[[Mapping[int, Token]], bool] = lambda tokens: False,
        lag_rows: Callable[[Sequence[Token]], int | None] = lambda tokens: None,
    ) -> None:
        """``order`` is None for a reader that only looks, and leaves no entry. ``with_rows`` returns the places of the
        readers that may have rows after their tokens. ``trim_all`` trims several partitions at once, by their places;
        False if it cannot."""
        self._readers = list(readers)
        self._order = order
        self._with_rows = with_rows
        self._trim_all = trim_all
        self._lag_rows = lag_rows
        self._entries: dict[int, Entry] = {}
        self._end: int | None = None
        """The number of the entry that is to be written next, as far as is known; None if it has to be looked up."""
        self._first = 0
        """The place of the reader that is asked first, so that none starves."""
        self._trimmed: tuple[Token, ...] = ()
        self._interrupted = threading.Event()
        self.closes: Input | None = None
        """The input to close together with this reader, if nobody else closes it."""
        schemas = [reader.schema for reader in self._readers]
        for place, schema in enumerate(schemas):
            if not schema.equals(schemas[0]):
                raise SpecError(
                    f"the partitions of one mapper have different schemas: {schemas[0].names} and {schema.names}"
                    f" (number {place} of them): set mapper.partitions_per_mapper to 1",
                    field="mapper.partitions_per_mapper",
                )
        self._schema = schemas[0]
        self._decodes = any(type(reader).decode is not PartitionReader.decode for reader in self._readers)

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def start(self) -> Token:
        return GroupToken(0, 0, tuple(reader.start() for reader in self._readers)).encode()

    def read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        rows_max = max(1, end_row_index - begin_row_index)
        deadline_s = time.monotonic() + self.wait_ms / 1000
        at = GroupToken.decode(token or self.start(), len(self._readers))
        while True:
            entry = self._entry(at.entry)
            found = self._catch_up(at, entry, rows_max) if entry else self._advance(at, rows_max)
            if found is None:
                continue  # Another instance was faster: its entry is there now.
            batches, after = found
            left_s = deadline_s - time.monotonic()
            if batches or after != at or left_s <= 0 or self._interrupted.wait(min(left_s, POLL_S)):
                return pa.concat_tables(batches) if batches else self._schema.empty_table(), after.encode()

    def _entry(self, number: int) -> Entry | None:
        """The entry of this number; None if it is still to be written."""
        if number in self._entries or self._order is None:
            return self._entries.get(number)
        if self._end == number:
            return None
        loaded = self._order.load(number, ENTRIES_LOADED_MAX)
        if loaded and number not in loaded:
            raise OutOfRange(
                f"entry {number} of this mapper's reads was deleted, and there are some from {min(loaded)} on: another"
                " instance has processed them"
            )
        self._entries.update(loaded)
        self._end = max(loaded, default=number - 1) + 1 if len(loaded) < ENTRIES_LOADED_MAX else None
        return loaded.get(number)

    def _catch_up(self, at: GroupToken, entry: Entry, rows_max: int) -> tuple[list[pa.Table], GroupToken]:
        """The rows of an entry that come next, as far as they are there and ``rows_max`` allows."""
        tokens, rows_done = list(at.tokens), at.rows_done
        batches: list[pa.Table] = []
        passed = 0
        for partition, count in entry:
            passed += count
            while rows_done < passed and rows_max > 0:
                rows, after = self._read_one(partition, min(passed - rows_done, rows_max), tokens[partition])
                if not rows.num_rows and after == tokens[partition]:
                    # They were there once. Whatever keeps them away now, no other row may take their place.
                    return batches, GroupToken(at.entry, rows_done, tuple(tokens))
                tokens[partition] = after
                if rows.num_rows:
                    batches.append(rows)
                    rows_done, rows_max = rows_done + rows.num_rows, rows_max - rows.num_rows
        if rows_done < passed:
            return batches, GroupToken(at.entry, rows_done, tuple(tokens))
        return batches, GroupToken(at.entry + 1, 0, tuple(tokens))

    def _advance(self, at: GroupToken, rows_max: int) -> tuple[list[pa.Table], GroupToken] | None:
        """Rows of whichever partitions have some, once their entry is durable; None if it is not known to be."""
        tokens = list(at.tokens)
        batches: list[pa.Table] = []
        entry: list[ReadBatch] = []
        bytes_left = self.batch_bytes_max
        for place in sorted(self._with_rows(at.tokens), key=lambda place: (place - self._first) % len(self._readers)):
            if rows_max <= 0 or bytes_left <= 0:
                break
            rows, tokens[place] = self._read_one(place, rows_max, tokens[place], bytes_left)
            self._first = (place + 1) % len(self._readers)
            if rows.num_rows:
                batches.append(rows)
                entry.append(ReadBatch(place, rows.num_rows))
                rows_max, bytes_left = rows_max - rows.num_rows, bytes_left - rows.nbytes
        if not entry:
            return [], at._replace(tokens=tuple(tokens))  # Gaps need no entry: whoever reads again passes them again.
        if self._order is not None and not self._order.append(at.entry, tuple(entry)):
            self._end = None
            return None
        self._remember(at.entry, tuple(entry))
        return batches, GroupToken(at.entry + 1, 0, tuple(tokens))

    def _remember(self, number: int, entry: Entry) -> None:
        self._entries[number] = entry
        self._end = number + 1
        for old in [known for known in self._entries if known < number - ENTRIES_KEPT]:
            del self._entries[old]

    def _read_one(
        self, place: int, rows_max: int, token: Token, bytes_max: int | None = None
    ) -> tuple[pa.Table, Token]:
        reader = self._readers[place]
        reader.wait_ms, reader.batch_bytes_max = 0, bytes_max or self.batch_bytes_max
        rows, after = reader.read(0, rows_max, token)
        if self._decodes and rows.num_rows:
            rows = rows.append_column(PLACE, pa.repeat(pa.scalar(place, pa.int32()), rows.num_rows))
        return rows, after

    def decode(self, rows: pa.Table) -> Decoded:
        """What the reader of each row makes of it: only that one knows its partition, which an error names."""
        if PLACE not in rows.column_names:
            return Decoded(rows)
        places = rows[PLACE].to_numpy()
        begins = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]
        tables: list[pa.Table] = []
        bad: list[BadValue] = []
        values: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        are_the_same = True
        for begin, end in pairwise(begins):
            part = rows.slice(begin, end - begin).drop_columns([PLACE])
            decoded = self._readers[places[begin]].decode(part)
            tables.append(decoded.rows)
            bad += [BadValue(begin + one.index, one.reason) for one in decoded.bad]
            of_part = np.arange(decoded.rows.num_rows) if decoded.values is None else decoded.values
            values.append(of_part + begin)
            are_the_same = are_the_same and decoded.values is None and decoded.rows.num_rows == part.num_rows
        return Decoded(pa.concat_tables(tables), bad, None if are_the_same else np.concatenate(values))

    def trim(self, row_index: int, token: Token) -> None:
        if not token:
            return
        at = GroupToken.decode(token, len(self._readers))
        before = self._trimmed or (None,) * len(at.tokens)
        moved = {place: now for place, (was, now) in enumerate(zip(before, at.tokens, strict=True)) if was != now}
        if moved and not self._trim_all(moved):
            for place, position in moved.items():
                self._readers[place].trim(row_index, position)
        self._trimmed = at.tokens
        if self._order is not None:
            self._order.trim(at.entry)

    def lag_rows(self, token: Token) -> int | None:
        return self._lag_rows(GroupToken.decode(token, len(self._readers)).tokens) if token else None

    def interrupt(self) -> None:
        self._interrupted.set()
        for reader in self._readers:
            reader.interrupt()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        if self.closes is not None:
            self.closes.close()


def fitting(known: str | None, in_groups: bool) -> str | None:
    """``known``, unless it was persisted when partitions were read the other way, in groups or one by one. Whether that
    may be changed is for the fingerprint to say; the numbers are of no use then."""
    return known if known is not None and known.startswith(_KNOWN) == in_groups else None


def grouped(known: Sequence[range], partitions: int, per_mapper: int) -> list[range]:
    """The groups of an input with so many partitions: those that are known, as they are, and new ones after them."""
    begin = known[-1].stop if known else 0
    starts = range(begin, partitions, per_mapper)
    return [*known, *(range(start, min(start + per_mapper, partitions)) for start in starts)]


class GroupedInput(Input):
    """An input whose partitions are read in groups: to everybody else each group is a partition."""

    def __init__(self, inner: Input, partitions_per_mapper: int, processor: str) -> None:
        super().__init__(inner.config, inner.state, inner.folder)
        self._inner = inner
        self._per_mapper = partitions_per_mapper
        self._processor = processor
        self._fixed: list[range] | None = None
        """The groups of an input that never gets more partitions, once they are known."""
        self.consumes = inner.consumes

    def _known(self) -> list[range]:
        """The groups that are persisted. The inner input gets to know what it has persisted itself."""
        if self.known_partitions is None:
            self._inner.known_partitions = None
            return []
        known = json.loads(self.known_partitions.removeprefix(_KNOWN))
        self._inner.known_partitions = known["partitions"]
        return [range(begin, end) for begin, end in pairwise([0, *known["group_ends"]])]

    def _groups(self) -> list[range]:
        """All groups. What is new is not settled before it is persisted."""
        known = self._known()
        if self._fixed is not None:
            return self._fixed
        groups = grouped(known, self._inner.partition_count(), self._per_mapper)
        if not known and self._inner.partitions() is None:
            self._fixed = groups
        return groups

    def partition_count(self) -> int:
        return len(self._groups())

    def partitions(self) -> str | None:
        known = self._known()
        inner = self._inner.partitions()
        if inner is None:
            return None
        groups = grouped(known, self._inner.partition_count(), self._per_mapper)
        return _KNOWN + json.dumps({"group_ends": [group.stop for group in groups], "partitions": inner})

    def _group(self, mapper: int) -> range:
        """The partitions that a mapper reads. What is known is enough while the input cannot be asked."""
        known = self._known()
        return known[mapper] if mapper < len(known) else self._groups()[mapper]

    def open(self, partition: int) -> PartitionReader:
        return self._open(partition, ReadOrder(self.state, self._processor, MapperIndex(partition)))

    def open_to_look(self, partition: int) -> PartitionReader:
        return self._open(partition, None)

    def _open(self, mapper: int, order: ReadOrder | None) -> PartitionReader:
        group = self._group(mapper)

        def with_rows(tokens: Sequence[Token]) -> Sequence[int]:
            ends = self._inner.ends()
            if ends is None:
                return range(len(group))
            return [
                place
                for place, (partition, token) in enumerate(zip(group, tokens, strict=True))
                if partition in ends and not self._inner.reached(partition, token, ends[partition])
            ]

        def trim_all(tokens: Mapping[int, Token]) -> bool:
            return self._inner.trim({group[place]: token for place, token in tokens.items()})

        def lag_rows(tokens: Sequence[Token]) -> int | None:
            left = self._inner.rows_left(dict(zip(group, tokens, strict=True)))
            return sum(left[partition] for partition in group if partition in left) if left else None

        readers = [self._inner.open(partition) for partition in group]
        return GroupedReader(readers, order, with_rows, trim_all, lag_rows)

    def describe(self) -> str:
        groups = self._groups()
        if self._fixed is None:
            return f"groups of {self._per_mapper} partitions, {self._inner.describe()}"
        # With another number of partitions they could be in other groups, whose reads nobody has written down.
        return f"groups of {self._per_mapper} of its {groups[-1].stop} partitions, {self._inner.describe()}"

    def ends(self) -> Mapping[int, Token] | None:
        ends = self._inner.ends()
        if ends is None:
            return None
        nothing = Token(b"")
        tokens = [tuple(ends.get(one, nothing) for one in group) for group in self._groups()]
        return {mapper: GroupToken(0, 0, of_mapper).encode() for mapper, of_mapper in enumerate(tokens)}

    def reached(self, partition: int, token: Token, end: Token | None) -> bool:
        group = self._group(partition)
        empty = (Token(b""),) * len(group)
        tokens = GroupToken.decode(token, len(group)).tokens if token else empty
        ends = GroupToken.decode(end, len(group)).tokens if end is not None else None
        for place, one in enumerate(group):
            if ends is not None and not ends[place]:
                continue  # An empty partition.
            if not self._inner.reached(one, tokens[place], ends[place] if ends is not None else None):
                return False
        return True

    def rows_left(self, tokens: Mapping[int, Token]) -> Mapping[int, int]:
        by_partition: dict[int, Token] = {}
        groups = self._groups()
        for mapper, token in tokens.items():
            group = groups[mapper]
            if token:
                by_partition |= dict(zip(group, GroupToken.decode(token, len(group)).tokens, strict=True))
        left = self._inner.rows_left(by_partition)
        counts = {
            mapper: [left[partition] for partition in group if partition in left] for mapper, group in enumerate(groups)
        }
        return {mapper: sum(of_mapper) for mapper, of_mapper in counts.items() if of_mapper}

    def check_start(self, started: Callable[[], Mapping[int, Token]]) -> None:
        def by_partition() -> dict[int, Token]:
            found: dict[int, Token] = {}
            for mapper, token in started().items():
                group = self._group(mapper)
                tokens = GroupToken.decode(token, len(group)).tokens if token else (Token(b""),) * len(group)
                found |= dict(zip(group, tokens, strict=True))
            return found

        self._inner.check_start(by_partition)

    def close(self) -> None:
        self._inner.close()
