"""A reader for folders of Parquet, Arrow IPC or JSON-lines files: one partition is one sub-folder.

Files are read in the order of their names and must not change once they are there: write them elsewhere, or under a
name that begins with a dot, and rename them. Later files must have later names. The token is the name of the file and
the number of rows of it that were read.

The libraries for Parquet and JSON are imported where they are used: most mappers read queues, and would have them in
memory for nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from shuffle.errors import BadInput, CorruptData, OutOfRange, SchemaMismatch, SpecError
from shuffle.ids import Token
from shuffle.limits import MIB
from shuffle.mapper.reader import BATCH_BYTES_MAX_DEFAULT, START, Input, PartitionReader
from shuffle.mapper.rows import fit

POLL_S = 0.1
"""The seconds between two listings of a folder while waiting for a new file. One listing takes well under a
millisecond."""

JSON_BLOCK_BYTES = 4 * MIB
"""The number of bytes of a JSON-lines file that are parsed at once. A single line cannot be longer."""

_FORMATS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}


class _FilePosition(NamedTuple):
    """A position in a folder: what a token of ``FolderReader`` says."""

    file: str
    """The name of the file; empty before the first file."""
    rows: int
    """The number of rows of the file that were read."""


def encode_file_position(file: str, rows: int) -> Token:
    return Token(json.dumps({"file": file, "rows": rows}).encode())


def decode_file_position(token: Token) -> _FilePosition:
    if token == START:
        return _FilePosition("", 0)
    try:
        parsed = json.loads(token)
        return _FilePosition(str(parsed["file"]), int(parsed["rows"]))
    except (ValueError, KeyError, TypeError):
        raise BadInput("the token is not a position in a folder: was the input of the processor changed?") from None


def is_visible(name: str) -> bool:
    """Whether a file belongs to the input. Hidden and half-written files, by the usual marks in their names, do not."""
    return not name.startswith((".", "_")) and not name.endswith((".tmp", ".part", ".crc"))


def partition_folders(folder: str | Path) -> list[Path]:
    """The sub-folders of ``folder`` in the order of their names: each is one partition."""
    root = Path(folder)
    if not root.is_dir():
        raise SpecError(f"there is no input folder {root}")
    folders = sorted(path for path in root.iterdir() if path.is_dir() and is_visible(path.name))
    if not folders:
        raise SpecError(f"{root} has no sub-folders; each of them is one partition of the input")
    return folders


def format_of(path: Path, configured: str | None) -> str:
    file_format = configured or _FORMATS.get(path.suffix.lower())
    if file_format is None:
        raise SpecError(f"{path}: cannot tell its format by its name: set input.format to parquet, arrow or jsonl")
    return file_format


class FolderReader(PartitionReader):
    """The files of one folder, in the order of their names."""

    def __init__(
        self,
        folder: str | Path,
        *,
        format: str | None = None,
        wait_ms: int = 0,
        batch_bytes_max: int = BATCH_BYTES_MAX_DEFAULT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = Path(folder)
        self._format = format
        self.batch_bytes_max = batch_bytes_max
        self.wait_ms = wait_ms
        self._clock = clock
        self._interrupted = threading.Event()
        self._schema: pa.Schema | None = None
        self._position: _FilePosition | None = None
        """The position up to which the open file was read; reading on from there needs no seeking. None if no file is
        open."""
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None
        self._known: set[str] = set()

    @property
    def schema(self) -> pa.Schema:
        """The schema of the first file here or, as long as there is none, of the first file of a sibling partition."""
        if self._schema is None:
            self._schema = self._find_schema()
        return self._schema

    def read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        deadline_s = self._clock() + self.wait_ms / 1000
        position = decode_file_position(token)
        rows_max = max(1, end_row_index - begin_row_index)
        while True:
            batch, position = self._next_batch(position, rows_max)
            if batch is not None:
                return self._conform(batch, position.file), encode_file_position(*position)
            left_s = deadline_s - self._clock()
            if left_s <= 0 or self._interrupted.wait(min(left_s, POLL_S)):
                return self.schema.empty_table(), encode_file_position(*position)

    def trim(self, row_index: int, token: Token) -> None:
        """Files stay where they are: they belong to whoever wrote them."""

    def lag_rows(self, token: Token) -> int | None:
        return None

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self._interrupted.set()
        self._forget()

    def _forget(self) -> None:
        self._batches, self._rest, self._position = iter(()), None, None

    def _next_batch(self, position: _FilePosition, rows_max: int) -> tuple[pa.RecordBatch | None, _FilePosition]:
        """Rows after ``position``, or None when there are no more files, and the position after them."""
        if position != self._position:
            self._seek(position)
        while True:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                following = self._file_after(position.file)
                if following is None:
                    self._position = position
                    return None, position
                position = _FilePosition(following, 0)
                self._batches = self._open(following)
                continue
            if batch.num_rows == 0:
                self._rest = None
                continue
            taken = fit(batch.slice(0, rows_max), self.batch_bytes_max)
            if taken.num_rows == 0:
                taken = batch.slice(0, 1)
            left = batch.slice(taken.num_rows)
            self._rest = left if left.num_rows else None
            self._position = _FilePosition(position.file, position.rows + taken.num_rows)
            return taken, self._position

    def _seek(self, position: _FilePosition) -> None:
        self._forget()
        if position.file:
            if not (self._folder / position.file).exists():
                path = self._folder / position.file
                raise OutOfRange(
                    f"{path} is gone, but rows after row {position.rows} of it are not processed yet",
                    file=position.file,
                    row=position.rows,
                )
            self._batches = self._open(position.file, position.rows)
        self._position = position

    def _names(self) -> list[str]:
        try:
            return sorted(path.name for path in self._folder.iterdir() if is_visible(path.name) and path.is_file())
        except FileNotFoundError:
            raise SpecError(f"the input folder {self._folder} is gone") from None

    def _file_after(self, name: str) -> str | None:
        names = self._names()
        late = [other for other in names if other < name and self._known and other not in self._known]
        if late:
            raise BadInput(
                f"{self._folder / late[0]} came after {name} was read, but its name is before: files are read in "
                f"the order of their names, so it would be left out. Rename it to something after {names[-1]}",
                file=late[0],
            )
        self._known.update(names)
        return next((other for other in names if other > name), None)

    def _open(self, name: str, rows: int = 0) -> Iterator[pa.RecordBatch]:
        """The batches of a file without its first ``rows`` rows."""
        path = self._folder / name
        file_format = format_of(path, self._format)
        if file_format == "parquet":
            return parquet_batches(path, rows)
        if file_format == "arrow":
            return skip_rows(arrow_batches(path), rows)
        return skip_rows(jsonl_batches(path, self.schema), rows)

    def _find_schema(self) -> pa.Schema:
        for folder in [self._folder, *partition_folders(self._folder.parent)]:
            names = sorted(path.name for path in folder.iterdir() if is_visible(path.name) and path.is_file())
            if names:
                path = folder / names[0]
                return schema_of(path, format_of(path, self._format))
        raise SpecError(f"{self._folder} and its siblings hold no file yet, so the schema of the input is not known")

    def _conform(self, batch: pa.RecordBatch, file: str) -> pa.Table:
        rows = pa.Table.from_batches([batch])
        if rows.schema.equals(self.schema):
            return rows
        if set(rows.column_names) != set(self.schema.names):
            extra, missing = (
                set(rows.column_names) - set(self.schema.names),
                set(self.schema.names) - set(rows.column_names),
            )
            raise SchemaMismatch(
                f"{self._folder / file}: its columns are not those of the first file; "
                f"superfluous: {sorted(extra)}, missing: {sorted(missing)}",
                file=file,
            )
        try:
            return rows.select(self.schema.names).cast(self.schema)
        except pa.ArrowException as error:
            raise SchemaMismatch(f"{self._folder / file}: {error}", file=file) from None


class FolderInput(Input):
    """A folder whose sub-folders are the partitions. Nothing of it is ever deleted, so any number may read it."""

    def partition_count(self) -> int:
        return len(self._folders())

    def open(self, partition: int) -> PartitionReader:
        folders = self._folders()
        if partition >= len(folders):
            raise SpecError(
                f"there is no partition {partition}: {self.config['folder']} has {len(folders)} sub-folders"
            )
        return FolderReader(folders[partition], format=self.config["format"])

    def describe(self) -> str:
        return f"folder {self.config['folder']}"

    def _folders(self) -> list[Path]:
        try:
            return partition_folders(self.config["folder"])
        except OSError as error:
            raise SpecError(str(error)) from None


def skip_rows(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """``batches`` without their first ``rows`` rows."""
    for batch in batches:
        if rows >= batch.num_rows:
            rows -= batch.num_rows
            continue
        yield batch.slice(rows)
        rows = 0


def parquet_batches(path: Path, rows: int) -> Iterator[pa.RecordBatch]:
    """The batches of a Parquet file without its first ``rows`` rows. Row groups that lie before them are not read."""
    import pyarrow.parquet as pq

    with _readable(path), pq.ParquetFile(path) as file:
        first = 0
        while first < file.num_row_groups and rows >= file.metadata.row_group(first).num_rows:
            rows -= file.metadata.row_group(first).num_rows
            first += 1
        if first < file.num_row_groups:
            yield from skip_rows(file.iter_batches(row_groups=range(first, file.num_row_groups)), rows)


def arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of a file in Arrow's file format or stream format, mapped into memory and not copied."""
    with _readable(path), pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            file = pa.ipc.open_file(source)
            for number in range(file.num_record_batches):
                yield file.get_batch(number)
        else:
            source.seek(0)
            yield from pa.ipc.open_stream(source)


def jsonl_batches(path: Path, schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:
    import pyarrow.json as pa_json

    if path.stat().st_size == 0:
        return
    options = pa_json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "error"
    )
    with _readable(path):
        read_options = pa_json.ReadOptions(block_size=JSON_BLOCK_BYTES, use_threads=False)
        yield from pa_json.open_json(path, read_options=read_options, parse_options=options)


def schema_of(path: Path, file_format: str) -> pa.Schema:
    if file_format == "parquet":
        import pyarrow.parquet as pq

        with _readable(path):
            return pq.read_schema(path).remove_metadata()
    if file_format == "arrow":
        with _readable(path), pa.memory_map(str(path)) as source:
            if source.read(6) == b"ARROW1":
                return pa.ipc.open_file(source).schema.remove_metadata()
            source.seek(0)
            return pa.ipc.open_stream(source).schema.remove_metadata()
    first = next(jsonl_batches(path, None), None)
    return pa.schema([]) if first is None else first.schema


class _readable:  # noqa: N801 (reads as a word in a with statement)
    """Adds the name of the file to the error that Arrow raises for a broken one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        if isinstance(error, pa.ArrowException) and not isinstance(error, OSError):
            raise CorruptData(f"{self._path} cannot be read: {error}", file=str(self._path)) from None
