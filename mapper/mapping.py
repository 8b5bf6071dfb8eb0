"""The map stage: calls the user's map, checks its result, and cuts it into one Arrow batch per reducer.

A row that makes ``map`` raise is found by bisecting the batch. With ``on_error: stop`` the mapper stops, and the error
names the row's position; with ``on_error: dead_letter`` the row becomes a dead letter, and the result is that of the
batch without it. Since ``map`` is deterministic row by row, the same rows are found when the input is mapped again,
whatever the batches then are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from shuffle.api import Mapper, PartitionedRowset, WorkerSpec
from shuffle.errors import UserCodeError
from shuffle.formats.base import Decoded
from shuffle.ids import InputIndex, ReducerIndex
from shuffle.mapper.window import MappedBatch, MappedPart
from shuffle.partition import check_partition_indexes, split_by_partition
from shuffle.spec.config import OnError
from shuffle.user_code.poison import dead_letters, is_transient, locate_poison, raised_at, reason_of, split_rows

SLACK_BYTES = 64 * 1024
"""The bytes by which the buffers of a part may exceed its rows before the rows are copied. Buffers of up to twice the
size of the rows are kept, too."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows of one call of ``map``."""

    rows: pa.Table
    begin: InputIndex
    """The index of the first row of the input that they are made of."""
    count: int
    """The number of rows of the input that they are made of."""
    values: np.ndarray[Any, np.dtype[np.int64]] | None = None
    """For each row the offset of its input row from ``begin``; None if row i is input row i."""

    def position(self, row: int) -> int:
        """The index of the input row that a row is made of."""
        return int(self.begin) + (row if self.values is None else int(self.values[row]))


@dataclass(slots=True)
class MapStage:
    """Calls ``Mapper.map``, with everything that is done around it."""

    mapper: Mapper
    spec: WorkerSpec
    on_error: OnError = "stop"
    schema: pa.Schema | None = None
    """The schema of the rows that ``map`` returns. The first batch fixes it; before that it is None."""
    decode: Callable[[pa.Table], Decoded] | None = None
    """Makes the rows for ``map`` of the rows of the input; None if they are the same."""

    def apply(self, rows: pa.Table, input_begin: InputIndex, rows_max: int | None = None) -> MappedBatch:
        """Map ``rows``, whose first has ``input_begin`` in the input numbering, at most ``rows_max`` in one call.

        What the calls return becomes one mapped batch: cutting it, and all that follows, is done once for all of them.
        """
        step = rows.num_rows if rows_max is None else min(rows.num_rows, rows_max)
        mapped_rows: list[pa.Table] = []
        indexes: list[np.ndarray[Any, Any]] = []
        refused: list[pa.Table] = []
        for begin in range(0, max(rows.num_rows, 1), max(step, 1)):
            given = rows if step == rows.num_rows else rows.slice(begin, step)
            piece, undecoded = self._decoded(given, InputIndex(input_begin + begin))
            result, dead = self._map(piece)
            mapped_rows.append(self._check_schema(plain(result.rows)))
            indexes.append(result.partition_indexes)
            refused += [letters for letters in (undecoded, dead) if letters is not None]
            if self.schema is None:
                self.schema = mapped_rows[0].schema
            del result
        mapped = mapped_rows[0] if len(mapped_rows) == 1 else pa.concat_tables(mapped_rows)
        all_indexes = indexes[0] if len(indexes) == 1 else np.concatenate(indexes)
        parts = cut(mapped, all_indexes, self.spec.reducer_count)
        assert self.schema is not None
        return MappedBatch(self.schema, mapped.num_rows, parts, pa.concat_tables(refused) if refused else None)

    def _decoded(self, rows: pa.Table, begin: InputIndex) -> tuple[_Piece, pa.Table | None]:
        """The rows for one call of ``map``, and the rows of the input that cannot be decoded as dead letters."""
        if self.decode is None:
            return _Piece(rows, begin, rows.num_rows), None
        decoded = self.decode(rows)
        piece = _Piece(decoded.rows, begin, rows.num_rows, decoded.values)
        if not decoded.bad:
            return piece, None
        first = decoded.bad[0]
        if self.on_error == "stop":
            raise UserCodeError(
                f"{self._who}: input row {begin + first.index}: {first.reason}. Correct the input or its format in the "
                "spec, or set mapper.on_error to dead_letter to set such rows aside",
                processor=self.spec.processor,
                role="mapper",
                worker=self.spec.index,
                input_begin_row_index=int(begin) + first.index,
                input_end_row_index=int(begin) + first.index + 1,
                reason=first.reason,
            )
        return piece, self._dead_letters(
            [begin + one.index for one in decoded.bad],
            [one.reason for one in decoded.bad],
            rows.take([one.index for one in decoded.bad]),
        )

    def _dead_letters(self, positions: list[int], reasons: list[str], rows: pa.Table) -> pa.Table:
        return dead_letters(
            processor=self.spec.processor,
            role="mapper",
            worker=self.spec.index,
            mappers=[self.spec.index] * len(positions),
            positions=positions,
            reasons=reasons,
            rows=rows,
        )

    def _map(self, piece: _Piece) -> tuple[PartitionedRowset, pa.Table | None]:
        """One call of ``map``: its result, and the rows it refuses as dead letters."""
        refused: pa.Table | None = None
        try:
            result = self._call(piece.rows)
        except Exception as error:
            if is_transient(error):
                raise
            result, refused = self._without_poison(piece, error)
        # A mistake that is found from here on does not depend on the rows, so no row is made a dead letter for it.
        if not isinstance(result, PartitionedRowset):
            raise UserCodeError(
                f"{self._who}: {self._class}.map must return a PartitionedRowset, not {type(result).__name__}"
            )
        return result, refused

    def _call(self, rows: pa.Table) -> PartitionedRowset:
        """Call the user's code, and check what a single row of its result can have wrong."""
        result = self.mapper.map(rows)
        if isinstance(result, PartitionedRowset):
            check_partition_indexes(result.partition_indexes, self.spec.reducer_count, f"{self._class}.map")
        return result

    def _check_schema(self, rows: pa.Table) -> pa.Table:
        if self.schema is None or rows.schema.equals(self.schema, check_metadata=True):
            return rows
        if rows.schema.names == self.schema.names and rows.schema.types == self.schema.types:
            return pa.table(rows.columns, schema=self.schema)  # Only metadata or nullability differ.
        changes = [
            f"{name}: {_type_of(self.schema, name)} before, {_type_of(rows.schema, name)} now"
            for name in dict.fromkeys([*self.schema.names, *rows.schema.names])
            if _type_of(self.schema, name) != _type_of(rows.schema, name)
        ] or [f"the order of the columns was {self.schema.names} and is {rows.schema.names}"]
        raise UserCodeError(
            f"{self._who}: {self._class}.map returned rows of another schema than before ({'; '.join(changes)}). "
            "Its schema must not depend on the rows: build the table with an explicit schema"
        )

    def _without_poison(self, piece: _Piece, error: Exception) -> tuple[PartitionedRowset, pa.Table | None]:
        """The result of the rows that can be mapped, and the others as dead letters."""

        def attempt(part: pa.Table) -> None:
            self._call(part)

        try:
            poison_rows = locate_poison(piece.rows, attempt)
        except UserCodeError as broken:
            raise self._error(broken.message, piece.begin, piece.count, error) from error
        if not poison_rows:
            raise self._error(
                f"the batch failed once and then did not ({reason_of(error)}): map is not deterministic",
                piece.begin,
                piece.count,
                error,
            ) from error
        positions = [piece.position(poison.row) for poison in poison_rows]
        if self.on_error == "stop":
            raise self._error(poison_rows[0].reason, InputIndex(positions[0]), 1, error) from error
        good, bad = split_rows(piece.rows, [poison.row for poison in poison_rows])
        refused = self._dead_letters(positions, [poison.reason for poison in poison_rows], bad)
        try:
            return self._call(good), refused
        except Exception as again:
            if is_transient(again):
                raise
            raise self._error(
                f"the batch fails even without the {len(poison_rows)} rows that fail alone: {reason_of(again)}",
                piece.begin,
                piece.count,
                again,
            ) from again

    def _error(self, what: str, begin: InputIndex, rows: int, error: Exception) -> UserCodeError:
        where = f"input row {begin}" if rows == 1 else f"input rows {begin} to {begin + rows - 1}"
        return UserCodeError(
            f"{self._who}: {self._class}.map failed at {where}: {what}{raised_at(error)}. "
            "Correct the class or the input, or set mapper.on_error to dead_letter to set such rows aside",
            processor=self.spec.processor,
            role="mapper",
            worker=self.spec.index,
            input_begin_row_index=int(begin),
            input_end_row_index=int(begin) + rows,
            exception=type(error).__name__,
            reason=reason_of(error),
        )

    @property
    def _who(self) -> str:
        return f"{self.spec.processor}: mapper {self.spec.index}"

    @property
    def _class(self) -> str:
        return type(self.mapper).__qualname__


def cut(mapped: pa.Table, partition_indexes: np.ndarray[Any, Any], reducer_count: int) -> list[MappedPart]:
    """One Arrow batch for each reducer that has rows, each with memory of its own."""
    parts = []
    for reducer, (rows, row_offsets) in enumerate(split_by_partition(mapped, partition_indexes, reducer_count)):
        if rows is not None and rows.num_rows:
            parts.append(
                MappedPart(ReducerIndex(reducer), own(rows), np.ascontiguousarray(row_offsets, dtype=np.uint32))
            )
    return parts


def own(rows: pa.RecordBatch) -> pa.RecordBatch:
    """``rows`` in buffers that hold little else.

    A slice of a larger batch would keep all of it alive: the part of one slow reducer would hold everybody's rows.
    """
    held_bytes = rows.get_total_buffer_size()
    if held_bytes <= SLACK_BYTES:  # Whatever the rows have of it; to find that out takes 15 µs.
        return rows
    rows_bytes = rows.nbytes
    if held_bytes <= max(2 * rows_bytes, rows_bytes + SLACK_BYTES):
        return rows
    return rows.take(pa.array(np.arange(rows.num_rows, dtype=np.int64)))


def plain(rows: pa.Table) -> pa.Table:
    """``rows`` with dictionary columns and views decoded. Each batch would have a dictionary of its own, and neither
    the wire nor the reducer gains from them; and Arrow cannot gather views."""
    for column, field in enumerate(rows.schema):
        data_type = _plain_type(field.type)
        if data_type != field.type:
            rows = rows.set_column(column, field.with_type(data_type), rows.column(column).cast(data_type))
    return rows


def _plain_type(data_type: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(data_type):
        return _plain_type(data_type.value_type)
    if pa.types.is_string_view(data_type):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(data_type) else data_type


def _type_of(schema: pa.Schema, name: str) -> str:
    column = schema.get_field_index(name)
    return str(schema.field(column).type) if column >= 0 else "missing"
