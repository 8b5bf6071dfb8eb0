"""Queues of the state store as an input: one partition of the queue is one of the input."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shuffle.errors import BadInput, SpecError
from shuffle.ids import Token
from shuffle.mapper.reader import BATCH_BYTES_MAX_DEFAULT, Input, PartitionReader
from shuffle.support.suggest import did_you_mean

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

PARTITIONS_SHOWN_MAX = 8
"""The most partitions that an error names; the rest are counted."""
QUEUES_SHOWN_MAX = 10
"""The most queues that an error names."""


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
        self.batch_bytes_max = batch_bytes_max
        self.wait_ms = wait_ms
        self._schema = self._queue.schema
        self._is_behind = False
        """Whether the last read returned as many rows as it was asked for, so that there are likely to be more."""

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def start(self) -> Token:
        begin, _ = self._queue.bounds()[self._partition]
        return encode_position(begin)

    def read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        position = decode_position(token or self.start())
        max_rows = max(1, end_row_index - begin_row_index)
        rows, after = self._queue.read(
            self._partition,
            position,
            max_rows=max_rows,
            max_bytes=self.batch_bytes_max,
            wait_ms=self.wait_ms,
            # Without a backlog the rows of one response are enough: a second request, only to learn that there are no
            # more, would take as long as the first.
            one_answer=not self._is_behind,
        )
        self._is_behind = rows.num_rows >= max_rows
        return rows, encode_position(after)

    def trim(self, row_index: int, token: Token) -> None:
        if token:
            self._queue.trim(self._partition, decode_position(token))

    def lag_rows(self, token: Token) -> int | None:
        begin, end = self._queue.bounds()[self._partition]
        return max(0, int(end) - (decode_position(token) if token else int(begin)))


class QueueInput(Input):
    """A queue of the state store. Its positions have no gaps, so they count rows."""

    def __init__(self, config: Mapping[str, Any], state: StateClient, folder: Path) -> None:
        super().__init__(config, state, folder)
        self.queue = self.consumes = str(config["queue"])

    def partition_count(self) -> int:
        queues = {queue.name: queue for queue in self.state.queues()}
        if self.queue not in queues:
            known = sorted(queues)
            hint = did_you_mean(self.queue, known)
            if not hint:
                hint = f"; there are {', '.join(known[:QUEUES_SHOWN_MAX])}" if known else "; the store has no queue yet"
                hint += ". Whoever fills it creates it: StateClient.create_queue, or Spark's sink"
            raise SpecError(f"there is no queue {self.queue!r}{hint}")
        return int(queues[self.queue].partitions)

    def open(self, partition: int) -> PartitionReader:
        return QueueReader(self.state, self.queue, partition)

    def trim(self, tokens: Mapping[int, Token]) -> bool:
        with self.state.transaction() as tx:
            for partition, token in tokens.items():
                if token:
                    tx.trim(self.queue, partition, decode_position(token))
            tx.commit()
        return True

    def describe(self) -> str:
        return f"queue {self.queue}"

    def ends(self) -> Mapping[int, Token] | None:
        return {index: encode_position(end) for index, (_, end) in enumerate(self._bounds())}

    def reached(self, partition: int, token: Token, end: Token | None) -> bool:
        if end is None:
            return super().reached(partition, token, end)
        position = decode_position(token) if token else self._bounds()[partition][0]
        return position >= decode_position(end)

    def rows_left(self, tokens: Mapping[int, Token]) -> Mapping[int, int]:
        return {
            index: end - max(begin, decode_position(tokens[index]) if tokens.get(index) else begin)
            for index, (begin, end) in enumerate(self._bounds())
        }

    def check_start(self, started: Callable[[], Mapping[int, Token]]) -> None:
        if self.config["start"] == "earliest_available":
            return
        bounds = self._bounds()
        with_state = started()
        trimmed = {index: begin for index, (begin, _) in enumerate(bounds) if begin > 0 and index not in with_state}
        if not trimmed:
            return
        named = list(trimmed.items())[:PARTITIONS_SHOWN_MAX]
        shown = ", ".join(f"partition {index} begins at row {begin}" for index, begin in named)
        more = f", and {len(trimmed) - len(named)} more" if len(trimmed) > len(named) else ""
        raise SpecError(
            f"rows of the queue {self.queue!r} were trimmed before this processor could read them: {shown}{more}; fill"
            f" another queue, or, if they are not wanted, write `input: {{queue: {self.queue}, start:"
            " earliest_available}`",
            queue=self.queue,
            begins=trimmed,
        )

    def _bounds(self) -> list[tuple[int, int]]:
        return [(int(begin), int(end)) for begin, end in self.state.queue(self.queue).bounds()]
