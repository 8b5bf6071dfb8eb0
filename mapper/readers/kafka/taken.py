"""Messages of the plain client, as columns that grow while they are taken.

The client hands out an object for each message. What is wanted of it is taken out at once, and the object is dropped:
a hundred thousand of them at a time would keep the client's buffers, leave the processor's caches, and have Python's
collector of garbage look at all of them again and again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import Message

from shuffle.mapper.readers.kafka.columns import headers_of, timestamps_of


class Taken:
    """The records of one read. ``needs`` are the parts of a record that are wanted."""

    def __init__(self, needs: Collection[str]) -> None:
        self._needs = needs
        self._values: list[bytes | None] = []
        self._offsets: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        self._keys: list[bytes | None] = []
        self._headers: list[Any] = []
        self._times_ms: list[int] = []
        self.last: Message | None = None
        """The message that was added last."""

    @property
    def count(self) -> int:
        return len(self._values)

    def add(self, messages: Sequence[Message]) -> int:
        """Add messages, none of which is an error; returns about how many bytes their values have."""
        if not messages:
            return 0
        self.last = messages[-1]
        self._values += [message.value() for message in messages]
        self._offsets.append(_offsets(messages))
        if "key" in self._needs:
            self._keys += [message.key() for message in messages]
        if "headers" in self._needs:
            self._headers += [headers_of(message.headers()) for message in messages]
        if "timestamp" in self._needs:
            self._times_ms += [message.timestamp()[1] for message in messages]
        # Of as many messages at most, the first and the last tell about how large they are.
        return len(messages) * (len(messages[0]) + len(messages[-1])) // 2

    def columns(self) -> dict[str, Any]:
        """What ``Records.table`` wants to know of each record."""
        offsets = np.concatenate(self._offsets) if self._offsets else np.empty(0, dtype=np.int64)
        found: dict[str, Any] = {"value": pa.array(self._values, pa.binary()), "offset": pa.array(offsets)}
        if "key" in self._needs:
            found["key"] = self._keys
        if "headers" in self._needs:
            found["headers"] = self._headers
        if "timestamp" in self._needs:
            found["timestamp"] = timestamps_of(self._times_ms)
        return found


def _offsets(messages: Sequence[Message]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The offset of each message. Mostly there is no gap between them, and two are enough to know it."""
    first, last = messages[0].offset(), messages[-1].offset()
    if first is not None and last is not None and last - first + 1 == len(messages):
        return np.arange(first, last + 1, dtype=np.int64)
    return np.array([message.offset() for message in messages], dtype=np.int64)
