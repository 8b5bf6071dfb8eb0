"""Checks that ``map`` is deterministic row by row: it is run on a sample of the real input in several ways, and the
results must be equal.

1. a second time, by another object of the class;
2. with other batch boundaries;
3. in a fresh process with another hash seed (sets and dicts of strings then have another order).

Rows that make ``map`` raise are left out of the comparison: what becomes of them is up to ``on_error``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from shuffle.api import Mapper, PartitionedRowset, WorkerSpec
from shuffle.errors import BadInput, ShuffleError, UserCodeError
from shuffle.ids import Guid, Token
from shuffle.mapper.readers.opening import open_input
from shuffle.partition import check_partition_indexes
from shuffle.run import launch
from shuffle.spec.config import ProcessorSpec, load_spec
from shuffle.user_code.create import create
from shuffle.user_code.load import load_class
from shuffle.user_code.poison import locate_poison, raised_at, split_rows

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

SAMPLE_ROWS = 2_000
"""The most rows of the sample of one partition: enough for most kinds of rows, and few enough that the check takes
about a second."""
SAMPLE_BYTES = 4 * 1024 * 1024
"""The most bytes of the sample of one partition."""
CUTS = (1, 2, 7, 61, 509)
"""The numbers of rows of the batches in step 2, used in turn."""
POISON_ATTEMPTS_MAX = 500
"""The most calls of ``map`` to find the rows of a sample for which it raises."""
FRESH_PROCESS_S_MAX = 120.0
"""The most seconds that the fresh process may take."""
VALUE_CHARS_MAX = 120
"""The most characters of a value that differs that a message shows."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two runs of ``map`` over the same rows."""

    partition: int
    """The partition of the input."""
    how: str
    """The way in which the second run differed: ``with other batch boundaries``."""
    input_row: int | None
    """The offset of the input row in the sample of its partition, which begins at the persisted position; None if it
    could not be determined."""
    output_row: int
    """The offset of the row in the output of ``map``."""
    what: str
    """The column and both values."""

    def __str__(self) -> str:
        row = "" if self.input_row is None else f", made of input row {self.input_row} of the sample"
        return f"partition {self.partition}, output row {self.output_row}{row}, differs {self.how}: {self.what}"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check of ``map``."""

    rows: int
    """The number of input rows that were compared."""
    rows_failed: int
    """The number of input rows for which ``map`` raised."""
    first_failure: str | None
    """The first exception of ``map``, as text; None if it raised none."""
    difference: Difference | None
    """The first difference; None if ``map`` is deterministic on the sample."""


def check_map(
    spec: ProcessorSpec, client: StateClient, mapper_count: int, partitions_max: int | None = None
) -> CheckResult:
    """Checks the partitions that have rows, up to ``partitions_max`` of them; ends at the first difference."""
    rows = failed = checked = 0
    failure: str | None = None
    for partition in range(mapper_count):
        sample = read_sample(spec, client, partition)
        if sample.num_rows == 0:
            continue
        checked += 1
        good, reasons = _without_failing_rows(spec, client, mapper_count, partition, sample)
        failed += sample.num_rows - good.num_rows
        failure = failure or (reasons[0] if reasons else None)
        rows += good.num_rows
        difference = _compare_runs(spec, client, mapper_count, partition, good) if good.num_rows else None
        if difference is not None:
            return CheckResult(rows, failed, failure, difference)
        if checked == partitions_max:
            break
    return CheckResult(rows, failed, failure, None)


def read_sample(spec: ProcessorSpec, client: StateClient, partition: int) -> pa.Table:
    """The first rows after the persisted position of a partition; none if all rows are processed."""
    tokens = {
        row["mapper_index"]: Token(row["continuation_token"])
        for row in client.scan(spec.mappers_table).read_all().to_pylist()
    }
    with open_input(spec, client) as source, closing(source.open_to_look(partition)) as reader:
        rows, _ = reader.read(0, SAMPLE_ROWS, tokens.get(partition) or reader.start())
        rows = reader.decode(rows).rows
    rows_fitting = max(1, SAMPLE_ROWS if rows.nbytes <= SAMPLE_BYTES else rows.num_rows * SAMPLE_BYTES // rows.nbytes)
    return rows.slice(0, rows_fitting).combine_chunks()


class _Run:
    """The user's mapper for one partition, whose output is checked and completed with the reducer of each row."""

    def __init__(
        self, spec: ProcessorSpec, client: StateClient, mapper_count: int, partition: int, schema: pa.Schema
    ) -> None:
        worker = WorkerSpec(
            spec.processor, partition, Guid("check"), mapper_count, spec.reducer.count, spec.max_parallelism
        )
        self._reducer_count = spec.reducer.count
        self._name = spec.mapper.class_name
        self._mapper: Mapper = create(load_class(spec, "mapper"), "mapper", spec.mapper.config, worker, client, schema)

    def map(self, rows: pa.Table) -> pa.Table:
        """The output rows of one batch, with the reducer of each as a last column."""
        result = self._mapper.map(rows)
        if not isinstance(result, PartitionedRowset):
            raise UserCodeError(f"{self._name}.map must return a PartitionedRowset, not {type(result).__name__}")
        indexes = np.asarray(result.partition_indexes, dtype=np.int64)
        try:
            check_partition_indexes(indexes, self._reducer_count, f"{self._name}.map")
        except BadInput as error:
            raise UserCodeError(error.message, **error.fields) from None
        return result.rows.append_column("(reducer)", pa.array(indexes))

    def map_in_cuts(self, rows: pa.Table) -> pa.Table:
        parts, begin, turn = [], 0, 0
        while begin < rows.num_rows:
            size = CUTS[turn % len(CUTS)]
            parts.append(self.map(rows.slice(begin, size)))
            begin, turn = begin + size, turn + 1
        return pa.concat_tables(parts, promote_options="permissive")


def _without_failing_rows(
    spec: ProcessorSpec, client: StateClient, mapper_count: int, partition: int, sample: pa.Table
) -> tuple[pa.Table, list[str]]:
    run = _Run(spec, client, mapper_count, partition, sample.schema)

    def attempt(rows: pa.Table) -> None:
        run.map(rows)

    try:
        poison_rows = locate_poison(sample, attempt, attempts_max=POISON_ATTEMPTS_MAX)
    except UserCodeError as error:
        where = raised_at(error.__cause__) if error.__cause__ is not None else ""
        what = f"{spec.at('mapper.class')}: {spec.mapper.class_name}.map: {error.message}{where}"
        raise UserCodeError(what, **error.fields) from error
    good, _ = split_rows(sample, [poison.row for poison in poison_rows])
    return good.combine_chunks(), [poison.reason for poison in poison_rows]


def _compare_runs(
    spec: ProcessorSpec, client: StateClient, mapper_count: int, partition: int, sample: pa.Table
) -> Difference | None:
    def fresh() -> _Run:
        return _Run(spec, client, mapper_count, partition, sample.schema)

    first = fresh().map(sample)
    others: tuple[tuple[str, Callable[[], pa.Table]], ...] = (
        ("when it is mapped again", lambda: fresh().map(sample)),
        ("with other batch boundaries", lambda: fresh().map_in_cuts(sample)),
        (
            "in a fresh process with another hash seed",
            lambda: _map_in_fresh_process(spec, mapper_count, partition, sample),
        ),
    )
    for how, other in others:
        difference = first_difference(first, other())
        if difference is not None:
            output_row, what = difference
            return Difference(partition, how, _input_row_of(fresh(), sample, output_row), output_row, what)
    return None


def first_difference(first: pa.Table, second: pa.Table) -> tuple[int, str] | None:
    """The first row in which two tables differ, and how; None if they are the same."""
    if first.schema.names != second.schema.names or first.schema.types != second.schema.types:
        return 0, f"the columns are {_columns(first)}, then {_columns(second)}"
    rows = min(first.num_rows, second.num_rows)
    first_row: tuple[int, str] | None = None
    for name in first.schema.names:
        row = _first_difference_in(first[name].slice(0, rows), second[name].slice(0, rows))
        if row is not None and (first_row is None or row < first_row[0]):
            values = [_shorten(repr(table[name][row].as_py())) for table in (first, second)]
            first_row = row, f"{name} is {values[0]}, then {values[1]}"
    if first_row is None and first.num_rows != second.num_rows:
        return rows, f"there are {first.num_rows} rows, then {second.num_rows}"
    return first_row


def _first_difference_in(first: pa.ChunkedArray, second: pa.ChunkedArray) -> int | None:
    if first.equals(second):
        return None
    for row, (one, other) in enumerate(zip(first.to_pylist(), second.to_pylist(), strict=True)):
        if one != other and not (one != one and other != other):  # Two NaN are equal here.
            return row
    return None


def _columns(rows: pa.Table) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in rows.schema if field.name != "(reducer)")


def _shorten(text: str) -> str:
    return text if len(text) <= VALUE_CHARS_MAX else text[:VALUE_CHARS_MAX] + "…"


def _input_row_of(run: _Run, sample: pa.Table, output_row: int) -> int | None:
    """The input row from which an output row was made: rows are mapped one by one and their outputs counted."""
    outputs = 0
    for row in range(sample.num_rows):
        try:
            outputs += run.map(sample.slice(row, 1)).num_rows
        except Exception:  # The user's code may raise anything; then the row cannot be determined in this way.
            return None
        if outputs > output_row:
            return row
    return None


# 3. The fresh process ------------------------------------------------------------------------------------------------


def _map_in_fresh_process(spec: ProcessorSpec, mapper_count: int, partition: int, sample: pa.Table) -> pa.Table:
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**launch.environment(), "PYTHONHASHSEED": seed, "SHUFFLE_STATE": spec.state}
    with tempfile.TemporaryDirectory(prefix="shuffle-check-") as folder:
        given, made = Path(folder, "sample.arrow"), Path(folder, "mapped.arrow")
        _write(given, sample)
        arguments = [str(spec.path), str(mapper_count), str(partition), str(given), str(made)]
        try:
            ended = subprocess.run(
                [sys.executable, "-P", "-m", "shuffle.run.determinism", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=FRESH_PROCESS_S_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserCodeError(f"map of {sample.num_rows} rows took more than {FRESH_PROCESS_S_MAX:.0f} s") from None
        if ended.returncode != 0:
            last = ended.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no reason given"]
            raise UserCodeError(f"map failed in a fresh process: {last[0].removeprefix('error: ')}")
        return _read(made)


def _write(path: Path, rows: pa.Table) -> None:
    with pa.OSFile(os.fspath(path), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)


def _read(path: Path) -> pa.Table:
    with pa.OSFile(os.fspath(path), "rb") as source:
        return pa.ipc.open_file(source).read_all()


def main(arguments: list[str]) -> int:
    """The fresh process: maps the sample in the file that it is given."""
    spec = load_spec(arguments[0])
    mapper_count, partition = int(arguments[1]), int(arguments[2])
    try:
        sample = _read(Path(arguments[3]))
        with spec.open_state() as client:
            _write(Path(arguments[4]), _Run(spec, client, mapper_count, partition, sample.schema).map(sample))
    except ShuffleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def describe(result: CheckResult, spec: ProcessorSpec) -> list[str]:
    """The lines that ``shuffle check`` prints about a result."""
    if result.rows + result.rows_failed == 0:
        return ["map: not checked, there is no input to try it on yet"]
    lines = []
    if result.rows_failed:
        fate = "go to the dead letter queue" if spec.mapper.on_error == "dead_letter" else "stop the mapper"
        lines.append(f"map: {result.rows_failed} rows of the sample fail and would {fate}: {result.first_failure}")
    if result.difference is None:
        lines.append(f"map: deterministic on a sample of {result.rows} rows")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
