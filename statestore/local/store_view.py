"""One version of all tables: what RocksDB has of them, and over that the logs of those that have one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from shuffle.limits import MIB
from shuffle.statestore.codec.arrow_bytes import Binary, NumpyArray, to_array, to_list
from shuffle.statestore.engine.row_log import LogView
from shuffle.statestore.engine.storage import KeyView

SCAN_BYTES_MAX = 16 * MIB
"""The bytes of keys and values after which one chunk of a scan ends."""

_PIECE_ROWS = 1_024
"""The rows of a log that are made ready at once, where they are merged with those of RocksDB."""

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
        ordered = log.in_order()
        low = log.count_below(ordered, begin)
        high = max(low, len(ordered) if end is None else log.count_below(ordered, end))
        rows = ordered[low:high][::-1] if reverse else ordered[low:high]
        if log.base_is_empty:
            return _first_of_log(log, rows, rows_max)
        return _first_rows(_merged(_pairs(log, rows), self._keys.scan(begin, end, reverse), reverse), rows_max)


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


def _first_of_log(log: LogView, rows: NumpyArray, rows_max: int) -> Chunk:
    """The first rows of a range that is in the log only, without a Python step per row."""
    while len(rows):
        piece = log.first_piece(rows, rows_max, SCAN_BYTES_MAX)
        rows = rows[len(piece) :]
        keys, values = log.take(piece)
        if values.null_count:
            present = values.is_valid()
            keys, values = keys.filter(present), values.filter(present)
        if len(keys):
            return keys, values
    return pa.array([], pa.binary()), pa.array([], pa.binary())


def _pairs(log: LogView, rows: NumpyArray) -> Iterator[Pair]:
    """The rows of the log in this order; they are made one piece at a time, since a reader may need few."""
    while len(rows):
        piece = log.first_piece(rows, _PIECE_ROWS, SCAN_BYTES_MAX)
        rows = rows[len(piece) :]
        keys, values = log.take(piece)
        yield from zip(keys.to_pylist(), values.to_pylist(), strict=True)


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
