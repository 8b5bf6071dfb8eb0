"""Spilled batches: written and read back, answered in pieces, and trimmed as they are committed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import shuffle.mapper.spill.format as spill_format
from shuffle.durable.spill_ends import SpillEnd
from shuffle.durable.tables import spill_queue
from shuffle.errors import CommitUnknown, CorruptData, RowsGone
from shuffle.ids import NOTHING_COMMITTED, Guid, MapperIndex, ReducerIndex, ShuffleIndex
from shuffle.mapper.core import MapperCore
from shuffle.mapper.readers.queue import QueueReader
from shuffle.mapper.spill.format import SpillHead, SpillPart, decode_batch, decode_heads, encode
from shuffle.mapper.spill.index import Spill
from shuffle.mapper.spill.response import SpillRead, SpillResponse
from shuffle.mapper.spill.store import SpillStore
from shuffle.mapper.trim import Trimmer
from shuffle.messages import METADATA_FIELDS
from shuffle.spec.config import Compression
from shuffle.statestore import StateClient, Transaction


def part(indexes: list[int], time_us: int = 7, width: int = 10) -> SpillPart:
    rows = pa.record_batch({"v": [f"{index}:" + "x" * width for index in indexes]})
    return SpillPart(rows, np.array(indexes, np.int64), np.full(len(indexes), time_us, np.int64))


def read_all(
    table: pa.Table,
    cursor: int = -1,
    to: int | None = None,
    max_rows: int = 100,
    max_bytes: int = 1 << 20,
    with_metadata: bool = False,
) -> SpillResponse:
    end = SpillEnd(table.num_rows)
    read = SpillRead(
        ReducerIndex(1),
        Spill(end, 0, 0, 0),
        0,
        table.num_rows,
        ShuffleIndex(cursor),
        None if to is None else ShuffleIndex(to),
        max_rows,
        max_bytes,
        with_metadata,
    )
    answer = SpillResponse(read, 1 << 20)
    for at, head in enumerate(decode_heads(table, 0)):
        if head.last_row_index > cursor and not answer.add(decode_batch(table, at, head)):
            break
    return answer


def indexes_of(answer: SpillResponse) -> list[int]:
    return [int(value.split(":")[0]) for one in answer.served for value in one.rows["v"].to_pylist()]


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_rows_come_back_with_their_indexes(compression: Compression) -> None:
    table, end = encode([part([3, 4, 900]), part([70_000, 2**40])], SpillEnd(), NOTHING_COMMITTED, compression, 5)
    assert (end.position, end.last_row_index, end.rows, end.since_ms) == (table.num_rows, 2**40, 5, 5)
    answer = read_all(table)
    assert indexes_of(answer) == [3, 4, 900, 70_000, 2**40]
    assert answer.served[-1].last_row_index == 2**40


def test_rows_that_were_encoded_are_let_go() -> None:
    """An outage may last for days, and all that is spilled meanwhile goes through here."""
    before = pa.total_allocated_bytes()
    for compression in ("none", "lz4"):
        table, _ = encode([part(list(range(1000)), width=2000)], SpillEnd(), NOTHING_COMMITTED, compression, 1)
        assert table.num_rows == 1
    del table
    assert pa.total_allocated_bytes() < before + (1 << 20)


def test_small_parts_share_a_batch_and_large_ones_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_format, "BATCH_BYTES", 1_000)
    small = [part([index]) for index in range(20)]
    large = part(list(range(100, 160)), width=100)
    table, end = encode([*small, large], SpillEnd(), NOTHING_COMMITTED, "none", 0)
    assert 5 < table.num_rows < 20
    assert max(table["bytes"].to_pylist()) < 2_000
    assert end.nbytes == sum(table["bytes"].to_pylist())
    assert indexes_of(read_all(table)) == [*range(20), *range(100, 160)]


def test_time_of_each_row_survives_the_joining_of_parts() -> None:
    table, _ = encode([part([0, 1], 11), part([5], 12), part([6], 12)], SpillEnd(), NOTHING_COMMITTED, "lz4", 0)
    assert table.num_rows == 1
    (served,) = read_all(table, cursor=0, with_metadata=True).served
    assert served.rows.schema.names == ["v", *(field.name for field in METADATA_FIELDS)]
    assert served.rows["_shuffle_index"].to_pylist() == [1, 5, 6]
    assert served.rows["_ingestion_time"].cast(pa.int64()).to_pylist() == [11, 12, 12]


def test_answer_keeps_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_format, "BATCH_BYTES", 30)
    table, _ = encode([part([2, 4, 6, 8, 10, 12])], SpillEnd(), NOTHING_COMMITTED, "none", 0)
    assert table.num_rows > 1
    assert indexes_of(read_all(table, cursor=4)) == [6, 8, 10, 12]
    assert indexes_of(read_all(table, cursor=5, max_rows=2)) == [6, 8]
    assert indexes_of(read_all(table, cursor=2, to=9)) == [4, 6, 8]
    assert indexes_of(read_all(table, cursor=8, to=9)) == []
    assert indexes_of(read_all(table, max_bytes=1)) == [2], "one row at least, or the reducer would stand still"


def test_reader_below_what_was_committed_gets_an_error_and_no_hole() -> None:
    first, end = encode([part([1, 2])], SpillEnd(), NOTHING_COMMITTED, "none", 0)
    second, _ = encode([part([8, 9])], end, ShuffleIndex(5), "none", 0)
    assert indexes_of(read_all(second, cursor=5)) == [8, 9]
    with pytest.raises(RowsGone) as error:
        read_all(second, cursor=2)
    assert error.value.dropped_row_index == 5
    assert indexes_of(read_all(pa.concat_tables([first, second]), cursor=0)) == [1, 2], "it ends before the hole"


def test_damaged_batch_is_refused() -> None:
    table, _ = encode([part([1, 2, 3])], SpillEnd(), NOTHING_COMMITTED, "none", 0)
    wrong = table.set_column(table.schema.get_field_index("rows"), "rows", pa.array([4]))
    with pytest.raises(CorruptData, match="4 rows"):
        decode_batch(wrong, 0, decode_heads(wrong, 0)[0])


def head(position: int, last: int, rows_after: int) -> SpillHead:
    return SpillHead(position, ShuffleIndex(last), rows_after, rows_after * 10)


def test_spill_forgets_batches_that_are_wholly_committed() -> None:
    one = Spill(SpillEnd(4, ShuffleIndex(39), 40, 400), 0, 0, 0)
    assert (one.rows, one.nbytes, one.position_after(ShuffleIndex(15))) == (40, 400, 0)
    one.learn([head(0, 9, 10), head(1, 19, 20)])
    assert one.position_after(ShuffleIndex(9)) == 1
    assert one.position_after(ShuffleIndex(25)) == 2, "what was not read yet may hold it"
    one.commit(ShuffleIndex(15))
    assert (one.begin, one.rows, one.freed) == (1, 30, 9), "the second batch is only partly committed"
    one.learn([head(3, 39, 40)])
    assert one.position_after(ShuffleIndex(25)) == 2, "a batch that does not follow is of no use"
    one.commit(ShuffleIndex(39))
    assert one.is_empty
    assert (one.begin, one.rows, one.nbytes, one.freed) == (4, 0, 0, 39)


def test_empty_spill_begins_anew_where_it_ended() -> None:
    one = Spill(SpillEnd(4, ShuffleIndex(39), 40, 400), 4, 40, 400)
    assert one.is_empty
    one.extend(SpillEnd(6, ShuffleIndex(90), 55, 550))
    assert (one.begin, one.rows, one.nbytes, one.is_empty) == (4, 15, 150, False)


def test_trim_of_the_spill_that_was_not_answered_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, end = encode([part([0, 1])], SpillEnd(), NOTHING_COMMITTED, "none", 0)
    reducer = ReducerIndex(0)
    with StateClient.open(tmp_path) as client:
        queue = client.create_queue(spill_queue("job", 0), spill_format.SPILL_SCHEMA, 1)
        queue.append(0, table)
        client.create_queue("in", pa.schema([("n", pa.int64())]), 1)
        core = MapperCore(Guid("g"), MapperIndex(0), 1, 1 << 30)
        core.load_spill({reducer: Spill(end, 0, 0, 0)})
        core.spilling.spills[reducer].commit(ShuffleIndex(1))
        core.learn_committed({reducer: ShuffleIndex(1)})
        store = SpillStore(client, "job", MapperIndex(0), 1)
        trimmer = Trimmer(client, "job", core, QueueReader(client, "in", 0), threading.Lock(), spill=store)

        def unanswered(self: Any, *args: Any) -> Any:
            raise CommitUnknown("the connection broke")

        with monkeypatch.context() as lost:
            lost.setattr(Transaction, "commit", unanswered)
            trimmer._trim_spill()
        assert queue.bounds() == [(0, 1)]
        trimmer._trim_spill()
        assert queue.bounds() == [(1, 1)]
        assert not core.spilling.trims()
