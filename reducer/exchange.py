"""A fetcher's open exchange with one mapper: GetRows again and again, one at a time, without the cost of calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from shuffle.errors import ShuffleError, StoreUnavailable, TooLarge, from_wire
from shuffle.ids import ShuffleIndex
from shuffle.limits import BATCH_BYTES_MAX
from shuffle.messages import ROWS_EXCHANGE, SHARED_ROWS, STREAM_OVER, TAIL, GetRows, SharedRows, Tail
from shuffle.messages_many import MANY_HEAD, ManyHead, PairAnswer, encode_many
from shuffle.support import flight
from shuffle.support.logs import get_logger
from shuffle.support.shared_memory import MemoryReader, NotShared, machine


@dataclass(frozen=True, slots=True)
class RowsResponse:
    """The response of a mapper to one GetRows."""

    batches: list[tuple[pa.RecordBatch, ShuffleIndex]] = field(default_factory=list)
    """The record batches, each with the shuffle index of its last row."""
    tails: list[Tail] = field(default_factory=list)
    """The tails of the batches; a response without rows has a single one."""
    is_early: bool = False
    """Whether there are no rows, but the mapper has not waited for them as long as it was asked to."""

    def add(self, batch: pa.RecordBatch, tail: Tail) -> None:
        self.batches.append((batch, tail.last_row_index))
        self.tails.append(tail)


ManyAnswer = RowsResponse | ShuffleError | None
"""The answer to one of many requests; None says that the request has to be made alone."""

T = TypeVar("T")

STREAM_S_MAX = 5.0
"""The seconds after which an exchange is used for no further request. Flight's timeout is for an exchange as a whole
and not for each response, so this bounds the wait for a single response."""

_log = get_logger(__name__)


class RowStream:
    """Sends requests to one mapper. Opens an exchange when there is none; after an error the exchange is closed, and
    the next request opens another.

    It is used by one thread, except for ``interrupt``.
    """

    def __init__(self, client: Any, who: str, share_memory: bool = True) -> None:
        self._client = client
        self._who = who
        self._machine = machine() if share_memory else None
        """The id of this machine, which requests name to offer shared memory; None if it cannot be used."""
        self._memory = MemoryReader()
        self._writer: Any = None
        self._reader: Any = None
        self._opened_s = 0.0

    def get_rows(self, request: GetRows, timeout_s: float) -> RowsResponse:
        """One GetRows. The response comes within ``timeout_s`` and ``STREAM_S_MAX`` together, or there is an error."""
        response = self._ask(
            lambda machine: request.encode(machine=machine),
            lambda: self._read_response(request),
            timeout_s,
        )
        if isinstance(response, ShuffleError):
            raise response
        return response

    def get_many(self, requests: Sequence[GetRows], wait_ms: int, timeout_s: float) -> list[ManyAnswer]:
        """An answer to each of many requests, in their order, or an error that is about all of them. The mapper waits
        ``wait_ms`` for rows of any of them."""
        return self._ask(
            lambda machine: encode_many(requests, machine=machine, wait_ms=wait_ms),
            lambda: self._read_many(requests),
            timeout_s,
        )

    def _ask(self, message: Callable[[str | None], bytes], read: Callable[[], T], timeout_s: float) -> T:
        """Send the message for this machine, and read the response."""
        try:
            with flight.typed_errors(self._who):
                self._open(timeout_s)
                return self._call(message, read)
        except StopIteration:
            self.close()
            raise StoreUnavailable(f"{self._who} ended the exchange without an answer", address=self._who) from None
        except BaseException:
            self.close()
            raise

    def _open(self, timeout_s: float) -> None:
        if self._writer is not None and time.monotonic() - self._opened_s < STREAM_S_MAX:
            return
        self.close()
        descriptor = flight.FlightDescriptor.for_command(ROWS_EXCHANGE)
        options = flight.call_options(STREAM_S_MAX + timeout_s)
        self._writer, self._reader = self._client.do_exchange(descriptor, options)
        self._opened_s = time.monotonic()
        self._writer.begin(_NO_COLUMNS)

    def _call(self, message: Callable[[str | None], bytes], read: Callable[[], T]) -> T:
        """Send the message and read the response; send it again without an offer of shared memory if that fails."""
        try:
            self._writer.write_metadata(message(self._machine))
            return read()
        except NotShared as error:
            _log.info("rows of this mapper come over the wire, though it is on this machine", reason=str(error))
            self._machine = None
            self._writer.write_metadata(message(None))
        try:
            return read()
        except NotShared as error:
            raise ShuffleError(f"{self._who} tells of shared memory that it was not asked for: {error}") from error

    def _read_response(self, request: GetRows) -> RowsResponse | ShuffleError:
        """The batches, or the error that the mapper sent: the exchange goes on after either."""
        response = RowsResponse()
        size_bytes = 0
        while True:
            chunk = self._reader.read_chunk()
            metadata = b"" if chunk.app_metadata is None else bytes(chunk.app_metadata)
            if chunk.data is None or chunk.data.num_rows == 0:
                if metadata == STREAM_OVER:
                    self.close()
                elif metadata.startswith(b"{"):
                    return from_wire(metadata.decode("utf-8", "replace"))
                elif metadata.startswith(SHARED_ROWS):
                    return self._read_shared(SharedRows.decode(metadata), request)
                elif metadata.startswith(TAIL):
                    response.tails.append(Tail.decode(metadata))
                else:
                    raise ShuffleError(f"{self._who} gave an answer that is none: is it a mapper of this version?")
                return response
            if not metadata:
                raise ShuffleError(
                    f"{self._who} sent rows without their shuffle index: is it a mapper of this version?"
                )
            validate_offsets(chunk.data)
            tail = Tail.decode(metadata)
            size_bytes += chunk.data.get_total_buffer_size()
            if size_bytes > request.max_bytes + BATCH_BYTES_MAX:
                raise TooLarge(f"{self._who} sent more than {size_bytes} bytes, and {request.max_bytes} were asked for")
            response.add(chunk.data, tail)
            if not tail.more:
                return response

    def _read_shared(self, shared: SharedRows, request: GetRows) -> RowsResponse:
        if shared.handle.size_bytes > request.max_bytes + BATCH_BYTES_MAX:
            raise TooLarge(
                f"{self._who} tells of {shared.handle.size_bytes} bytes, and {request.max_bytes} were asked for"
            )
        batches = self._memory.take(shared.handle)
        if len(batches) != len(shared.tails):
            raise ShuffleError(f"{self._who} tells of {len(shared.tails)} batches, and there are {len(batches)}")
        response = RowsResponse()
        for batch, tail in zip(batches, shared.tails, strict=True):
            validate_offsets(batch)
            response.add(batch, tail)
        return response

    def _read_many(self, requests: Sequence[GetRows]) -> list[ManyAnswer]:
        chunk = self._reader.read_chunk()
        metadata = b"" if chunk.app_metadata is None else bytes(chunk.app_metadata)
        if metadata == STREAM_OVER:
            self.close()
            return [RowsResponse(is_early=True) for _ in requests]
        if metadata.startswith(b"{"):
            raise from_wire(metadata.decode("utf-8", "replace"))
        if not metadata.startswith(MANY_HEAD):
            raise ShuffleError(f"{self._who} gave an answer that is none: is it a mapper of this version?")
        head = ManyHead.decode(metadata)
        if len(head.answers) != len(requests):
            raise ShuffleError(f"{self._who} gave {len(head.answers)} answers to {len(requests)} requests")
        bytes_max = sum(request.max_bytes for request in requests) + BATCH_BYTES_MAX
        answers: list[ManyAnswer] = []
        size_bytes = 0
        for answer in head.answers:
            if isinstance(answer, ShuffleError):
                answers.append(answer)
            elif not answer.tails:
                answers.append(None)
            else:
                response = self._rows_of(answer, head)
                size_bytes += sum(batch.get_total_buffer_size() for batch, _ in response.batches)
                if size_bytes > bytes_max:
                    raise TooLarge(f"{self._who} sent more than {size_bytes} bytes, which were not asked for")
                answers.append(response)
        return answers

    def _rows_of(self, answer: PairAnswer, head: ManyHead) -> RowsResponse:
        """The rows of one of many answers: from shared memory, or those that come next on the exchange."""
        if not answer.has_rows:
            return RowsResponse(tails=list(answer.tails), is_early=answer.is_early)
        if head.handle is None:
            batches = [self._reader.read_chunk().data for _ in answer.tails]
        else:
            batches = self._memory.take(head.handle, answer.begin_byte, answer.end_byte)
        if len(batches) != len(answer.tails) or any(batch is None for batch in batches):
            raise ShuffleError(f"{self._who} tells of {len(answer.tails)} batches, and there are {len(batches)}")
        response = RowsResponse()
        for batch, tail in zip(batches, answer.tails, strict=True):
            validate_offsets(batch)
            response.add(batch, tail)
        return response

    def interrupt(self) -> None:
        """Have the request that is under way end with an error soon. Any thread may call it."""
        reader = self._reader
        if reader is not None:
            with contextlib.suppress(Exception):
                reader.cancel()

    def close(self) -> None:
        self._memory.close()
        writer, reader = self._writer, self._reader
        self._writer = self._reader = None
        if writer is not None:
            # Whatever is wrong with it, it is not needed any more.
            with contextlib.suppress(Exception):
                reader.cancel()
            with contextlib.suppress(Exception):
                writer.close()


def validate_offsets(batch: pa.RecordBatch) -> None:
    """Make sure that no value of ``batch`` lies outside of its buffers; ``pa.ArrowInvalid`` if one does.

    A full validation would also read every text and count every null, which takes a fifth of the processor time that
    rows need from the input to here. Mappers are trusted; this only makes sure that a broken response cannot read other
    memory of this process.
    """
    batch.validate()
    for column in batch.columns:
        data_type = column.type
        if pa.types.is_string(data_type) or pa.types.is_binary(data_type):
            if len(column):
                offsets = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, column.offset * 4)
                if not (offsets[1:] >= offsets[:-1]).all():
                    raise pa.ArrowInvalid("offsets of a column fall")
        elif not pa.types.is_primitive(data_type):
            column.validate(full=True)


_NO_COLUMNS = pa.schema([])
