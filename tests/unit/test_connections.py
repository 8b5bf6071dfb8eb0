"""Flight clients that fetchers share: one for each address, and none of them waits for another."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa

from shuffle.ids import Guid, MapperIndex, ReducerIndex, ShuffleIndex, Token
from shuffle.mapper.core import MappedBatch, MapperCore
from shuffle.mapper.mapping import cut
from shuffle.mapper.serve import HostedMapper, MapperServer
from shuffle.mapper.shared_core import SharedCore
from shuffle.messages import ROWS_EXCHANGE, GetRows
from shuffle.reducer.connections import ClientPool
from shuffle.reducer.fetch import Connections
from shuffle.support import flight

SCHEMA = pa.schema([("v", pa.int64())])
ROWS = 4_000_000
"""32 MB: far more than any buffer on the way holds."""
BATCH_ROWS = 500_000


class Client:
    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_client_is_shared_by_address_and_closed_by_the_last_who_uses_it() -> None:
    clients = ClientPool(Client)
    one, other, elsewhere = clients.take("grpc://a:1"), clients.take("grpc://a:1"), clients.take("grpc://b:1")
    assert one is other
    assert one is not elsewhere
    clients.give_back(one)
    assert not one.client.closed
    clients.give_back(other)
    assert one.client.closed
    assert not elsewhere.client.closed
    assert clients.take("grpc://a:1") is not one


def test_client_that_is_broken_is_left_to_those_who_use_it_and_given_to_nobody_else() -> None:
    clients = ClientPool(Client)
    broken, same = clients.take("grpc://a:1"), clients.take("grpc://a:1")
    clients.give_back(broken, is_broken=True)
    fresh = clients.take("grpc://a:1")
    assert fresh is not broken
    assert not broken.client.closed, "somebody may be in the middle of an answer"
    clients.give_back(same, is_broken=True)
    assert broken.client.closed
    assert clients.take("grpc://a:1") is fresh


def test_answer_that_nobody_reads_does_not_hold_up_another_mapper_on_the_same_connection() -> None:
    shared = []
    for index in range(2):
        core = MapperCore(Guid(f"g{index}"), MapperIndex(index), 1, 1 << 30)
        shared.append(SharedCore(core, 1))
        rows = pa.table([np.arange(BATCH_ROWS)], schema=SCHEMA)
        parts = cut(rows, np.zeros(BATCH_ROWS, np.int64), 1)
        for _ in range(ROWS // BATCH_ROWS):
            shared[-1].ingest(None, BATCH_ROWS, Token(b"t"), MappedBatch(SCHEMA, BATCH_ROWS, parts))
    server = MapperServer([HostedMapper.of(one) for one in shared])
    clients = ClientPool()
    lazy, busy = Connections(False, clients), Connections(False, clients)

    def request(guid: str) -> GetRows:
        return GetRows(Guid(guid), ReducerIndex(0), ShuffleIndex(-1), ShuffleIndex(-1), ROWS, 1 << 30)

    descriptor = flight.FlightDescriptor.for_command(ROWS_EXCHANGE)
    writer, reader = lazy.to(server.address).do_exchange(descriptor, flight.call_options(30))
    writer.begin(pa.schema([]))
    writer.write_metadata(request("g0").encode())
    reader.read_chunk()  # The first of many: the rest of the answer is on its way, and is left there.
    begin_s = time.monotonic()
    answer = busy.stream_to(server.address, "mapper 1").get_rows(request("g1"), 10)
    assert sum(batch.num_rows for batch, _ in answer.batches) == ROWS
    assert time.monotonic() - begin_s < 5
    assert lazy.to(server.address) is busy.to(server.address)
    reader.cancel()
    lazy.close()
    busy.close()
    server.close()
