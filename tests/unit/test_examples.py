"""The examples' own functions: what they map and how they merge, without a processor around them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from shuffle.api import WorkerSpec
from shuffle.examples import activity, wordcount
from shuffle.examples.workload import SCHEMA, batches, difference, generate, oracle
from shuffle.ids import Guid
from shuffle.spec.config import load_spec
from shuffle.statestore import StateClient

EXAMPLES = Path(activity.__file__).parent
SPEC = WorkerSpec(processor="test", index=0, guid=Guid("0" * 32), mapper_count=1, reducer_count=3)


@pytest.mark.parametrize("mapper_class", [activity.ParseLogs, activity.DeclaredParseLogs])
def test_activity_mapper_keeps_rows_with_a_user_and_sends_a_key_to_one_reducer(
    mapper_class: type[activity.ParseLogs], tmp_path: Path
) -> None:
    rows = generate(20_000, users=50)
    with StateClient.open(str(tmp_path)) as state:
        mapped = mapper_class({}, SPEC, state, SCHEMA).map(rows)
    assert mapped.rows.equals(rows.filter(pc.is_valid(rows["user"])))
    homes = pa.table({"user": mapped.rows["user"], "cluster": mapped.rows["cluster"], "home": mapped.partition_indexes})
    spread = homes.group_by(["user", "cluster"]).aggregate([("home", "count_distinct")])
    assert pc.max(spread["home_count_distinct"]).as_py() == 1
    assert set(np.unique(mapped.partition_indexes).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("reducer_class", [activity.CountByUser, activity.DeclaredCountByUser])
def test_activity_reducer_over_many_batches_agrees_with_the_oracle(
    reducer_class: type[activity.CountByUser], tmp_path: Path
) -> None:
    with StateClient.open(str(tmp_path)) as state:
        reducer = reducer_class({}, SPEC, state)
        for rows in batches(20_000, 3_000, with_user_share=0.5):
            tx = reducer.reduce(rows.filter(pc.is_valid(rows["user"])))
            assert tx is not None
            tx.commit()
        found = state.scan(activity.TABLE).read_all()
    verdict = difference(oracle([generate(20_000, with_user_share=0.5)]), found)
    assert verdict.exact, str(verdict)


def test_merged_adds_counts_and_keeps_the_later_time() -> None:
    def table(count: int, time: int) -> pa.Table:
        columns = {
            "user": ["a"],
            "cluster": ["c"],
            "last_access": pa.array([time], pa.timestamp("us")),
            "count": [count],
        }
        return pa.table(columns)

    expected = [{"user": "a", "cluster": "c", "last_access": table(0, 9)["last_access"][0].as_py(), "count": 5}]
    assert activity.merged(table(2, 9), table(3, 4)).to_pylist() == expected
    assert activity.merged(table(2, 4), table(3, 9)).to_pylist() == expected


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["to be or", "not to be"], ["to", "be", "or", "not", "to", "be"]),
        (["  Spaces \t and\nbreaks ", "", None, " "], ["spaces", "and", "breaks"]),
        ([None], []),
        ([], []),
        (["Größe ΑΒΓ"], ["größe", "αβγ"]),
    ],
)
def test_words_of_lines(lines: list[str | None], words: list[str]) -> None:
    assert wordcount.words_of(pa.chunked_array([pa.array(lines, pa.string())]))["word"].to_pylist() == words


def test_words_do_not_depend_on_how_lines_are_cut_into_batches() -> None:
    rows = generate(1000)
    whole = wordcount.words_of(rows["message"]).combine_chunks()
    pieces = pa.concat_tables([wordcount.words_of(part["message"]) for part in batches(1000, 77)]).combine_chunks()
    assert pieces.equals(whole)


def test_word_counts_agree_with_a_loop(tmp_path: Path) -> None:
    counts: dict[str, int] = {}
    with StateClient.open(str(tmp_path)) as state:
        reducer = wordcount.CountWords({}, SPEC, state)
        mapper = wordcount.SplitWords({"column": "message"}, SPEC, state, SCHEMA)
        for rows in batches(2_000, 700):
            for message in rows["message"].to_pylist():
                for word in message.lower().split():
                    counts[word] = counts.get(word, 0) + 1
            tx = reducer.reduce(mapper.map(rows).rows)
            assert tx is not None
            tx.commit()
        found = state.scan(wordcount.TABLE).read_all().to_pylist()
    assert {row["word"]: row["count"] for row in found} == counts


@pytest.mark.parametrize("name", ["activity.yaml", "wordcount.yaml"])
def test_specs_of_the_examples_can_be_loaded(name: str) -> None:
    assert load_spec(EXAMPLES / name).processor == Path(name).stem
