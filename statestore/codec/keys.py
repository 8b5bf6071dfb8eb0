"""Keys as bytes that sort as their types do.

    integers, dates, timestamps   big-endian, the sign bit flipped
    decimals                      the same, 16 bytes
    floats                        big-endian; the sign bit flipped if positive, all bits if negative; -0.0 is 0.0, and
                                  there is one NaN, after everything else
    bool                          one byte
    string, binary                00 becomes 00 FF, and 00 01 ends it, so that "a" comes before "a\\0" and "a\\0b";
                                  the last column of a key is kept as it is, without a terminator

The bytes of UTF-8 sort as the code points do. Everything is computed on whole columns.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shuffle.errors import BadInput, CorruptData, SchemaMismatch, TooLarge
from shuffle.limits import KEY_BYTES_MAX
from shuffle.statestore.codec.arrow_bytes import (
    BINARY_BYTES_MAX,
    NumpyArray,
    as_binary,
    as_string,
    binary_scalar,
    data_of,
    equal_length,
    fits_precision,
    from_numpy,
    join,
    longest_of,
    offsets_of,
    pieces_at,
    records_at,
    rows_to_binary,
    storage_dtype,
    to_numpy,
)
from shuffle.statestore.codec.column_types import is_text_or_bytes
from shuffle.statestore.codec.schema import null_key

_TABLE_ID = struct.Struct(">I")

_ZERO, _ESCAPED = b"\x00", b"\x00\xff"
_END = b"\x00\x01"


class KeyCodec:
    """Encodes and decodes the keys of one table."""

    def __init__(self, table: str, schema: pa.Schema) -> None:
        self.table = table
        self.schema = schema
        self._runs = _runs(schema)

    def encode_columns(self, columns: list[pa.Array]) -> pa.Array:
        """The keys of rows whose columns are exactly those of the schema, without nulls."""
        keys = self._encode(columns)
        self._check_length(keys)
        return keys

    def decode(self, keys: pa.Array, skip_bytes: int = 0) -> list[pa.Array]:
        """The key columns encoded in ``keys``, in the order of the schema; ``skip_bytes`` of each key are skipped."""
        offsets, data = offsets_of(keys), data_of(keys)
        if len(self._runs) == 1 and isinstance(self._runs[0], _FixedRun):
            return self._decode_fixed(self._runs[0], offsets, data, skip_bytes)
        columns: list[pa.Array] = []
        position, ends = offsets[:-1] + np.int32(skip_bytes), offsets[1:]
        self._check_inside(position, ends)
        for run in self._runs:
            if isinstance(run, _FixedRun):
                after = position + np.int32(run.dtype.itemsize)
                self._check_inside(after, ends)
                columns += run.decode(records_at(data, position, run.dtype))
                position = after
            elif run.last:
                columns.append(self._text(run, pieces_at(data, position, ends)))
                position = ends
            else:
                terminators = self._terminators(data, position, ends)
                columns.append(self._text(run, _unescape(pieces_at(data, position, terminators))))
                position = terminators + np.int32(2)
        if not np.array_equal(position, ends):
            raise self._corrupt("has bytes after its last column")
        return columns

    def check(self, keys: pa.Array, skip_bytes: int) -> None:
        """Raises ``CorruptData`` unless each key is what ``encode_columns`` makes of some row, byte for byte.

        Lengths and terminators are checked for all columns. Only columns for which some bytes are no value are decoded.
        """
        offsets, data = offsets_of(keys), data_of(keys)
        position, ends = offsets[:-1] + np.int32(skip_bytes), offsets[1:]
        self._check_inside(position, ends)
        for run in self._runs:
            if isinstance(run, _FixedRun):
                after = position + np.int32(run.dtype.itemsize)
                self._check_inside(after, ends)
                if run.may_be_wrong and not run.is_canonical(records_at(data, position, run.dtype)):
                    raise self._corrupt("has a value that its column cannot have")
                position = after
            elif run.last:
                if pa.types.is_string(run.data_type):
                    self._text(run, pieces_at(data, position, ends))
                position = ends
            else:
                terminators = self._expected_terminators(run, data, position, ends)
                pieces = pieces_at(data, position, terminators)
                unescaped = _unescape(pieces)
                self._text(run, unescaped)
                if unescaped is not pieces and not _escape(unescaped).equals(pieces):
                    raise self._corrupt("has a string that is not escaped")
                position = terminators + np.int32(2)
        if not np.array_equal(position, ends):
            raise self._corrupt("has bytes after its last column")

    def encode_prefix(self, values: Mapping[str, Any] | Sequence[Any], partial: bool = False) -> bytes:
        """The bytes that all keys with these leading values begin with: a bound for a scan.

        With ``partial`` the last given value is itself only the beginning of a string or binary column.
        """
        given = self._leading(values)
        if not given:
            return b""
        columns = [self._one_value(self.schema.field(index), value) for index, value in enumerate(given)]
        last = self.schema.field(len(given) - 1)
        if not partial:
            prefix = self._encode(columns)[0].as_py()
        elif not is_text_or_bytes(last.type):
            raise BadInput(
                f"table {self.table!r}, column {last.name!r}: {last.type} has no prefixes, only string and binary do",
                table=self.table,
                column=last.name,
            )
        else:
            raw = as_binary(columns[-1])[0].as_py()
            is_last_of_key = len(given) == len(self.schema)
            before = self._encode(columns[:-1])[0].as_py() if len(columns) > 1 else b""
            prefix = before + (raw if is_last_of_key else raw.replace(_ZERO, _ESCAPED))
        if len(prefix) > KEY_BYTES_MAX:
            raise TooLarge(
                f"table {self.table!r}: a bound of {len(prefix)} bytes, more than {KEY_BYTES_MAX}",
                table=self.table,
                limit=KEY_BYTES_MAX,
            )
        return bytes(prefix)

    def prefix_range(
        self, values: Mapping[str, Any] | Sequence[Any], partial: bool = False
    ) -> tuple[bytes, bytes | None]:
        """The range (begin included, end excluded) of all keys with these leading values; no end: to the last key."""
        begin = self.encode_prefix(values, partial)
        if len(values) == len(self.schema) and not partial:
            # A whole key: its own bytes may be the beginning of another key's, when the last column is a string.
            return begin, begin + b"\x00"
        return begin, bytes_after(begin)

    def _encode(self, columns: list[pa.Array]) -> pa.Array:
        """Encodes the given leading columns; a string is terminated unless it is the last column of the whole key."""
        parts: list[Any] = []
        bytes_total = 0
        for run in self._runs:
            mine = columns[run.first : run.first + run.count]
            if not mine:
                break
            if isinstance(run, _FixedRun):
                parts.append(rows_to_binary(run.encode(mine)))
            elif run.last:
                parts.append(as_binary(mine[0]))
            else:
                parts += [_escape(as_binary(mine[0])), binary_scalar(_END)]
            bytes_total += _bytes_in(parts)
        if bytes_total > BINARY_BYTES_MAX:
            raise TooLarge(
                f"table {self.table!r}: the keys of one batch have more than 2 GiB; write it in smaller ones",
                table=self.table,
                limit=BINARY_BYTES_MAX,
            )
        return join(parts)

    def _check_length(self, keys: pa.Array) -> None:
        if longest_of(keys) > KEY_BYTES_MAX:
            lengths = np.diff(offsets_of(keys))
            row = int(np.argmax(lengths > KEY_BYTES_MAX))
            raise TooLarge(
                f"table {self.table!r}, row {row}: the key has {lengths[row]} bytes, more than {KEY_BYTES_MAX}",
                table=self.table,
                row=row,
                limit=KEY_BYTES_MAX,
            )

    def _decode_fixed(self, run: _FixedRun, offsets: NumpyArray, data: NumpyArray, skip_bytes: int) -> list[pa.Array]:
        width = run.dtype.itemsize
        if not equal_length(offsets, width + skip_bytes):
            raise self._corrupt(f"does not have the {width} bytes of its columns")
        if skip_bytes:
            return run.decode(records_at(data, offsets[:-1] + np.int32(skip_bytes), run.dtype))
        return run.decode(data[offsets[0] : offsets[-1]].view(run.dtype))

    def _expected_terminators(
        self, run: _TextColumn, data: NumpyArray, starts: NumpyArray, ends: NumpyArray
    ) -> NumpyArray:
        """The same as ``_terminators``; if only fixed-width columns follow, their widths give the offsets."""
        after = [following for following in self._runs if following.first > run.first]
        widths = [following.dtype.itemsize for following in after if isinstance(following, _FixedRun)]
        if len(widths) != len(after):
            return self._terminators(data, starts, ends)
        terminators: NumpyArray = ends - np.int32(sum(widths) + 2)
        if (terminators < starts).any() or data[terminators].any() or (data[terminators + 1] != 1).any():
            raise self._corrupt("ends inside a string")
        return terminators

    def _terminators(self, data: NumpyArray, starts: NumpyArray, ends: NumpyArray) -> NumpyArray:
        """For each row, the offset at which the string that begins at ``starts`` ends.

        Inside an escaped string each 00 is followed by FF, so the first 00 01 at or after its start is its terminator.
        """
        low, high = (int(starts[0]), int(ends[-1])) if len(starts) else (0, 0)
        region = data[low:high]
        zeros = np.flatnonzero(region[:-1] == 0)
        candidates: NumpyArray = (zeros[region[zeros + 1] == 1] + low).astype(np.int32)
        if len(candidates) != len(starts) or not (candidates >= starts).all():
            nearest = np.searchsorted(candidates, starts)
            if len(nearest) and nearest[-1] >= len(candidates):
                raise self._corrupt("ends inside a string")
            candidates = candidates[nearest]
        self._check_inside(candidates + np.int32(2), ends)
        return candidates

    def _text(self, run: _TextColumn, pieces: pa.Array) -> pa.Array:
        if pa.types.is_binary(run.data_type):
            return pieces
        try:
            return as_string(pieces)
        except pa.ArrowInvalid:
            raise self._corrupt("has a string that is not UTF-8") from None

    def _check_inside(self, after: NumpyArray, ends: NumpyArray) -> None:
        if (after > ends).any():
            raise self._corrupt("is shorter than its columns")

    def _corrupt(self, what: str) -> CorruptData:
        return CorruptData(f"table {self.table!r}: a key {what}", table=self.table)

    def _leading(self, values: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
        names = self.schema.names
        if isinstance(values, str | bytes) or not isinstance(values, Mapping | Sequence):
            raise BadInput(
                f"table {self.table!r}: key values come as a tuple or by name, not as {values!r}", table=self.table
            )
        if not isinstance(values, Mapping):
            if len(values) > len(names):
                raise BadInput(
                    f"table {self.table!r}: {len(values)} key values for the {len(names)} key columns {names}",
                    table=self.table,
                )
            return list(values)
        leading = names[: len(values)]
        for name in values:
            if name not in leading:
                why = "is not a key column" if name not in names else f"needs {', '.join(leading)} beside it"
                raise BadInput(
                    f"table {self.table!r}: {name!r} {why}; a bound gives the leading key columns of {names}",
                    table=self.table,
                    column=name,
                )
        return [values[name] for name in leading]

    def _one_value(self, field: pa.Field, value: Any) -> pa.Array:
        try:
            if isinstance(value, pa.Scalar):
                array = pa.repeat(value.cast(field.type), 1)
            else:
                array = pa.array([value], field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise SchemaMismatch(
                f"table {self.table!r}, column {field.name!r}: {value!r} is not a value of {field.type} ({error})",
                table=self.table,
                column=field.name,
            ) from None
        if array.null_count:
            raise null_key(array, field.name, self.table)
        return array


def table_prefix(table_id: int) -> bytes:
    """The bytes with which all keys of a table begin, in the one ordered map that holds the keys of all tables."""
    return b"t" + _TABLE_ID.pack(table_id)


def bytes_after(prefix: bytes) -> bytes | None:
    """The first key after all that begin with ``prefix``; ``None`` if there is no such key."""
    shortened = prefix.rstrip(b"\xff")
    return shortened[:-1] + bytes([shortened[-1] + 1]) if shortened else None


class _TextColumn:
    """One string or binary column of a key."""

    def __init__(self, first: int, data_type: pa.DataType, last: bool) -> None:
        self.first, self.count, self.data_type, self.last = first, 1, data_type, last


class _FixedRun:
    """Neighbouring fixed-width columns of a key: one packed big-endian record for each row."""

    def __init__(self, first: int, data_types: list[pa.DataType]) -> None:
        self.first, self.count, self.data_types = first, len(data_types), data_types
        parts: list[tuple[str, str]] = []
        for index, data_type in enumerate(data_types):
            if pa.types.is_decimal128(data_type):
                parts += [(f"high{index}", ">u8"), (f"low{index}", ">u8")]
            else:
                parts.append((f"{index}", f">u{storage_dtype(data_type).itemsize}"))
        self.dtype = np.dtype(parts)

    def encode(self, columns: list[pa.Array]) -> NumpyArray:
        """The records of the given leading columns; the bound of a scan may have fewer columns than the run."""
        width = self.count if len(columns) == self.count else len(columns)
        run = self if width == self.count else _FixedRun(self.first, self.data_types[:width])
        records = np.empty(len(columns[0]), run.dtype)
        for index, column in enumerate(columns):
            values = to_numpy(column)
            if pa.types.is_decimal128(column.type):
                records[f"high{index}"] = values["high"] ^ np.uint64(1 << 63)
                records[f"low{index}"] = values["low"]
            else:
                records[f"{index}"] = _to_ordered(values)
        return records

    @property
    def may_be_wrong(self) -> bool:
        """True if some bytes are no value of a column, or a second encoding of the same value."""
        return any(
            not (pa.types.is_integer(data_type) or pa.types.is_temporal(data_type)) for data_type in self.data_types
        )

    def is_canonical(self, records: NumpyArray) -> bool:
        columns = self.decode(records)
        decimals_fit = all(fits_precision(column) for column in columns if pa.types.is_decimal128(column.type))
        return decimals_fit and self.encode(columns).tobytes() == records.tobytes()

    def decode(self, records: NumpyArray) -> list[pa.Array]:
        columns = []
        for index, data_type in enumerate(self.data_types):
            dtype = storage_dtype(data_type)
            if pa.types.is_decimal128(data_type):
                values = np.empty(len(records), dtype)
                values["high"] = records[f"high{index}"] ^ np.uint64(1 << 63)
                values["low"] = records[f"low{index}"]
            else:
                unsigned = records[f"{index}"].astype(f"<u{dtype.itemsize}")
                values = _from_ordered(unsigned, dtype)
            columns.append(from_numpy(values, data_type))
        return columns


def _runs(schema: pa.Schema) -> list[_FixedRun | _TextColumn]:
    runs: list[_FixedRun | _TextColumn] = []
    fixed: list[pa.DataType] = []
    for index, field in enumerate(schema):
        if not is_text_or_bytes(field.type):
            fixed.append(field.type)
            continue
        if fixed:
            runs.append(_FixedRun(index - len(fixed), fixed))
            fixed = []
        runs.append(_TextColumn(index, field.type, last=index == len(schema) - 1))
    if fixed:
        runs.append(_FixedRun(len(schema) - len(fixed), fixed))
    return runs


def _sign_bit(itemsize: int) -> Any:
    return np.dtype(f"<u{itemsize}").type(1 << (8 * itemsize - 1))


def _to_ordered(values: NumpyArray) -> NumpyArray:
    """Unsigned integers that sort as the values do."""
    size = values.dtype.itemsize
    bits: NumpyArray = values.view(f"<u{size}")
    if values.dtype.kind == "u":
        return bits
    if values.dtype.kind == "i":
        return np.asarray(bits ^ _sign_bit(size))
    with np.errstate(invalid="ignore"):  # Bytes from elsewhere may hold a signalling NaN.
        canonical = values + values.dtype.type(0)  # -0.0 + 0.0 is 0.0
    canonical[np.isnan(canonical)] = np.nan
    bits = canonical.view(f"<u{size}")
    return np.where(bits & _sign_bit(size), ~bits, bits ^ _sign_bit(size))


def _from_ordered(unsigned: NumpyArray, dtype: np.dtype[Any]) -> NumpyArray:
    size = dtype.itemsize
    if dtype.kind == "u":
        return unsigned
    bits: NumpyArray
    if dtype.kind == "i":
        bits = unsigned ^ _sign_bit(size)
        return bits.view(dtype)
    bits = np.where(unsigned & _sign_bit(size), unsigned ^ _sign_bit(size), ~unsigned)
    return bits.view(dtype)


def _has_zero(array: pa.Array) -> bool:
    offsets = offsets_of(array)
    used = data_of(array)[offsets[0] : offsets[-1]]
    return bool(np.count_nonzero(used) != len(used))


def _escape(array: pa.Array) -> pa.Array:
    return pc.replace_substring(array, _ZERO, _ESCAPED) if _has_zero(array) else array


def _unescape(array: pa.Array) -> pa.Array:
    return pc.replace_substring(array, _ESCAPED, _ZERO) if _has_zero(array) else array


def _bytes_in(parts: list[Any]) -> int:
    """The bytes of the last part, with its terminator if it has one."""
    if isinstance(parts[-1], pa.Scalar):
        return _bytes_in(parts[:-1]) + 2 * len(parts[-2])
    offsets = offsets_of(parts[-1])
    return int(offsets[-1]) - int(offsets[0])
