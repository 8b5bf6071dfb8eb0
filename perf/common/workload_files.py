"""A workload as files: Parquet for systems that read columns, CSV for systems that read lines, Arrow for Spark's
real-time mode.

All have the same rows in the same order as the queue that ``examples.generate.fill`` fills with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from perf.common.questions import ACTIVITY, Question, Rows
from shuffle.examples.workload import partition_rows

ROW_GROUPS_PER_FILE = 2
"""The number of row groups in a Parquet file: a reader can divide a file among its threads only by row groups."""


@dataclass(frozen=True)
class Input:
    """One stream of rows in every form, and the expected answer to the question about them."""

    question: Question
    workload: Rows
    rows: int
    partitions: int
    batch_rows: int
    size_bytes: int
    """The size of the rows as Arrow data: every system's MB/s are computed from it, whatever form it reads."""
    expected: pa.Table
    folder: Path
    """The folder of the files; each form has a folder of its own in it."""

    @property
    def parquet(self) -> Path:
        return self.folder / "parquet"

    @property
    def csv(self) -> Path:
        return self.folder / "csv"

    @property
    def arrow(self) -> list[Path]:
        """A file for each partition."""
        return [self.folder / "arrow" / f"{partition}.arrow" for partition in range(self.partitions)]

    @property
    def row_bytes(self) -> float:
        return self.size_bytes / self.rows


def in_turn(workload: Rows, rows: int, partitions: int, batch_rows: int) -> Iterator[tuple[int, pa.Table]]:
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


class Form(Protocol):
    """Writes rows in one form. ``number`` counts the calls."""

    def write(self, number: int, rows: pa.Table) -> None: ...

    def close(self) -> None: ...


def write_forms(
    folder: Path,
    workload: Rows,
    rows: int,
    partitions: int,
    batch_rows: int,
    file_rows: int,
    forms: Collection[str],
    question: Question = ACTIVITY,
) -> Input:
    """Write the rows in the forms that are named (``parquet``, ``csv``, ``arrow``); count them meanwhile."""
    folder.mkdir(exist_ok=True)
    writers: list[Form] = [_FORMS[form](folder / form, partitions) for form in forms]
    parts: list[pa.Table] = []
    size_bytes = number = 0
    held: list[pa.Table] = []
    for _, batch in in_turn(workload, rows, partitions, batch_rows):
        size_bytes += batch.nbytes
        parts.append(question.oracle_part(batch))
        held.append(batch)
        if sum(table.num_rows for table in held) >= file_rows:
            _write(writers, number, held)
            number, held = number + 1, []
    if held:
        _write(writers, number, held)
    for writer in writers:
        writer.close()
    return Input(
        question, workload, rows, partitions, batch_rows, size_bytes, question.oracle_sum(parts), folder.resolve()
    )


def _write(writers: list[Form], number: int, held: list[pa.Table]) -> None:
    rows = pa.concat_tables(held)
    for writer in writers:
        writer.write(number, rows)


class ParquetForm:
    def __init__(self, folder: Path, partitions: int) -> None:
        folder.mkdir()
        self._folder = folder

    def write(self, number: int, rows: pa.Table) -> None:
        path = self._folder / f"{number:05d}.parquet"
        pq.write_table(rows, path, row_group_size=-(-rows.num_rows // ROW_GROUPS_PER_FILE))

    def close(self) -> None:
        pass


class CsvForm:
    """Writes CSV without a header and without quotes. Times are in microseconds: a number is parsed faster than a
    date."""

    def __init__(self, folder: Path, partitions: int) -> None:
        folder.mkdir()
        self._folder = folder

    def write(self, number: int, rows: pa.Table) -> None:
        plain = rows.cast(
            pa.schema(
                [field.with_type(pa.int64()) if pa.types.is_timestamp(field.type) else field for field in rows.schema]
            )
        )
        options = csv.WriteOptions(include_header=False, quoting_style="none")
        csv.write_csv(plain, self._folder / f"{number:05d}.csv", options)

    def close(self) -> None:
        pass


class ArrowForm:
    """Writes an Arrow file for each partition. Each call adds one batch to one of them, in turn."""

    def __init__(self, folder: Path, partitions: int) -> None:
        folder.mkdir()
        self._folder, self._partitions = folder, partitions
        self._writers: list[pa.ipc.RecordBatchFileWriter] = []

    def write(self, number: int, rows: pa.Table) -> None:
        if not self._writers:
            paths = [self._folder / f"{partition}.arrow" for partition in range(self._partitions)]
            self._writers = [pa.ipc.new_file(path, rows.schema) for path in paths]
        self._writers[number % self._partitions].write_batch(rows.combine_chunks().to_batches()[0])

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


_FORMS: dict[str, Callable[[Path, int], Form]] = {"parquet": ParquetForm, "csv": CsvForm, "arrow": ArrowForm}
