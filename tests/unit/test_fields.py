"""Fields of messages: what fits a declaration, what is refused, and that every message of the store has one."""

from __future__ import annotations

import contextlib
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shuffle.errors import BadInput, OutOfRange, TooLarge, WrongVersion
from shuffle.ids import Guid, ReducerIndex, ShuffleIndex
from shuffle.limits import TICKET_BYTES_MAX
from shuffle.messages import GENERATION_MAX, GetRows, SharedRows, Tail
from shuffle.statestore.wire.operations import CONTROL, OPERATIONS, SECTIONS, check_request, check_response
from shuffle.statestore.wire.proto import control_pb2 as pb
from shuffle.support.fields import Checker, Field, check_fields, check_items, flag, number, parse_json, text
from shuffle.support.shared_memory import MemoryHandle

FIELDS = (
    number("n", 9, low=-1),
    number("maybe", optional=True),
    text("name", high=4, optional=True),
    Field("id", str, 2, 2, optional=True, pattern=re.compile("[ab]{2}")),
    flag("on", needs="n"),
    Field("parts", list, optional=True),
)


@pytest.mark.parametrize(
    "message",
    [
        {"n": 0},
        {"n": -1, "maybe": None, "name": "ä é"[:2], "id": "ab", "on": True, "parts": []},
        {"n": 9, "maybe": 2**63 - 1, "name": "abcd", "on": False, "more": "is not looked at"},
    ],
)
def test_what_fits_is_taken(message: dict[str, Any]) -> None:
    check_fields("a message", FIELDS, message)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"n": None}, BadInput),
        ({"n": 10}, OutOfRange),
        ({"n": -2}, OutOfRange),
        ({"n": 2**70}, OutOfRange),
        ({"n": True}, BadInput),
        ({"n": 1.0}, BadInput),
        ({"n": float("nan")}, BadInput),
        ({"n": "1"}, BadInput),
        ({"n": [1]}, BadInput),
        ({"maybe": 2**63}, OutOfRange),
        ({"maybe": False}, BadInput),
        ({"name": ""}, BadInput),
        ({"name": "äää"}, BadInput),
        ({"name": "\ud800"}, BadInput),
        ({"name": b"ab"}, BadInput),
        ({"id": "ac"}, BadInput),
        ({"on": 1}, BadInput),
        ({"parts": {}}, BadInput),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], kind: type[BadInput]) -> None:
    with pytest.raises(kind) as caught:
        check_fields("a message", FIELDS, {"n": 0, **change})
    assert caught.value.field == next(iter(change))
    assert caught.value.message.startswith("a message: ")
    assert len(caught.value.message) < 200


def test_a_field_that_needs_another_is_refused_without_it() -> None:
    fields = (number("a", optional=True), flag("b", needs="a"))
    check_fields("a message", fields, {"b": False})
    with pytest.raises(BadInput, match="b without a"):
        check_fields("a message", fields, {"b": True})


@pytest.mark.parametrize("check", [check_fields, lambda what, fields, message: Checker(what, fields).check(message)])
def test_a_number_that_needs_another_field_is_refused_without_it_also_if_it_is_zero(check: Any) -> None:
    fields = (number("a", optional=True), number("b", optional=True, needs="a"))
    check("a message", fields, {"a": 0, "b": 0})
    check("a message", fields, {})
    with pytest.raises(BadInput, match="b without a"):
        check("a message", fields, {"b": 0})


def test_places_are_as_many_as_there_are_fields() -> None:
    fields = (number("a"), text("b", optional=True))
    check_items("a message", fields, [1, None])
    for items in ([1], [1, "b", 2], [], [None, "b"]):
        with pytest.raises(BadInput):
            check_items("a message", fields, items)


VALUES = st.one_of(
    st.none(),
    st.sampled_from([-2, -1, 0, 9, 10, 2**63 - 1, 2**63, 2**70, True, False, 1.0, "", "ab", "abcd", "äää", "\ud800"]),
    st.sampled_from([b"ab", [], [1], {}]),
)


def refusal(check: Callable[..., None], *arguments: Any) -> tuple[type[BadInput], str, Any] | None:
    try:
        check(*arguments)
    except BadInput as error:
        return type(error), error.message, error.fields
    return None


@given(message=st.dictionaries(st.sampled_from([field.name for field in FIELDS] + ["more"]), VALUES))
def test_checker_says_of_a_message_what_the_function_does(message: dict[str, Any]) -> None:
    expected = refusal(check_fields, "a message", FIELDS, message)
    assert refusal(Checker("a message", FIELDS).check, message) == expected


@given(items=st.lists(VALUES, min_size=len(FIELDS) - 1, max_size=len(FIELDS) + 1))
def test_checker_says_of_places_what_the_function_does(items: list[Any]) -> None:
    expected = refusal(check_items, "a message", FIELDS, items)
    assert refusal(Checker("a message", FIELDS).check_items, items) == expected


def test_checker_takes_what_is_right() -> None:
    right = {"n": -1, "maybe": None, "name": "ä é"[:2], "id": "ab", "on": True, "parts": []}
    checker = Checker("a message", FIELDS)
    checker.check(right)
    checker.check_items(list(right.values()))


@pytest.mark.parametrize("data", [b" [1]", b"[1]\n", "\t[1] \r\n"])
def test_white_space_around_json_is_none_of_it(data: bytes | str) -> None:
    assert parse_json(data) == [1]


@pytest.mark.parametrize(
    "data",
    [
        b"[1] 2",
        b"[1]]",
        b"",
        b" ",
        b"NaN",
        b"[Infinity]",
        b'{"a":-Infinity}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff",
    ],
)
def test_what_is_not_json_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(data)


@given(data=st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_json_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse_json(data)


# --- every message has its table ---


def test_every_method_of_the_control_plane_has_its_fields_declared() -> None:
    methods = pb.DESCRIPTOR.services_by_name["Control"].methods
    assert {method.name for method in methods} == set(CONTROL)
    for method in methods:
        declared = {field.name for field in CONTROL[method.name]}
        given_fields = {field.name for field in method.input_type.fields}
        assert declared <= given_fields
        # A bool is one or the other, and the attributes of a member are bounded as a whole, by the leases.
        assert given_fields - declared <= {"if_not_exists", "attributes"}


def undocumented(page: str) -> list[str]:
    """What the page does not say about the operations: their lines, and the fields of their requests in them."""
    lines = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| `")}
    missing = [name for name in OPERATIONS if f"`{name}`" not in lines]
    for name, operation in OPERATIONS.items():
        line = lines.get(f"`{name}`", "")
        missing += [f"{name}.{field.name}" for field in operation.request if f"`{field.name}`" not in line]
        if line and ("| lane, Flight |" in line) != operation.lane:
            missing.append(f"{name}: how it is sent")
    return missing


def test_every_operation_has_a_line_in_the_protocol_and_every_section_is_described() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
    assert undocumented(page) == []
    assert undocumented(page.replace("| `stage` |", "| stage |"))[0] == "stage", "a line that is missing is noticed"
    for kind, fields in SECTIONS.items():
        assert f'["{kind}"' in page
        for field in fields:
            assert field.name in page


@given(
    header=st.dictionaries(
        st.sampled_from(["op", "table", "queue", "view", "session", "rows"]),
        st.none() | st.integers() | st.booleans() | st.floats() | st.sampled_from(["get", "scan", "commit"]),
    )
)
def test_any_header_is_a_question_or_refused(header: dict[str, Any]) -> None:
    try:
        check_request(header)
    except BadInput:
        return
    assert all(
        field.optional or type(header[field.name]) is field.value_type for field in OPERATIONS[header["op"]].request
    )


@pytest.mark.parametrize(
    ("operation", "answer"),
    [
        ("open", {}),
        ("open", {"view": "1", "version": 1}),
        ("get", {"view": 1}),
        ("commit", {"version": 1}),
        ("commit", {"version": True, "appended": []}),
        ("stage", {"staged": 7}),
        ("bounds", {"bounds": {"0": 1}}),
        ("read", {"file": "f", "bytes": 7}),
        ("read", {"file": "f", "offset": 1, "end": 1, "bytes": 2**40}),
        ("read", {"error": 7}),
    ],
)
def test_answer_that_is_none_is_refused(operation: str, answer: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        check_response(operation, answer)


# --- between mapper and reducer ---

REQUEST = GetRows(Guid("g"), ReducerIndex(0), ShuffleIndex(3), ShuffleIndex(4), 10, 1000, 5)


def ticket(**changes: Any) -> bytes:
    return json.dumps({**json.loads(REQUEST.encode()), **changes}).encode()


def test_ticket_comes_through() -> None:
    assert GetRows.decode(REQUEST.encode()) == REQUEST
    assert GetRows.decode(ticket(wait_ms=None)).wait_ms == 0


@pytest.mark.parametrize(
    "name",
    [
        "reducer_index",
        "committed_row_index",
        "from_row_index",
        "max_rows",
        "max_bytes",
        "wait_ms",
        "to_row_index",
        "generation",
        "version",
    ],
)
@pytest.mark.parametrize("value", [True, 1.5, 2**70, -2, "1", [1]])
def test_number_of_a_ticket_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(BadInput):
        GetRows.decode(ticket(**{name: value}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"7",
        b"[]",
        b"[" * 50_000,
        ticket(more=1),
        ticket(mapper_id=7),
        ticket(mapper_id=None),
        ticket(machine=7),
        ticket(with_metadata=1),
        ticket(from_row_index=2),
        REQUEST.encode().replace(b"10", b"NaN", 1),
    ],
)
def test_ticket_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(BadInput):
        GetRows.decode(data)


def test_ticket_over_its_limit_is_refused() -> None:
    with pytest.raises(TooLarge):
        GetRows.decode(ticket(machine="x" * TICKET_BYTES_MAX))


@pytest.mark.parametrize("version", [1, 3, None, "2", 2.5])
def test_ticket_of_another_version_is_refused_with_what_to_do(version: Any) -> None:
    with pytest.raises(WrongVersion, match="Install the same one everywhere"):
        GetRows.decode(ticket(version=version))


TAILS = [
    Tail(ShuffleIndex(-1), ShuffleIndex(-1)),
    Tail(ShuffleIndex(4), ShuffleIndex(7), 0, 0, True),
    Tail(ShuffleIndex(2**63 - 1), ShuffleIndex(2**63 - 1), -(2**63), GENERATION_MAX),
]


@pytest.mark.parametrize("tail", TAILS)
def test_tail_comes_through(tail: Tail) -> None:
    assert Tail.decode(tail.encode()) == tail


GOOD_TAIL = TAILS[1].encode()
BAD_TAILS = {
    "empty": b"",
    "of version 1": b"17+",
    "too short": GOOD_TAIL[:-1],
    "too long": GOOD_TAIL + b"0",
    "not a tail": b"@" + GOOD_TAIL[1:],
    "unknown flag": struct.pack("<cBIqqq", b"#", 4, 0, 1, 1, 0),
    "generation too large": struct.pack("<cBIqqq", b"#", 0, 2**31, 1, 1, 0),
    "index below none": struct.pack("<cBIqqq", b"#", 0, 0, -2, 1, 0),
    "complete before its last row": struct.pack("<cBIqqq", b"#", 0, 0, 5, 4, 0),
    "a front that is not flagged": struct.pack("<cBIqqq", b"#", 0, 0, 5, 5, 9),
}


@pytest.mark.parametrize("data", BAD_TAILS.values(), ids=BAD_TAILS.keys())
def test_tail_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(BadInput):
        Tail.decode(data)


@pytest.mark.parametrize("data", [b"", *BAD_TAILS.values()], ids=["nothing", *BAD_TAILS.keys()])
def test_note_that_is_none_is_refused(data: bytes) -> None:
    place = struct.pack("<IIQQ", 1, 2, 3, 4)
    assert SharedRows.decode(b"@" + place + GOOD_TAIL) == SharedRows(MemoryHandle(1, 2, 3, 4), (TAILS[1],))
    with pytest.raises(BadInput):
        SharedRows.decode(b"@" + (place[:-1] if not data else place + data + GOOD_TAIL[:3]))
    with pytest.raises(BadInput):
        SharedRows.decode(b"@" + struct.pack("<IIQQ", 1, 2, 3, 2**63))
