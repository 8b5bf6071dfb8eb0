"""Messages of many pairs: what is encoded is decoded again, and what is not such a message is refused."""

from __future__ import annotations

import pytest

from shuffle.errors import BadInput, RowsGone, ShuffleError, TooLarge, WrongVersion
from shuffle.ids import Guid, ReducerIndex, ShuffleIndex
from shuffle.messages import GetRows, Tail
from shuffle.messages_many import PAIRS_MAX, ManyHead, PairAnswer, decode_many, encode_many
from shuffle.support.shared_memory import MemoryHandle


def request(reducer: int = 0) -> GetRows:
    return GetRows(Guid("g"), ReducerIndex(reducer), ShuffleIndex(3), ShuffleIndex(5), 10, 100, wait_ms=7)


def tail(last: int, more: bool = False) -> Tail:
    return Tail(ShuffleIndex(last), ShuffleIndex(last + 1), None, 4, more)


ANSWERS = (
    PairAnswer((tail(1),)),
    PairAnswer((tail(2),), is_early=True),
    PairAnswer((tail(3, more=True), tail(4)), True, False, 128, 4096),
    PairAnswer(),
)


def test_requests_come_through_with_the_fields_that_all_of_them_share() -> None:
    decoded = decode_many(encode_many([request(0), request(1)], machine="m", wait_ms=9))
    assert [(one.reducer_index, one.machine, one.wait_ms, one.from_row_index) for one in decoded] == [
        (0, "m", 9, 5),
        (1, "m", 9, 5),
    ]


@pytest.mark.parametrize("handle", [None, MemoryHandle(7, 8, 9, 5000)])
def test_head_comes_through_with_every_kind_of_answer(handle: MemoryHandle | None) -> None:
    error = RowsGone("gone", reducer=3)
    decoded = ManyHead.decode(ManyHead([*ANSWERS, error], handle).encode())
    assert decoded.handle == handle
    assert tuple(decoded.answers[:4]) == ANSWERS
    assert isinstance(decoded.answers[4], RowsGone)
    assert decoded.answers[4].message == "gone"


def test_head_that_is_cut_off_anywhere_is_bad_input() -> None:
    encoded = ManyHead([*ANSWERS, ShuffleError("no")], None).encode()
    for size in range(len(encoded)):
        with pytest.raises(BadInput):
            ManyHead.decode(encoded[:size])
    with pytest.raises(BadInput):
        ManyHead.decode(encoded + b"x")


@pytest.mark.parametrize("answer", [b"", b"x", b"*", b"-"])
def test_head_with_an_answer_that_is_none_is_bad_input(answer: bytes) -> None:
    head = ManyHead([PairAnswer()]).encode()[:-1]
    with pytest.raises(BadInput):
        ManyHead.decode(head + answer)


def test_head_of_rows_without_batches_is_out_of_range() -> None:
    encoded = ManyHead([PairAnswer((), True)]).encode()
    with pytest.raises(ShuffleError, match="batches"):
        ManyHead.decode(encoded)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (b"[", BadInput),
        (b"[]", BadInput),
        (b"[1]", BadInput),
        (b'[{"version": 1}]', WrongVersion),
        (encode_many([request()] * (PAIRS_MAX + 1)), BadInput),
        (b"[" + b" " * (1 << 17) + b"]", TooLarge),
    ],
)
def test_requests_that_are_none_are_refused(message: bytes, error: type[ShuffleError]) -> None:
    with pytest.raises(error):
        decode_many(message)


def test_as_many_requests_as_there_may_be_are_not_too_large() -> None:
    longest = GetRows(
        Guid("g" * 64),
        ReducerIndex(2**31),
        ShuffleIndex(2**62),
        ShuffleIndex(2**62),
        2**40,
        2**40,
        wait_ms=60_000,
        machine="m" * 64,
        processor="p" * 255,
    )
    assert len(decode_many(encode_many([longest] * PAIRS_MAX))) == PAIRS_MAX
