"""The boundary to an input of the user's own: checks what its methods raise and return.

What they raise becomes ``UserCodeError`` with the line it comes from, except for errors of this project: the user's
code may raise ``StoreUnavailable`` to be called again. What they return is checked once for each call, never for each
row.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from shuffle.errors import ShuffleError, UserCodeError
from shuffle.formats.base import Decoded
from shuffle.ids import Token
from shuffle.limits import TOKEN_BYTES_MAX
from shuffle.mapper.reader import Input, PartitionReader
from shuffle.user_code.poison import raised_at, reason_of

POLL_S = 0.1
"""The seconds after which a reader that returned no rows, and does not wait by itself, is called again."""


class _Boundary:
    """Names the class and the method in every error that a method of the user's class raises or causes."""

    def __init__(self, where: str, name: str) -> None:
        self._where = where
        self._name = name

    @contextmanager
    def calling(self, method: str) -> Iterator[None]:
        try:
            yield
        except ShuffleError:
            raise
        except Exception as error:
            raise self.error(method, f"{reason_of(error)}{raised_at(error)}") from error

    def error(self, method: str, what: str) -> UserCodeError:
        return UserCodeError(f"{self._where}: {self._name}.{method}: {what}")

    def token(self, method: str, token: Any) -> Token:
        if not isinstance(token, bytes):
            raise self.error(method, f"a token is bytes, not {type(token).__name__}")
        if len(token) > TOKEN_BYTES_MAX:
            raise self.error(method, f"a token of {len(token)} bytes; it may have {TOKEN_BYTES_MAX}")
        return Token(token)


class CheckedReader(PartitionReader):
    """A reader of the user's own, with checks around its methods."""

    def __init__(self, reader: PartitionReader, boundary: _Boundary) -> None:
        self._reader = reader
        self._boundary = boundary
        self._interrupted = threading.Event()
        self.closes: Input | None = None
        """The input to close together with this reader, if nobody else closes it."""
        with boundary.calling("schema"):
            schema = reader.schema
        if not isinstance(schema, pa.Schema):
            raise boundary.error("schema", f"must be a pyarrow.Schema, not {type(schema).__name__}")
        self._schema = schema
        self._decodes = type(reader).decode is not PartitionReader.decode

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        """Read again and again for ``wait_ms`` while there are no rows: a reader need not know how to wait."""
        deadline_s = time.monotonic() + self.wait_ms / 1000
        while True:
            rows, after = self._read(begin_row_index, end_row_index, token)
            left_s = deadline_s - time.monotonic()
            if rows.num_rows or after != token or left_s <= 0 or self._interrupted.wait(min(left_s, POLL_S)):
                return rows, after

    def _read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        self._reader.wait_ms, self._reader.batch_bytes_max = self.wait_ms, self.batch_bytes_max
        with self._boundary.calling("read"):
            result = self._reader.read(begin_row_index, end_row_index, token)
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._boundary.error("read", f"must return rows and a token, not {type(result).__name__}")
        rows, after = result
        if not isinstance(rows, pa.Table):
            raise self._boundary.error("read", f"must return a pyarrow.Table, not {type(rows).__name__}")
        if not self._decodes and not rows.schema.equals(self._schema):
            raise self._boundary.error("read", f"the rows are {_shown(rows.schema)}, the schema {_shown(self._schema)}")
        rows_max = max(1, end_row_index - begin_row_index)
        if rows.num_rows > rows_max:
            raise self._boundary.error("read", f"{rows.num_rows} rows, and {rows_max} at most were asked for")
        after = self._boundary.token("read", after)
        if rows.num_rows and after == token:
            raise self._boundary.error("read", "rows, and a token that has not moved: they would be read for ever")
        return rows, after

    def decode(self, rows: pa.Table) -> Decoded:
        if not self._decodes:
            return Decoded(rows)
        with self._boundary.calling("decode"):
            decoded = self._reader.decode(rows)
        if not isinstance(decoded, Decoded):
            raise self._boundary.error("decode", f"must return a Decoded, not {type(decoded).__name__}")
        if not decoded.rows.schema.equals(self._schema):
            columns = _shown(decoded.rows.schema)
            raise self._boundary.error("decode", f"the rows are {columns}, the schema {_shown(self._schema)}")
        return decoded

    def trim(self, row_index: int, token: Token) -> None:
        with self._boundary.calling("trim"):
            self._reader.trim(row_index, token)

    def start(self) -> Token:
        with self._boundary.calling("start"):
            token = self._reader.start()
        return self._boundary.token("start", token)

    def lag_rows(self, token: Token) -> int | None:
        with self._boundary.calling("lag_rows"):
            return self._reader.lag_rows(token)

    def interrupt(self) -> None:
        self._interrupted.set()
        with self._boundary.calling("interrupt"):
            self._reader.interrupt()

    def close(self) -> None:
        with self._boundary.calling("close"):
            self._reader.close()
        if self.closes is not None:
            self.closes.close()


class CheckedInput(Input):
    """An input of the user's own, with checks around its methods."""

    def __init__(self, inner: Input, where: str) -> None:
        super().__init__(inner.config, inner.state, inner.folder)
        self._inner = inner
        self._name = type(inner).__qualname__
        self._boundary = _Boundary(where, self._name)
        self._where = where
        self.consumes = inner.consumes

    def partition_count(self) -> int:
        with self._boundary.calling("partition_count"):
            count = self._inner.partition_count()
        if isinstance(count, bool) or not isinstance(count, int):
            raise self._boundary.error("partition_count", f"must return a whole number, not {count!r}")
        return count

    def partitions(self) -> str | None:
        self._inner.processor, self._inner.known_partitions = self.processor, self.known_partitions
        with self._boundary.calling("partitions"):
            numbers = self._inner.partitions()
        return None if numbers is None else str(numbers)

    def open(self, partition: int) -> PartitionReader:
        self._inner.processor, self._inner.known_partitions = self.processor, self.known_partitions
        with self._boundary.calling("open"):
            reader = self._inner.open(partition)
        if not isinstance(reader, PartitionReader):
            raise self._boundary.error("open", f"must return a PartitionReader, not {type(reader).__name__}")
        return CheckedReader(reader, _Boundary(self._where, type(reader).__qualname__))

    def trim(self, tokens: Mapping[int, Token]) -> bool:
        with self._boundary.calling("trim"):
            return bool(self._inner.trim(tokens))

    def describe(self) -> str:
        with self._boundary.calling("describe"):
            return str(self._inner.describe())

    def ends(self) -> Mapping[int, Token] | None:
        with self._boundary.calling("ends"):
            ends = self._inner.ends()
        return None if ends is None else {index: self._boundary.token("ends", end) for index, end in ends.items()}

    def reached(self, partition: int, token: Token, end: Token | None) -> bool:
        with self._boundary.calling("reached"):
            return bool(self._inner.reached(partition, token, end))

    def rows_left(self, tokens: Mapping[int, Token]) -> Mapping[int, int]:
        with self._boundary.calling("rows_left"):
            return self._inner.rows_left(tokens)

    def check_start(self, started: Callable[[], Mapping[int, Token]]) -> None:
        with self._boundary.calling("check_start"):
            self._inner.check_start(started)

    def close(self) -> None:
        with self._boundary.calling("close"):
            self._inner.close()


def _shown(schema: pa.Schema) -> str:
    return "{" + ", ".join(f"{field.name}: {field.type}" for field in schema) + "}"
