"""A fetcher's open exchange with one mapper: GetRows again and again, one at a time, without the cost of calls."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from shuffle.errors import ShuffleError, StoreUnavailable, TooLarge, from_wire
from shuffle.ids import ShuffleIndex
from shuffle.limits import BATCH_BYTES_MAX
from shuffle.messages import ROWS_EXCHANGE, SHARED_ROWS, STREAM_OVER, TAIL, GetRows, SharedRows, Tail
from shuffle.support import flight
from shuffle.support.logs import get_logger
from shuffle.support.shared_memory import MemoryReader, NotShared, machine


@dataclass(frozen=True, slots=True)
class RowsResponse:
    """What a mapper has responded to one GetRows."""

    batches: list[tuple[pa.RecordBatch, ShuffleIndex]] = field(default_factory=list)
    """Each with the shuffle index of its last row."""
    tails: list[Tail] = field(default_factory=list)
    """Of each batch; of a response without rows, the one that it has."""

    def add(self, batch: pa.RecordBatch, tail: Tail) -> None:
        self.batches.append((batch, tail.last_row_index))
        self.tails.append(tail)


STREAM_S_MAX = 5.0
"""An exchange is asked no more when it is this old. Flight bounds an exchange as a whole and not each answer, so this
is what keeps the wait for a single one bounded."""

_log = get_logger(__name__)


class RowStream:
    """Asks one mapper. Opens an exchange when there is none; one that broke is left, and the next question has another.

    Used by one thread.
    """

    def __init__(self, client: Any, who: str, share_memory: bool = True) -> None:
        self._client = client
        self._who = who
        self._machine = machine() if share_memory else None
        """Told to the mapper, until it turns out to be of no use."""
        self._memory = MemoryReader()
        self._writer: Any = None
        self._reader: Any = None
        self._opened_s = 0.0

    def get_rows(self, request: GetRows, timeout_s: float) -> RowsResponse:
        """One GetRows. The answer comes within ``timeout_s`` and ``STREAM_S_MAX``, or there is an error."""
        try:
            with flight.typed_errors(self._who):
                self._open(timeout_s)
                answer = self._ask(request)
        except StopIteration:
            self.close()
            raise StoreUnavailable(f"{self._who} ended the exchange without an answer", address=self._who) from None
        except BaseException:
            self.close()
            raise
        if isinstance(answer, ShuffleError):
            raise answer
        return answer

    def _open(self, timeout_s: float) -> None:
        if self._writer is not None and time.monotonic() - self._opened_s < STREAM_S_MAX:
            return
        self.close()
        descriptor = flight.FlightDescriptor.for_command(ROWS_EXCHANGE)
        options = flight.call_options(STREAM_S_MAX + timeout_s)
        self._writer, self._reader = self._client.do_exchange(descriptor, options)
        self._opened_s = time.monotonic()
        self._writer.begin(_NO_COLUMNS)

    def _ask(self, request: GetRows) -> RowsResponse | ShuffleError:
        try:
            self._writer.write_metadata(replace(request, machine=self._machine).encode())
            return self._answer(request)
        except NotShared as error:
            _log.info("rows of this mapper come over the wire, though it is on this machine", reason=str(error))
            self._machine = None
            self._writer.write_metadata(request.encode())
        try:
            return self._answer(request)
        except NotShared as error:
            raise ShuffleError(f"{self._who} tells of shared memory that it was not asked for: {error}") from error

    def _answer(self, request: GetRows) -> RowsResponse | ShuffleError:
        """The batches, or the error that the mapper answered: the exchange goes on after either."""
        answer = RowsResponse()
        size_bytes = 0
        while True:
            chunk = self._reader.read_chunk()
            told = b"" if chunk.app_metadata is None else bytes(chunk.app_metadata)
            if chunk.data is None or chunk.data.num_rows == 0:
                if told == STREAM_OVER:
                    self.close()
                elif told.startswith(b"{"):
                    return from_wire(told.decode("utf-8", "replace"))
                elif told.startswith(SHARED_ROWS):
                    return self._shared(SharedRows.decode(told), request)
                elif told.startswith(TAIL):
                    answer.tails.append(Tail.decode(told))
                else:
                    raise ShuffleError(f"{self._who} gave an answer that is none: is it a mapper of this version?")
                return answer
            if not told:
                raise ShuffleError(
                    f"{self._who} sent rows without their shuffle index: is it a mapper of this version?"
                )
            validate_offsets(chunk.data)
            tail = Tail.decode(told)
            size_bytes += chunk.data.nbytes
            if size_bytes > request.max_bytes + BATCH_BYTES_MAX:
                raise TooLarge(f"{self._who} sent more than {size_bytes} bytes, and {request.max_bytes} were asked for")
            answer.add(chunk.data, tail)
            if not tail.more:
                return answer

    def _shared(self, told: SharedRows, request: GetRows) -> RowsResponse:
        if told.handle.size_bytes > request.max_bytes + BATCH_BYTES_MAX:
            raise TooLarge(
                f"{self._who} tells of {told.handle.size_bytes} bytes, and {request.max_bytes} were asked for"
            )
        batches = self._memory.take(told.handle)
        if len(batches) != len(told.tails):
            raise ShuffleError(f"{self._who} tells of {len(told.tails)} batches, and there are {len(batches)}")
        answer = RowsResponse()
        for batch, tail in zip(batches, told.tails, strict=True):
            validate_offsets(batch)
            answer.add(batch, tail)
        return answer

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
    rows need from the input to here. The mapper that answers is one of ours; what this guards against is that a broken
    answer reads memory of this process.
    """
    batch.validate()
    for column in batch.columns:
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            if len(column):
                offsets = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, column.offset * 4)
                if not (offsets[1:] >= offsets[:-1]).all():
                    raise pa.ArrowInvalid("offsets of a column fall")
        elif not pa.types.is_primitive(kind):
            column.validate(full=True)


_NO_COLUMNS = pa.schema([])
