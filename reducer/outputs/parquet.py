"""A folder of Parquet files as a sink: one file for each batch, or for each sub-folder of a batch, named by its range.

The file of the positions from 1,000 up to and without 2,000 of partition 3 of the outbox of ``activity`` is

    activity-3-000000001000-000000002000.parquet

A batch that is published again has the same range, hence the same names and the same rows: a file that is there already
is left alone. Readers see whole files only. On a local disk or in HDFS a file is written beside its place, under a name
that begins with a dot and does not end in ``.parquet``, and renamed; on a local disk it is synced before that, since
the outbox is trimmed afterwards. In an object store a file appears as a whole when it is closed.

With ``partition_by``, the files of one batch appear one after the other.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from shuffle.errors import PositionLost, ServiceUnavailable, SinkRefused, SpecError
from shuffle.ids import new_guid
from shuffle.reducer.outputs.sink import Sink, SinkPlace

FOLDERS_MAX = 1_000
"""The most sub-folders with rows of one batch: more of them are a column with too many values."""

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
"""The value of rows that have none, as Hive, Spark and Arrow name it."""

_LASTING = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EROFS, errno.ENAMETOOLONG}
"""Errors of the system after which trying again is of no use. A full disk is none: room can be made."""


class ParquetSink(Sink):
    keeps_position = False

    def __init__(self, place: SinkPlace) -> None:
        self._uri = str(place.config["parquet"])
        self._columns = tuple(place.config["partition_by"])
        self._compression = str(place.config["compression"])
        self._stem = f"{place.name}-{place.partition}-"
        missing = [name for name in self._columns if name not in place.schema.names]
        if missing or len(self._columns) == len(place.schema.names):
            raise SpecError(
                f"{place.section}.partition_by: {', '.join(missing or self._columns)}: the rows have the "
                f"columns {', '.join(place.schema.names)}, at least one of which must stay in the files",
                field=f"{place.section}.partition_by",
            )
        self._files: Any = None
        self._folder = ""

    @property
    def identity(self) -> str:
        return f"parquet {self._uri}"

    def check_new(self) -> None:
        self._connect()
        for path in self._own_files():
            raise PositionLost(
                f"{self._uri} has files of an earlier processor of this name, such as {path}, and this one begins with "
                "an empty state: its files would get the same names. Give the output another folder, or move them away",
                path=path,
            )

    def open(self) -> int | None:
        self._connect()
        with _errors_named(self._uri):
            self._files.create_dir(self._folder, recursive=True)
        return None

    def _connect(self) -> None:
        with _errors_named(self._uri):
            if "://" in self._uri:
                self._files, self._folder = fs.FileSystem.from_uri(self._uri)
            else:
                self._files, self._folder = fs.LocalFileSystem(), self._uri

    def _own_files(self) -> Iterator[str]:
        """Files of this processor and partition that are there, in any sub-folder."""
        with _errors_named(self._uri):
            selector = fs.FileSelector(self._folder, allow_not_found=True, recursive=True)
            for found in self._files.get_file_info(selector):
                if found.base_name.startswith(self._stem) and found.base_name.endswith(".parquet"):
                    yield found.path

    # -- publishing ---------------------------------------------------------------------------------------------------

    def publish(self, rows: pa.Table, begin: int, end: int) -> None:
        name = f"{self._stem}{begin:012d}-{end:012d}.parquet"
        for folder, part in self._parts(rows):
            with _errors_named(self._uri):
                self._put(f"{self._folder}/{folder}".rstrip("/"), name, part)

    def _parts(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        """The rows of each sub-folder, in their order."""
        if not self._columns:
            yield "", rows
            return
        codes = np.zeros(rows.num_rows, dtype=np.int64)
        for name in self._columns:
            encoded = pa.chunked_array(rows[name]).combine_chunks().dictionary_encode("encode")
            codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy(zero_copy_only=False)
            codes = np.unique(codes, return_inverse=True)[1]  # So that the numbers stay small.
        order = np.argsort(codes, kind="stable")
        begins = np.flatnonzero(np.diff(codes[order], prepend=-1))
        if len(begins) > FOLDERS_MAX:
            raise SinkRefused(
                f"{self._uri}: {len(begins)} different values of {', '.join(self._columns)} in one batch of "
                f"{rows.num_rows} rows, and at most {FOLDERS_MAX} sub-folders are made at once: partition by something "
                "with fewer values, or set batch_rows_max"
            )
        for first, after in zip(begins, [*begins[1:], len(order)], strict=True):
            part = rows.take(order[first:after])
            values = [part[name][0].as_py() for name in self._columns]
            yield "/".join(map(_folder_name, self._columns, values)), part.drop_columns(list(self._columns))

    def _put(self, folder: str, name: str, rows: pa.Table) -> None:
        final = f"{folder}/{name}"
        if self._files.get_file_info(final).type != fs.FileType.NotFound:
            return
        if isinstance(self._files, fs.LocalFileSystem):
            self._put_local(folder, name, rows)
            return
        self._files.create_dir(folder, recursive=True)
        if self._files.type_name == "hdfs":
            beside = f"{folder}/.{name}.{new_guid()}.tmp"
            pq.write_table(rows, beside, filesystem=self._files, compression=self._compression)
            self._files.move(beside, final)
            return
        pq.write_table(rows, final, filesystem=self._files, compression=self._compression)

    def _put_local(self, folder: str, name: str, rows: pa.Table) -> None:
        """Write, sync, rename, and sync the folders that have a new name in them."""
        new_folders = _missing(folder)
        os.makedirs(folder, exist_ok=True)
        self._remove_leftovers(folder, name)
        beside = f"{folder}/.{name}.{new_guid()}.tmp"
        with open(beside, "wb") as file:
            pq.write_table(rows, file, compression=self._compression)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, f"{folder}/{name}")
        for changed in {folder, *(os.path.dirname(one) for one in new_folders)}:
            _sync_folder(changed)

    def _remove_leftovers(self, folder: str, name: str) -> None:
        """What an instance left behind that was killed while it wrote this file. If it lives, it writes it again."""
        with os.scandir(folder) as entries:
            left = [entry.path for entry in entries if entry.name.startswith(f".{name}.")]
        for path in left:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)


def _folder_name(column: str, value: object) -> str:
    text = NULL_FOLDER if value is None else quote(str(pc.cast(pa.scalar(value), pa.string())), safe="")
    return f"{quote(column, safe='')}={text}"


def _missing(folder: str) -> list[str]:
    """The folders of a path that are not there."""
    found = []
    while folder and not os.path.isdir(folder):
        found.append(folder)
        folder = os.path.dirname(folder)
    return found


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _errors_named(uri: str) -> Iterator[None]:
    """Errors of the file system, by whether they may pass."""
    try:
        yield
    except OSError as error:
        kind = SinkRefused if error.errno in _LASTING else ServiceUnavailable
        raise kind(f"{uri} cannot be written: {error}") from error
    except pa.ArrowException as error:
        raise SinkRefused(f"{uri} cannot be written: {error}") from error
