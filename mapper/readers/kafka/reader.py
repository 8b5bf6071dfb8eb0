"""Reads one partition of a topic with the plain client, as ``read_committed``, from where a token says.

The client fetches ahead in threads of its own, and hands out messages that it keeps. Whatever it leaves out, records of
aborted transactions and the markers at the end of each transaction, is left out every time, so that rows get the same
numbers whenever they are read again. After the last row the client's own position is taken for the token, not "its
offset and one more": it has passed over the markers behind the row, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from shuffle.errors import OutOfRange, ServiceUnavailable, ShuffleError, SpecError
from shuffle.formats.base import Decoded
from shuffle.ids import Token
from shuffle.mapper.reader import PartitionReader
from shuffle.mapper.readers.kafka.client import FIXED, UNKNOWN, Cluster, made, typed
from shuffle.mapper.readers.kafka.columns import HEADERS, Records, headers_of, timestamps_of
from shuffle.mapper.readers.kafka.fast import FastPath
from shuffle.mapper.readers.kafka.positions import NO_EPOCH, Partition, Position, decode, encode, gone, made_anew
from shuffle.mapper.readers.kafka.record_batches import Unfit
from shuffle.mapper.readers.kafka.taken import Taken
from shuffle.support.logs import get_logger

MESSAGES_AT_ONCE = 1_000
"""The most messages that are taken from the client at once; more at a time are slower."""
ROWS_AT_ONCE = 16_384
"""The most rows of one read. While a mapper works on them, the client's threads fetch the next: of a hundred thousand
rows at a time they would have fetched all that they may long before, and then the mapper would wait for them."""
POLL_S = 0.1
"""The most seconds of one wait for a message, after which it is seen whether the reader is to stop."""
FIRST_WAIT_S = 10.0
"""The seconds for which the first fetch after a seek is waited for, whatever ``wait_ms`` says: only then is it known
whether there are records."""
SILENCE_S = 5.0
"""The seconds without any sign of a broker after which the trouble is reported, and waited for outside."""
LOOK_S = 0.25
"""The seconds between two looks at whether the topic is still the one that it was, while there are rows. To delete a
topic, to make it anew and to fill it up to where a reader stands takes longer."""
IDLE_LOOK_S = 5.0
"""The same while there are none."""
FAST_AGAIN_S = 10.0
"""The seconds for which the plain client reads after something that was not for the fast path."""

_log = get_logger(__name__)


class KafkaReader(PartitionReader):
    """One partition. ``starts`` returns the position at which a mapper without state begins."""

    def __init__(
        self,
        partition: Partition,
        settings: Mapping[str, Any],
        group: str,
        cluster: Cluster,
        records: Records,
        starts: Callable[[], Position],
        is_fast: bool = False,
    ) -> None:
        """``is_fast`` says that the fast path may be tried."""
        self._partition = partition
        self._cluster = cluster
        self._records = records
        self._starts = starts
        self._group = group
        self._trouble: KafkaError | None = None
        """The last error of the connection, since something was read."""
        self._heard_s = time.monotonic()
        self._looked_s = 0.0
        self._at: Position | None = None
        """Where the client stands: what was returned last."""
        self._fresh = True
        """Whether nothing has come since the client was told where to read."""
        self._interrupted = threading.Event()
        self._closing = threading.Lock()
        self._closed = False
        self._commit_failed = False
        self._fast = FastPath(partition, lambda: cluster.leader(partition)) if is_fast else None
        self._fast_from_s = 0.0
        """When the fast path is tried again, after something that it could not read."""
        self._consumer = made(lambda: Consumer({**settings, **FIXED, "group.id": group, "error_cb": self._on_error}))

    @property
    def schema(self) -> pa.Schema:
        return self._records.schema

    def start(self) -> Token:
        return encode(self._starts())

    def decode(self, rows: pa.Table) -> Decoded:
        return self._records.decode(rows)

    # Reading

    def read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        at = decode(token) if token else self._starts()
        rows_max = max(1, end_row_index - begin_row_index)
        # While no broker can be reached, it is the plain client that waits for one, and says so.
        if self._fast is not None and self._trouble is None and time.monotonic() >= self._fast_from_s:
            try:
                return self._read_fast(self._fast, rows_max, at)
            except (Unfit, ServiceUnavailable) as error:
                self._fast_from_s = time.monotonic() + FAST_AGAIN_S
                _log.info("reading with the plain client", partition=str(self._partition), reason=str(error))
        return self._read_plain(rows_max, at)

    def _read_fast(self, fast: FastPath, rows_max: int, at: Position) -> tuple[pa.Table, Token]:
        if self._at is not None:
            self._at = None
            self._consumer.unassign()  # It would fetch ahead what nobody takes.
        if self._looked_s == 0.0:
            self._look(at)
        columns, after = fast.read(at, rows_max, self.batch_bytes_max, self.wait_ms, self._interrupted)
        count = len(columns.offset)
        self._look_if_due(at, bool(count))
        given = {
            "value": columns.value,
            "key": columns.key,
            "offset": pa.array(columns.offset),
            "timestamp": timestamps_of(columns.timestamp_ms),
            "headers": pa.nulls(count, HEADERS) if columns.headers is None else list(map(headers_of, columns.headers)),
        }
        return self._records.table(given, count), encode(after)

    def _read_plain(self, rows_max: int, at: Position) -> tuple[pa.Table, Token]:
        if self._at != at:
            self._seek(at)
            self._look(at)
        try:
            taken = self._take(min(rows_max, ROWS_AT_ONCE), at)
            # After the rows were taken: if the topic is the same now, they are of the same. Without rows it is enough
            # to learn some time that there is no such topic any more; the client does not say so.
            self._look_if_due(at, bool(taken.count))
        except BaseException:
            self._at = None  # What was taken is lost to the client: it must be told again where to read.
            raise
        self._at = self._position(at, taken.last)
        return self._records.table(taken.columns(), taken.count), encode(self._at)

    def _seek(self, at: Position) -> None:
        self._fresh = True
        epoch = at.leader_epoch if at.leader_epoch >= 0 else None
        place = TopicPartition(self._partition.topic, self._partition.number, at.offset)
        if epoch is not None:
            place = TopicPartition(self._partition.topic, self._partition.number, at.offset, leader_epoch=epoch)
        try:
            self._consumer.assign([place])
        except KafkaException as error:
            raise typed(error.args[0], f"reading {self._partition}") from None
        self._at = at

    def _look_if_due(self, at: Position, has_rows: bool) -> None:
        if not has_rows and self._trouble is not None:
            return  # Nobody would answer.
        if time.monotonic() - self._looked_s > (LOOK_S if has_rows else IDLE_LOOK_S):
            self._look(at)

    def _look(self, at: Position) -> None:
        """Raise if the topic is another one than it was: the client goes on by its name."""
        now_s = time.monotonic()
        topic = self._cluster.topics([self._partition.topic])[self._partition.topic]
        if topic.topic_id != at.topic_id:
            raise made_anew(self._partition)
        self._looked_s = now_s

    def _take(self, rows_max: int, at: Position) -> Taken:
        """What is there; if there is nothing, wait for something."""
        taken = Taken(self._records.needs)
        left_bytes = self.batch_bytes_max
        now_s = time.monotonic()
        deadline_s = now_s + self.wait_ms / 1000
        while taken.count < rows_max and left_bytes > 0:
            wait_s = 0.0
            if not taken.count:
                until_s = max(deadline_s, now_s + FIRST_WAIT_S) if self._fresh else deadline_s
                wait_s = max(0.0, min(POLL_S, until_s - time.monotonic()))
                if self._interrupted.is_set():
                    break
            # For the first one alone: the client waits until it has as many as it was asked for.
            asked = 1 if wait_s else min(MESSAGES_AT_ONCE, rows_max - taken.count)
            batch = self._consumer.consume(asked, wait_s)
            if not batch:
                if taken.count or (wait_s == 0.0):
                    break
                self._complain()
                continue
            left_bytes -= taken.add(self._good(batch, at))
        return taken

    def _good(self, batch: list[Message], at: Position) -> list[Message]:
        """``batch`` without what is no record; raises what an error among them means."""
        self._fresh = False
        self._trouble = None
        self._heard_s = time.monotonic()
        errors = [message.error() for message in batch]
        if not any(errors):
            return batch
        for error in errors:
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                raise self._error(error, at)
        return [message for message, error in zip(batch, errors, strict=True) if error is None]

    def _error(self, error: KafkaError, at: Position) -> ShuffleError:
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION):
            self._look(at)
            earliest = self._cluster.earliest([self._partition])[self._partition]
            end = self._cluster.ends([self._partition])[self._partition]
            return OutOfRange(gone(self._partition, at.offset, earliest, end))
        if error.code() in UNKNOWN:
            try:
                self._look(at)
            except SpecError as what:
                return what
            return ServiceUnavailable(f"{self._partition}: {error.str()}; waiting for it")
        return typed(error, f"reading {self._partition}")

    def _complain(self) -> None:
        """Raise if no broker has been heard of for a while, so that whoever waits knows why."""
        if self._trouble is not None and time.monotonic() - self._heard_s > SILENCE_S:
            raise typed(self._trouble, f"reading {self._partition}")

    def _on_error(self, error: KafkaError) -> None:
        self._trouble = error

    def _position(self, at: Position, last: Message | None) -> Position:
        """The position after what was taken, over all that the client has left out."""
        [place] = self._consumer.position([TopicPartition(self._partition.topic, self._partition.number)])
        behind = -1 if last is None else (last.offset() or 0) + 1
        offset = max(at.offset, place.offset, behind)
        epoch = None if last is None else last.leader_epoch()
        return Position(at.topic_id, offset, at.leader_epoch if epoch is None else int(epoch))

    # Beside reading

    def trim(self, row_index: int, token: Token) -> None:
        """Tell the group how far this processor is, for those who watch it. Nothing is deleted or read back."""
        if not token:
            return
        position = decode(token)
        epoch = position.leader_epoch
        place = TopicPartition(self._partition.topic, self._partition.number, position.offset)
        if epoch != NO_EPOCH:
            place = TopicPartition(self._partition.topic, self._partition.number, position.offset, leader_epoch=epoch)
        with self._closing:
            if self._closed:
                return
            try:
                self._consumer.commit(offsets=[place], asynchronous=True)
                self._commit_failed = False
            except KafkaException as error:
                if not self._commit_failed:
                    _log.warning("progress not told to the group", group=self._group, error=error.args[0].str())
                self._commit_failed = True

    def lag_rows(self, token: Token) -> int | None:
        if not token:
            return None
        if self._fast is not None and self._fast.last_stable_offset is not None and self._at is None:
            return max(0, self._fast.last_stable_offset - decode(token).offset)
        with self._closing:
            if self._closed:
                return None
            place = TopicPartition(self._partition.topic, self._partition.number)
            bounds = self._consumer.get_watermark_offsets(place, cached=True)
        if bounds is None or bounds[1] < 0:
            return None
        return max(0, int(bounds[1]) - decode(token).offset)

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                if self._fast is not None:
                    self._fast.close()
                self._consumer.close()
