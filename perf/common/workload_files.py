"""The workload as files: Parquet for systems that read columns, CSV for systems that read lines.

Both have the same rows in the same order as the queue that ``examples.generate.fill`` fills with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from shuffle.examples.workload import Workload, oracle_part, oracle_sum, partition_rows

ROW_GROUPS_PER_FILE = 2
"""The number of row groups in a Parquet file: a reader can divide a file among its threads only by row groups."""


@dataclass(frozen=True)
class Input:
    """One stream of log lines in every form, and the expected result of the activity job."""

    workload: Workload
    rows: int
    partitions: int
    batch_rows: int
    size_bytes: int
    """The size of the rows as Arrow data: every system's MB/s are computed from it, whatever form it reads."""
    expected: pa.Table
    parquet: Path
    csv: Path

    @property
    def row_bytes(self) -> float:
        return self.size_bytes / self.rows


def in_turn(workload: Workload, rows: int, partitions: int, batch_rows: int) -> Iterator[tuple[int, pa.Table]]:
    """The rows in the order in which they are written: a batch of each partition in turn, until all are written."""
    pending = [
        (partition, workload.batches(share, batch_rows, partition))
        for partition, share in enumerate(partition_rows(rows, partitions))
    ]
    while pending:
        still = []
        for partition, batches in pending:
            batch = next(batches, None)
            if batch is not None:
                yield partition, batch
                still.append((partition, batches))
        pending = still


def write_forms(
    folder: Path, workload: Workload, rows: int, partitions: int, batch_rows: int, file_rows: int, with_csv: bool
) -> Input:
    """Write the rows as Parquet and, if requested, as CSV; count them meanwhile."""
    parquet, lines = folder / "parquet", folder / "csv"
    writers: list[Callable[[int, pa.Table], None]] = [ParquetForm(parquet)]
    if with_csv:
        writers.append(CsvForm(lines))
    parts: list[pa.Table] = []
    size_bytes = number = 0
    held: list[pa.Table] = []
    for _, batch in in_turn(workload, rows, partitions, batch_rows):
        size_bytes += batch.nbytes
        parts.append(oracle_part(batch))
        held.append(batch)
        if sum(table.num_rows for table in held) >= file_rows:
            _write(writers, number, held)
            number, held = number + 1, []
    if held:
        _write(writers, number, held)
    return Input(workload, rows, partitions, batch_rows, size_bytes, oracle_sum(parts), parquet, lines)


def _write(writers: list[Callable[[int, pa.Table], None]], number: int, held: list[pa.Table]) -> None:
    rows = pa.concat_tables(held)
    for write in writers:
        write(number, rows)


class ParquetForm:
    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder

    def __call__(self, number: int, rows: pa.Table) -> None:
        path = self._folder / f"{number:05d}.parquet"
        pq.write_table(rows, path, row_group_size=-(-rows.num_rows // ROW_GROUPS_PER_FILE))


class CsvForm:
    """Writes CSV without a header and without quotes. The time is in microseconds: a number is parsed faster than a
    date."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder

    def __call__(self, number: int, rows: pa.Table) -> None:
        at = rows.schema.get_field_index("timestamp")
        plain = rows.set_column(at, "timestamp", rows["timestamp"].cast(pa.int64()))
        options = csv.WriteOptions(include_header=False, quoting_style="none")
        csv.write_csv(plain, self._folder / f"{number:05d}.csv", options)
