"""The yardstick of the state store: ``rocksdict`` alone, in this process.

The keys and values are the same bytes that the store keeps for the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rocksdict import Options, Rdict, WriteBatch, WriteOptions


class RawRocks:
    """A database of its own in ``folder``, with the library's default options."""

    def __init__(self, folder: Path) -> None:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        self._database = Rdict(str(folder), options)
        self._synced = WriteOptions()
        self._synced.sync = True

    def put_synced(self, key: bytes, value: bytes) -> None:
        """Write one key, which is durable on return."""
        self._database.put(key, value, write_opt=self._synced)

    def write_synced(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Write one batch, which is durable on return."""
        batch = WriteBatch(raw_mode=True)
        put = batch.put
        for key, value in zip(keys, values, strict=True):
            put(key, value)
        self._database.write(batch, write_opt=self._synced)

    def multi_get(self, keys: list[Any]) -> list[bytes | None]:
        """The values of ``keys`` (bytes), in one call."""
        found: Any = self._database[keys]
        return list(found)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> RawRocks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
