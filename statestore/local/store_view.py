"""One version of all tables: what RocksDB has of them, and over that the logs of those that have one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from shuffle.limits import MIB
from shuffle.statestore.codec.arrow_bytes import Binary, NumpyArray, bytes_of, offsets_of, to_array, to_list
from shuffle.statestore.engine.row_log import LogView
from shuffle.statestore.engine.storage import KeyView

SCAN_BYTES_MAX = 16 * MIB
"""The bytes of keys and values after which one chunk of a scan ends."""

Chunk = tuple[pa.BinaryArray, pa.BinaryArray]
Pair = tuple[bytes, bytes | None]


class StoreView:
    """Reads of tables at one version. Safe to use from many threads."""

    def __init__(self, keys: KeyView, logs: Mapping[int, LogView]) -> None:
        self._keys = keys
        self.logs = logs
        """The logs of the tables that have one, by table id."""

    def get(self, table_id: int, keys: Binary) -> Binary:
        """The value of each key; null where there is no row."""
        log = self.logs.get(table_id)
        if log is None:
            values = self._keys.get_many(to_list(keys))
            return values if isinstance(keys, list) else pa.array(values, pa.binary())
        found, missing = log.get(to_array(keys))
        if missing.any() and not log.base_is_empty:
            found = self._fill(found, to_array(keys), missing)
        return to_list(found) if isinstance(keys, list) else found

    def _fill(self, found: pa.BinaryArray, keys: pa.BinaryArray, missing: NumpyArray) -> pa.BinaryArray:
        """``found`` with the values that only RocksDB has."""
        stored = pa.array(self._keys.get_many(keys.filter(pa.array(missing)).to_pylist()), pa.binary())
        places = np.where(missing, len(found) + np.cumsum(missing) - 1, np.arange(len(found)))
        return pa.concat_arrays([found, stored]).take(pa.array(places))

    def scan(self, table_id: int, begin: bytes, end: bytes | None, rows_max: int, reverse: bool) -> Chunk:
        """The next rows of a range; none only at its end."""
        log = self.logs.get(table_id)
        if log is None:
            return _first_rows(self._keys.scan(begin, end, reverse), rows_max)
        keys, values = log.in_order()
        low = _position(keys, begin)
        high = max(low, len(keys) if end is None else _position(keys, end))
        if log.base_is_empty:
            return _first_of_log(keys.slice(low, high - low), values.slice(low, high - low), rows_max, reverse)
        logged = _pairs(keys, values, low, high, reverse)
        return _first_rows(_merged(logged, self._keys.scan(begin, end, reverse), reverse), rows_max)


def _first_rows(pairs: Iterator[tuple[bytes, bytes]], rows_max: int) -> Chunk:
    keys: list[bytes] = []
    values: list[bytes] = []
    size_bytes = 0
    for key, value in pairs:
        keys.append(key)
        values.append(value)
        size_bytes += len(key) + len(value)
        if len(keys) >= rows_max or size_bytes >= SCAN_BYTES_MAX:
            break
    return pa.array(keys, pa.binary()), pa.array(values, pa.binary())


def _first_of_log(keys: pa.BinaryArray, values: pa.BinaryArray, rows_max: int, reverse: bool) -> Chunk:
    """The first rows of a range that is in the log only, without a Python step per row."""
    while len(keys):
        count = min(rows_max, len(keys))
        first = len(keys) - count if reverse else 0
        chunk = keys.slice(first, count), values.slice(first, count)
        keys = keys.slice(0, first) if reverse else keys.slice(count)
        values = values.slice(0, first) if reverse else values.slice(count)
        if chunk[1].null_count:
            present = chunk[1].is_valid()
            chunk = chunk[0].filter(present), chunk[1].filter(present)
        if len(chunk[0]):
            if reverse:
                backwards = pa.array(np.arange(len(chunk[0]) - 1, -1, -1))
                chunk = chunk[0].take(backwards), chunk[1].take(backwards)
            return _within_bytes(*chunk)
    return pa.array([], pa.binary()), pa.array([], pa.binary())


def _within_bytes(keys: pa.BinaryArray, values: pa.BinaryArray) -> Chunk:
    if bytes_of(keys) + bytes_of(values) <= SCAN_BYTES_MAX:
        return keys, values
    ends = offsets_of(keys)[1:].astype(np.int64) + offsets_of(values)[1:]
    count = int(np.searchsorted(ends - int(offsets_of(keys)[0]) - int(offsets_of(values)[0]), SCAN_BYTES_MAX)) + 1
    return keys.slice(0, count), values.slice(0, count)


def _position(keys: pa.BinaryArray, key: bytes) -> int:
    """The number of sorted ``keys`` that are smaller than ``key``."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if keys[middle].as_py() < key:
            low = middle + 1
        else:
            high = middle
    return low


def _pairs(keys: pa.BinaryArray, values: pa.BinaryArray, low: int, high: int, reverse: bool) -> Iterator[Pair]:
    """The rows of the log in a range, in order; they are made one slice at a time, since a reader may need few."""
    step = 1_024
    starts = range(max(high - step, low), low - step, -step) if reverse else range(low, high, step)
    for start in starts:
        begin = max(start, low)
        count = min(start + step, high) - begin
        pairs = zip(keys.slice(begin, count).to_pylist(), values.slice(begin, count).to_pylist(), strict=True)
        yield from reversed(list(pairs)) if reverse else pairs


def _merged(
    logged: Iterator[Pair], stored: Iterator[tuple[bytes, bytes]], reverse: bool
) -> Iterator[tuple[bytes, bytes]]:
    """The rows of RocksDB with those of the log over them, both in the same order; deleted ones are left out."""
    log_row, row = next(logged, None), next(stored, None)
    while log_row is not None or row is not None:
        if log_row is None or (row is not None and row[0] != log_row[0] and (row[0] < log_row[0]) != reverse):
            assert row is not None
            yield row
            row = next(stored, None)
            continue
        if row is not None and row[0] == log_row[0]:
            row = next(stored, None)
        if log_row[1] is not None:
            yield log_row[0], log_row[1]
        log_row = next(logged, None)
