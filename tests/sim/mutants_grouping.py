"""Planted bugs of mappers that read several partitions. Every function here is one; see ``mutants``.

They are searched for with the profile ``partitions``.
"""

from __future__ import annotations

from typing import Any

from shuffle.durable.read_order import ReadOrder as _ReadOrder
from shuffle.errors import CommitUnknown as _CommitUnknown
from shuffle.mapper.readers.grouped import GroupedInput as _Input
from shuffle.mapper.readers.grouped import GroupedReader as _Reader
from shuffle.mapper.readers.grouped import GroupToken as _Token
from shuffle.mapper.readers.queue import QueueInput as _QueueInput
from shuffle.statestore.client.transaction import Transaction as _Transaction


def entries_not_written(patch: Any) -> None:
    """Rows are exposed in an order that only this instance knows."""
    patch(_ReadOrder, "append", lambda self, number, entry: True)


def rows_returned_before_their_entry(patch: Any) -> None:
    """The entry is written with the next read: a crash between the two forgets the order."""
    original = _ReadOrder.append

    def append(self: Any, number: int, entry: Any) -> bool:
        late = self.__dict__.pop("late", None)
        if late is not None and not original(self, *late):
            return False
        self.late = number, entry
        return True

    patch(_ReadOrder, "append", append)


def entry_of_another_instance_overwritten(patch: Any) -> None:
    patch(_Transaction, "expect_absent", lambda self, table, keys: None)


def entry_of_another_instance_taken_for_ours(patch: Any) -> None:
    original = _ReadOrder.append

    def append(self: Any, number: int, entry: Any) -> bool:
        original(self, number, entry)
        return True

    patch(_ReadOrder, "append", append)


def unknown_entry_taken_for_written(patch: Any) -> None:
    original = _Transaction.commit

    def commit(self: Any) -> Any:
        try:
            return original(self)
        except _CommitUnknown:
            if [table.schema.name for table in self._tables.values()] == ["job/reads"] and self._request.preconditions:
                return None
            raise

    patch(_Transaction, "commit", commit)


def entries_not_loaded_after_a_restart(patch: Any) -> None:
    """An instance that starts again advances at once, and writes its entries behind those that are there."""

    def entry(self: Any, number: int) -> Any:
        return self._entries.get(number)

    def append(self: Any, number: int, entry: Any) -> bool:
        while not original(self, number + self.__dict__.setdefault("behind", 0), entry):
            self.behind += 1
            if self.behind > 100:
                return False
        return True

    original = _ReadOrder.append
    patch(_Reader, "_entry", entry)
    patch(_ReadOrder, "append", append)


def last_entry_deleted_too(patch: Any) -> None:
    original = _ReadOrder.trim
    patch(_ReadOrder, "trim", lambda self, number: original(self, number + 1))


def entries_deleted_before_the_state_is_persisted(patch: Any) -> None:
    """Each read deletes the entries before it: those of rows that nobody has committed."""
    original = _Reader._remember

    def remember(self: Any, number: int, entry: Any) -> None:
        original(self, number, entry)
        self._order.trim(number)

    patch(_Reader, "_remember", remember)


def rows_of_an_entry_counted_from_its_begin_again(patch: Any) -> None:
    original = _Reader._catch_up

    def catch_up(self: Any, at: Any, entry: Any, rows_max: int) -> Any:
        batches, after = original(self, at, entry, rows_max)
        return batches, after._replace(rows_done=0)

    patch(_Reader, "_catch_up", catch_up)


def entry_read_again_in_the_order_of_partitions(patch: Any) -> None:
    original = _Reader._catch_up

    def catch_up(self: Any, at: Any, entry: Any, rows_max: int) -> Any:
        return original(self, at, tuple(sorted(entry)), rows_max)

    patch(_Reader, "_catch_up", catch_up)


def rest_of_an_entry_given_up(patch: Any) -> None:
    """What an entry has beyond the rows that were requested is left out."""
    original = _Reader._catch_up

    def catch_up(self: Any, at: Any, entry: Any, rows_max: int) -> Any:
        batches, after = original(self, at, entry, rows_max)
        return batches, _Token(at.entry + 1, 0, after.tokens) if batches else after

    patch(_Reader, "_catch_up", catch_up)


def tokens_moved_though_the_entry_is_not_ours(patch: Any) -> None:
    """After a conflict the rows that were read count as read, and nobody has returned them."""
    original = _Reader._advance

    def advance(self: Any, at: Any, rows_max: int) -> Any:
        tokens = list(at.tokens)
        read_one = self._read_one

        def noted(place: int, *rest: Any) -> Any:
            rows, tokens[place] = read_one(place, *rest)
            return rows, tokens[place]

        self._read_one = noted
        try:
            found = original(self, at, rows_max)
        finally:
            del self._read_one
        return ([], at._replace(tokens=tuple(tokens))) if found is None else found

    patch(_Reader, "_advance", advance)


def groups_made_anew_when_the_input_grows(patch: Any) -> None:
    """A group that had room gets the partitions after it, and all others move."""
    patch(_Input, "_known", lambda self: [])


def groups_known_from_the_first_start_only(patch: Any) -> None:
    """Which groups came later is taken from the input, and not from the store."""
    original = _Input._known
    patch(_Input, "_known", lambda self: original(self)[:1])


def last_group_filled_up_with_new_partitions(patch: Any) -> None:
    """As soon as the input has them, and before that is persisted."""
    original = _Input._group

    def group(self: Any, mapper: int) -> range:
        found, known = original(self, mapper), self._known()
        if mapper + 1 != len(known):
            return found
        return range(found.start, min(found.start + self._per_mapper, self._inner.partition_count()))

    patch(_Input, "_group", group)


def partitions_trimmed_to_their_ends(patch: Any) -> None:
    """Whatever was read of a partition, all that is there now is deleted with it."""
    original = _QueueInput.trim

    def trim(self: Any, tokens: Any) -> bool:
        ends = self.ends()
        return original(self, {partition: ends[partition] for partition in tokens})

    patch(_QueueInput, "trim", trim)
