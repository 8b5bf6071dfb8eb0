"""What a Flight server makes of clients that leave, or send what is no message."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from shuffle.errors import BadInput
from shuffle.support.flight import check_schema, read_chunk

SCHEMA = pa.schema([("n", pa.int64())])


class _Reader:
    """The reader of an exchange whose client has left, as pyarrow behaves then."""

    @property
    def schema(self) -> Any:
        raise OSError("Client never sent a data message")

    def read_chunk(self) -> Any:
        raise OSError("Client never sent a data message")


@pytest.mark.parametrize("read", [read_chunk, lambda reader: check_schema(reader, SCHEMA)])
def test_client_that_left_before_its_first_message_is_a_typed_error(read: Any) -> None:
    with pytest.raises(BadInput, match="Client never sent"):
        read(_Reader())


def test_end_of_an_exchange_stays_the_end() -> None:
    class Ended:
        def read_chunk(self) -> Any:
            raise StopIteration

    with pytest.raises(StopIteration):
        read_chunk(Ended())
