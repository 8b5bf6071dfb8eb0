"""``dead_letters: {kafka: …}``: rows that map or reduce refuse are in a topic exactly once, on a real broker."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.kafka.topics import Topics
from tests.process.test_dead_letter_export import JOB, SPEC, counted, fill, left
from tests.process.test_run_processor import finished
from tools.kafka import Broker

ROWS = 400
"""In each of two partitions."""


def job(folder: Path, topic: str, address: str) -> Path:
    (folder / "letters_job.py").write_text(JOB)
    path = folder / "job.yaml"
    options = {"topic": topic, "key": "role", "group": "letters", "properties": {"bootstrap.servers": address}}
    section = {"kafka": options, "batch_rows_max": 1}  # So that there are publications enough to die after.
    path.write_text(SPEC.partition("dead_letters:")[0] + f"dead_letters: {json.dumps(section)}\n")
    return path


def test_dead_letters_reach_the_topic_exactly_once_though_their_exporter_dies_after_each_publication(
    broker: Broker, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topics.create()
    spec = job(tmp_path, topic, broker.address)
    fill(spec, ROWS)
    with monkeypatch.context() as patch:
        # The answer to a publication of rows is lost each time, until the controller gives up.
        patch.setenv("SHUFFLE_CRASH_AT", "exporter.after_publish:1")
        assert finished("run", str(spec), "--until-drained", "--no-check").returncode == 1
    assert topics.end(topic) > 0, "it died after rows were in the topic"
    refused = finished("dead-letters", str(spec), "drop", "--yes")
    assert refused.returncode == 2
    assert "may be in kafka topic" in refused.stderr
    ended = finished("run", str(spec), "--until-drained", "--no-check")
    assert ended.returncode == 0, ended.stderr
    messages = topics.read(topic)
    letters = [json.loads(message.value()) for message in messages]
    found = Counter((letter["role"], json.loads(letter["row"])["n"]) for letter in letters)
    refused_rows = {("mapper", n) for n in range(50, 2 * ROWS, 100)} | {
        ("reducer", n) for n in range(60, 2 * ROWS, 100)
    }
    assert found == Counter(refused_rows)
    assert {message.key() for message in messages} == {b"mapper", b"reducer"}
    assert counted(spec) == 2 * ROWS - len(refused_rows)
    assert all(begin == end for begin, end in left(spec))
