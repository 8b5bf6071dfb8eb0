"""Reading one partition of the input: the contract, and the reader for queues of the state store.

``read`` returns the rows after a continuation token and the token after them. Rows must come in the same order, with
the same content, every time; how many come at once is free. Only the token says where they stand, so positions in the
input need not be consecutive.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import pyarrow as pa

from shuffle.errors import BadInput, SpecError
from shuffle.ids import Token
from shuffle.limits import MIB

if TYPE_CHECKING:
    from shuffle.spec.config import InputSpec, MapperSpec
    from shuffle.statestore import StateClient

BATCH_BYTES_MAX_DEFAULT = 16 * MIB

START = Token(b"")
"""The token of a mapper that never ran: the beginning of what the partition holds."""


class PartitionReader(ABC):
    """One partition of the input. Rows must come in the same order, with the same content, whenever they are read."""

    wait_ms: int = 0
    """How many milliseconds ``read`` may wait for rows when there are none."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The schema of the rows that ``read`` returns. It is always the same."""

    @abstractmethod
    def read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        """The next rows after ``token``, and the token after them.

        They get the indexes from ``begin_row_index`` on in the mapper's input numbering; ``end_row_index`` bounds how
        many are wanted. No rows is an answer too, given after ``wait_ms`` at the latest; its token may have moved over
        a gap.
        """

    @abstractmethod
    def trim(self, row_index: int, token: Token) -> None:
        """Everything before ``token`` is committed and may be deleted. Idempotent; may act later.

        It is called from another thread than ``read``.
        """

    def start(self) -> Token:
        """The token of the first row there is now.

        It is persisted before anything is read, so that the numbering has a fixed origin even if the input is trimmed
        by others before this mapper first persists its progress.
        """
        return START

    def lag_rows(self, token: Token) -> int | None:
        """How many rows there are after ``token``, if that is cheap to know."""
        return None

    def interrupt(self) -> None:  # noqa: B027 (most readers have nothing to do)
        """Make a ``read`` that waits return soon. Called from another thread."""

    def close(self) -> None:  # noqa: B027 (as above)
        """Release what is open. Nothing is read afterwards."""


def encode_position(position: int) -> Token:
    return Token(struct.pack(">q", position))


def decode_position(token: Token) -> int:
    if len(token) != 8:
        raise BadInput(
            f"a token of {len(token)} bytes is not a position in a queue: was the input of the processor changed?"
        )
    position: int = struct.unpack(">q", token)[0]
    return position


class QueueReader(PartitionReader):
    """A partition of a queue of the state store. The token is the position of the next row, in eight bytes."""

    def __init__(
        self,
        client: StateClient,
        queue: str,
        partition: int,
        *,
        wait_ms: int = 0,
        batch_bytes_max: int = BATCH_BYTES_MAX_DEFAULT,
    ) -> None:
        self._queue = client.queue(queue)
        self._partition = partition
        self._batch_bytes_max = batch_bytes_max
        self.wait_ms = wait_ms
        self._schema = self._queue.schema

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def start(self) -> Token:
        begin, _ = self._queue.bounds()[self._partition]
        return encode_position(begin)

    def read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        position = decode_position(token or self.start())
        rows, after = self._queue.read(
            self._partition,
            position,
            max_rows=max(1, end_row_index - begin_row_index),
            max_bytes=self._batch_bytes_max,
            wait_ms=self.wait_ms,
            # To hear that there is no more would take as long as to hear of what there is.
            one_answer=True,
        )
        return rows, encode_position(after)

    def trim(self, row_index: int, token: Token) -> None:
        if token:
            self._queue.trim(self._partition, decode_position(token))

    def lag_rows(self, token: Token) -> int | None:
        begin, end = self._queue.bounds()[self._partition]
        return max(0, int(end) - (decode_position(token) if token else int(begin)))


def open_reader(spec: InputSpec, index: int, client: StateClient, mapper: MapperSpec | None = None) -> PartitionReader:
    """The reader for partition ``index`` of the input that ``spec`` names."""
    wait_ms = 0 if mapper is None else mapper.read_wait_ms
    batch_bytes_max = BATCH_BYTES_MAX_DEFAULT if mapper is None else mapper.batch_bytes_max
    if spec.queue is not None:
        return QueueReader(client, spec.queue, index, wait_ms=wait_ms, batch_bytes_max=batch_bytes_max)
    if spec.folder is None:
        raise SpecError("the input names neither a queue nor a folder")
    # Only here, since Parquet's library would weigh on every mapper that reads a queue.
    from shuffle.mapper.readers.folder import FolderReader, partition_folders

    folders = partition_folders(spec.folder)
    if index >= len(folders):
        raise SpecError(f"there is no partition {index}: {spec.folder} has {len(folders)} sub-folders")
    return FolderReader(folders[index], format=spec.format, wait_ms=wait_ms, batch_bytes_max=batch_bytes_max)


def partition_count(spec: InputSpec, client: StateClient) -> int:
    """How many partitions the input has, and so how many mappers there are."""
    if spec.queue is not None:
        return int(client.queue(spec.queue).partitions)
    from shuffle.mapper.readers.folder import partition_folders

    return len(partition_folders(spec.folder or ""))
