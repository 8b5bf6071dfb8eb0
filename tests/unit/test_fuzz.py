"""The fuzzer itself: its inputs are the same for the same seed, its lies are lies, and what is planted is found."""

from __future__ import annotations

import mmap
import os
import random
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shuffle.statestore.codec.segment import encode_file_header, encode_record
from shuffle.statestore.wire.lane_frames import decode_frame, encode_frame
from tests.fuzz import arrow, children, mutate, oracles, plan
from tests.fuzz.__main__ import parser
from tests.fuzz.children import ChildTarget
from tests.fuzz.findings import Finding, Outcome, Problem, Report, text_of
from tests.fuzz.planted import KINDS
from tests.fuzz.targets import specs
from tests.fuzz.targets.base import Questions
from tests.fuzz.world import Places

SCHEMA = pa.schema([("key", pa.binary()), ("value", pa.binary())])
QUESTION = {"op": "commit", "version": 7, "sections": [["write", 3, 1], ["trim", 4, 0, 5]]}


def batch() -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"key": [b"a", b"bc", None], "value": [b"x" * 9, None, b""]}, SCHEMA)


# --- inputs ---


def test_same_seed_makes_the_same_input_and_another_one_another() -> None:
    def made(seed: int) -> list[object]:
        chance = mutate.chance_for(seed, "lane", 5)
        lie, about = arrow.lying(arrow.Message.of(batch()), chance)
        return [repr(mutate.changed(QUESTION, chance)), mutate.damaged(b"abc" * 20, chance), lie.encapsulated(), about]

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_changes_leave_the_original_alone_and_reach_every_part() -> None:
    seen: set[str] = set()
    before = repr(QUESTION)
    for number in range(400):
        made = mutate.changed(QUESTION, mutate.chance_for(0, "unit", number))
        mutate.to_json(made, random.Random(number))
        seen.update(name for name in QUESTION if not isinstance(made, dict) or made.get(name) != QUESTION[name])
    assert repr(QUESTION) == before
    assert seen == set(QUESTION)


def test_damage_changes_bytes() -> None:
    data = bytes(range(200))
    made = [mutate.damaged(data, mutate.chance_for(0, "unit", number)) for number in range(100)]
    assert sum(one != data for one in made) >= 98
    assert {len(one) < len(data) for one in made} == {True, False}


def test_layout_names_the_numbers_of_a_batch() -> None:
    message = arrow.Message.of(batch())
    layout = arrow.layout_of(message.header)
    values = {name: struct.unpack_from("<q", message.header, at)[0] for name, at in layout.slots}
    assert (values["length"], values["node length"], values["body length"]) == (3, 3, len(message.body))
    assert len(layout.buffers) == 6  # Validity, offsets and data of two columns.
    assert struct.unpack_from("<4i", message.body, layout.buffers[1][0]) == (0, 1, 3, 3)


def test_message_that_nobody_touched_is_sound_and_most_lies_are_not() -> None:
    whole = arrow.Message.of(batch())
    assert arrow.is_sound(whole.encapsulated(), SCHEMA)
    lies = [arrow.lying(whole, mutate.chance_for(0, "unit", number))[0].encapsulated() for number in range(200)]
    assert sum(not arrow.is_sound(lie, SCHEMA) for lie in lies) > 120


def test_flight_data_is_what_protobuf_says() -> None:
    message = arrow.Message(b"head", b"b" * 300)
    fields = arrow.proto_fields(arrow.flight_data(message, b"meta", b"command"))
    assert (fields[2], fields[3], fields[1000]) == (b"head", b"meta", b"b" * 300)
    assert arrow.proto_fields(fields[1])[2] == b"command"


def test_every_target_has_its_share_and_a_number_has_one_target() -> None:
    hundred = [plan.target_of(number) for number in range(700, 800)]
    assert {name: hundred.count(name) for name in plan.TARGETS} == plan.WEIGHTS
    some = list(plan.numbers(50, ("logs", "specs")))
    assert len(some) == 50
    assert {plan.target_of(number) for number in some} == {"logs", "specs"}


# --- oracles ---


@pytest.mark.parametrize(
    "answer",
    [
        b"oh. Detail: Python exception: Traceback (most recent call last):\n",
        b'  File "/opt/x/statestore/lane.py", line 7',
        b"at statestore/server/lane_server.py:17",
        b"a row: " + oracles.SECRET + b"17",
    ],
)
def test_answer_with_the_inside_of_a_program_is_a_problem(answer: bytes) -> None:
    assert oracles.answer_problems(answer)


def test_answer_of_a_sentence_is_none() -> None:
    told = b'{"code": "bad_input", "message": "a frame that is shorter than it says"}'
    assert not oracles.answer_problems(told)


def test_growth_is_a_problem_beyond_what_is_allowed() -> None:
    before = oracles.Usage(100, 10, 20)
    assert not oracles.growth_problems("store", before, oracles.Usage(200, 11, 21))
    more = oracles.Usage(100 + oracles.GROWTH_BYTES_MAX + 1, 60, 400)
    assert len(oracles.growth_problems("store", before, more)) == 3


def test_mapped_files_are_no_growth_and_memory_is(tmp_path: Path) -> None:
    size_bytes = 32 * oracles.MIB
    file = tmp_path / "segment"
    file.write_bytes(b"x" * size_bytes)

    def resident() -> int:
        usage = oracles.usage_of(os.getpid())
        assert usage is not None
        return usage.resident_bytes

    before = resident()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[at] for at in range(0, size_bytes, mmap.PAGESIZE))
        assert resident() - before < size_bytes / 2
    held = bytearray(b"x") * size_bytes
    assert resident() - before > size_bytes / 2
    del held


# --- records of queues ---

RECORD_ROWS = 3
SEGMENT = 100
"""The position of the segment's row 0."""


class Records:
    """A segment file with three records of three rows each, and the response that has all of them."""

    def __init__(self, folder: Path) -> None:
        header = encode_file_header(SCHEMA)
        payload = pa.py_buffer(arrow.Message.of(batch()).encapsulated())
        self.records = [b"".join(encode_record(at * RECORD_ROWS, RECORD_ROWS, payload)) for at in range(3)]
        self.data = b"".join(self.records)
        self.file = folder / "q8-p0-100-1.seg"
        self.file.write_bytes(header + self.data + b"torn")
        self.told: dict[str, Any] = {"file": str(self.file), "offset": len(header), "segment": SEGMENT}
        self.told |= {"end": SEGMENT + 9, "bytes": len(self.data)}
        self.asked: dict[str, Any] = {"op": "read", "queue": 8, "partition": 0, "begin": SEGMENT + 1}
        self.asked |= {"rows": 100, "bytes": 65536, "wait_ms": 0}

    def problems(self, data: bytes, told: dict[str, Any] | None = None, **asked: Any) -> list[str]:
        told = {**self.told, "bytes": len(data), **(told or {})}
        found = oracles.records_problems(told, data, {**self.asked, **asked})
        assert all(problem.kind == "leak" for problem in found)
        return [problem.what for problem in found]


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path)


def test_whole_records_of_the_queue_are_no_leak(records: Records) -> None:
    assert oracles.has_records(records.told)
    assert not records.problems(records.data)
    assert not records.problems(records.records[0], {"end": SEGMENT + 3}, bytes=1)  # One record more than was asked.
    assert not oracles.records_problems(records.told, records.data, None)
    records.file.unlink()  # Trimmed since.
    assert not records.problems(records.data)


def test_bytes_that_are_no_records_of_the_queue_are_a_leak(records: Records) -> None:
    data = records.data
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    assert any("other bytes" in what for what in records.problems(flipped))
    records.file.unlink()
    for wrong in (flipped, data[:-8], data + b"memory of the store", b"", data[8:]):
        assert records.problems(wrong), wrong
    assert records.problems(data, {"bytes": len(data) - 1})
    assert records.problems(records.records[0] + records.records[2])  # One is missing between them.


def test_records_that_were_not_asked_for_are_a_leak(records: Records) -> None:
    assert records.problems(records.data, {"end": SEGMENT + 8})
    assert records.problems(records.data, queue=7)
    assert records.problems(records.data, begin=SEGMENT + 3)
    assert records.problems(records.data, rows=5)
    assert not records.problems(records.data, rows=6)
    assert records.problems(records.data, bytes=len(records.data) - 1)


# --- what is found, and what is said about it ---


def test_planted_bugs_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that dies or falls silent is a finding, and the next input has another child."""
    monkeypatch.setattr(children, "INPUT_S_MAX", 1.0)
    target = ChildTarget("planted", 3, tmp_path, "tests.fuzz.planted:PlantedTarget")
    try:
        for number in (*range(len(KINDS)), 0):
            outcome = target.run(number, random.Random())
            wanted = KINDS[number % len(KINDS)]
            assert [problem.kind for problem in outcome.problems] == ([] if wanted == "fine" else [wanted])
            assert f"the planted {wanted}" in outcome.shown
    finally:
        target.close()


def test_report_counts_all_and_keeps_a_few_of_a_kind() -> None:
    report = Report(seed=9)
    for number in range(10):
        problem = Problem("wrong", f"row {number} of {number * 7}")
        report.add("lane", number, Outcome("accepted", [problem], shown="x" * 5000))
    report.add("lane", 10, Outcome("bad_input"))
    assert report.tally("lane").inputs == 11
    assert report.tally("lane").kinds["wrong"] == 10
    assert len(report.findings) == 3
    assert "--seed 9 --input 0" in text_of(report.findings[0], 9)
    assert "bad_input:1" in report.table()
    assert len(report.to_json()["findings"]) == 3


def test_range_of_inputs_is_told_as_one() -> None:
    found = Finding("lane", 3, 9, "hang", "no answer", "")
    assert found.command(1) == "python -m tests.fuzz --seed 1 --input 3-9"
    assert parser().parse_args(["--input", "3-9"]).input == "3-9"


def test_specs_begin_from_one_that_is_valid(tmp_path: Path) -> None:
    import yaml

    from shuffle.spec.config import load_spec

    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(specs.VALID))
    assert load_spec(file).processor == "job"


def test_layout_of_a_damaged_message_is_found_or_refused_in_no_time() -> None:
    whole = arrow.Message.of(batch())
    for number in range(2000):
        message = arrow.Message(mutate.damaged(whole.header, mutate.chance_for(0, "unit", number)), whole.body)
        arrow.is_sound_for_flight(message, SCHEMA)


# --- questions to the store ---


class Elsewhere:
    """As much of a world as questions need."""

    def __init__(self) -> None:
        self.places = Places(
            table_ids={"fuzz_lane": 1, "fuzz_flight": 2, "secret": 3},
            queue_ids={"fuzz_lane_q": 6, "fuzz_flight_q": 7, "bulk": 8},
        )


@pytest.fixture
def questions() -> Questions:
    return Questions(Elsewhere(), "fuzz_lane", "fuzz_lane_q")  # type: ignore[arg-type]


def test_questions_make_every_operation_and_frames_of_them_can_be_read(questions: Questions) -> None:
    seen = set()
    for number in range(400):
        header, rows = questions.make(mutate.chance_for(0, "unit", number))
        assert questions.nonsense(header) is None
        assert not questions.is_harmful(header)
        assert decode_frame(encode_frame(header, rows)) == (header, rows)
        seen.add(header["op"])
    assert seen == {"get", "scan", "open", "release", "commit", "bounds", "read", "stage", "discard"}


@pytest.mark.parametrize(
    "header",
    [
        {"op": "get", "table": True},
        {"op": "get", "table": 99},
        {"op": "commit", "version": 1.5, "sections": []},
        {"op": "commit", "sections": [["trim", 6, 0, 1.5]]},
        {"op": "commit", "sections": [["write", 2**70, 0]]},
        {"op": "bounds", "queue": "6"},
    ],
)
def test_answer_to_nonsense_is_a_problem(questions: Questions, header: dict[str, object]) -> None:
    assert questions.nonsense(header) is not None


def test_commit_to_a_table_that_matters_is_not_sent(questions: Questions) -> None:
    assert questions.is_harmful({"op": "commit", "sections": [["write", 3, 1]]})
    assert questions.is_harmful({"op": "commit", "sections": [["write", 3.0, 1]]})
    assert not questions.is_harmful({"op": "commit", "sections": [["write", 1, 1]]})
    assert not questions.is_harmful({"op": "get", "table": 3})
