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
    """The response of a mapper to one GetRows."""

    batches: list[tuple[pa.RecordBatch, ShuffleIndex]] = field(default_factory=list)
    """The record batches, each with the shuffle index of its last row."""
    tails: list[Tail] = field(default_factory=list)
    """The tails of the batches; a response without rows has a single one."""

    def add(self, batch: pa.RecordBatch, tail: Tail) -> None:
        self.batches.append((batch, tail.last_row_index))
        self.tails.append(tail)


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
        try:
            with flight.typed_errors(self._who):
                self._open(timeout_s)
                response = self._call(request)
        except StopIteration:
            self.close()
            raise StoreUnavailable(f"{self._who} ended the exchange without an answer", address=self._who) from None
        except BaseException:
            self.close()
            raise
        if isinstance(response, ShuffleError):
            raise response
        return response

    def _open(self, timeout_s: float) -> None:
        if self._writer is not None and time.monotonic() - self._opened_s < STREAM_S_MAX:
            return
        self.close()
        descriptor = flight.FlightDescriptor.for_command(ROWS_EXCHANGE)
        options = flight.call_options(STREAM_S_MAX + timeout_s)
        self._writer, self._reader = self._client.do_exchange(descriptor, options)
        self._opened_s = time.monotonic()
        self._writer.begin(_NO_COLUMNS)

    def _call(self, request: GetRows) -> RowsResponse | ShuffleError:
        """Send ``request`` and read the response; send it again without an offer of shared memory if that fails."""
        try:
            self._writer.write_metadata(replace(request, machine=self._machine).encode())
            return self._read_response(request)
        except NotShared as error:
            _log.info("rows of this mapper come over the wire, though it is on this machine", reason=str(error))
            self._machine = None
            self._writer.write_metadata(request.encode())
        try:
            return self._read_response(request)
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
