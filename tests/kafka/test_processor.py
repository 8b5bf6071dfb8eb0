"""Whole processors that read Kafka: drained, checked and watched, killed in every part, and compared with an oracle."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shuffle.statestore import StateClient
from shuffle.statestore.wire.announcement import served_at
from tests.kafka.inputs import write_spec
from tests.kafka.processors import (
    as_json,
    drained,
    expected,
    orders,
    row_count,
    running,
    said,
    shuffle,
    totals,
    workers,
)
from tests.kafka.topics import Topics
from tests.waiting import wait_until
from tools.kafka import Broker

pytestmark = pytest.mark.long  # Minutes; `make test-kafka` runs them.

LONG_WAIT_S = 120.0


def fill(topics: Topics, rows: list[dict[str, Any]], name: str, partitions: int) -> None:
    for partition in range(partitions):
        topics.write(name, as_json(rows[partition::partitions]), partition)


def test_topic_is_drained_into_a_table_and_again_after_more(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    name = topics.create(partitions=2)
    rows = orders(0, 5_000)
    fill(topics, rows, name, 2)
    topics.write_in_transaction(name, as_json([{"user": "never", "n": 1}]), commit=False)
    spec = write_spec(tmp_path, broker.address, name)
    StateClient.open(tmp_path / "orders.state").close()
    checked = shuffle("check", str(spec))
    assert checked.returncode == 0, checked.stderr
    assert "deterministic on a sample" in checked.stdout + checked.stderr
    done = drained(spec)
    assert done.returncode == 0, done.stderr
    assert totals(spec) == expected(rows)
    more = orders(5_000, 6_000)
    fill(topics, more, name, 2)
    status = json.loads(shuffle("status", str(spec), "--json").stdout)
    assert sum(mapper["input_rows_left"] for mapper in status["mappers"]) == 1_000
    done = drained(spec)
    assert done.returncode == 0, done.stderr
    assert totals(spec) == expected(rows + more)


def test_mistakes_of_the_spec_are_named_with_their_lines(tmp_path: Path) -> None:
    spec = write_spec(
        tmp_path,
        "127.0.0.1:1",
        "orders",
        kafka={"formt": "json", "properties": {"sasl.password": "very secret", "isolation.level": "x"}, "start": "now"},
    )
    found = shuffle("check", str(spec))
    assert found.returncode == 2
    for text in (
        "formt: unknown key",
        "bootstrap.servers is missing",
        "is a secret",
        "cannot be set",
        "start: is neither",
    ):
        assert text in found.stderr
    assert "very secret" not in found.stderr + found.stdout


def test_compacted_topic_is_refused_before_anything_starts(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, broker.address, topics.create(cleanup_policy="compact"))
    StateClient.open(tmp_path / "orders.state").close()
    for command in ("check", "run"):
        found = shuffle(command, str(spec))
        assert found.returncode == 2, command
        assert "is compacted" in found.stderr


def test_secret_is_nowhere_to_be_seen(
    broker: Broker, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_PASSWORD", "very-secret-password")
    name = topics.create()
    topics.write(name, as_json(orders(0, 10)))
    properties = {"bootstrap.servers": broker.address, "sasl.password": {"env": "BROKER_PASSWORD"}}
    spec = write_spec(tmp_path, broker.address, name, kafka={"properties": properties})
    done = drained(spec)
    assert done.returncode == 0, done.stderr
    outputs = [done.stdout, done.stderr, shuffle("status", str(spec), "--json").stdout]
    with StateClient.open(tmp_path / "orders.state") as client:
        outputs.append(str(client.scan("orders/meta").read_all().to_pylist()))
    outputs += [path.read_text(errors="replace") for path in (tmp_path / "orders.state" / "logs").rglob("*.log")]
    assert len(outputs) > 5
    assert not [text for text in outputs if "very-secret-password" in text]


def test_bad_record_stops_its_partition_and_names_its_place(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    name = topics.create()
    good = orders(0, 50)
    topics.write(name, [*as_json(good), b"no json", *as_json(orders(50, 60))])
    spec = write_spec(tmp_path, broker.address, name)
    done = drained(spec)
    assert done.returncode != 0
    assert f"{name}[0] at offset 50 cannot be decoded" in done.stderr
    assert totals(spec) == expected(good), "what was before it is counted"


def test_bad_records_become_dead_letters_with_their_place(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    name = topics.create()
    rows = orders(0, 100)
    values = as_json(rows)
    refused = as_json([{"user": "u", "n": -13}])[0]
    topics.write(name, [*values[:40], b"no json", *values[40:70], refused, None, *values[70:]])
    spec = write_spec(tmp_path, broker.address, name, mapper={"on_error": "dead_letter"})
    done = drained(spec)
    assert done.returncode == 0, done.stderr
    assert totals(spec) == expected(rows)
    shown = shuffle("dead-letters", str(spec), "show")
    assert f"{name}[0] at offset 40 cannot be decoded" in shown.stdout
    assert f"{name}[0] at offset 72 cannot be decoded" in shown.stdout
    assert "minus thirteen" in shown.stdout
    with StateClient.open(tmp_path / "orders.state") as client:
        letters, _ = client.queue("orders/mapper_dead_letters").read(0, 0, max_rows=100)
    assert sorted(letters["position"].to_pylist()) == [40, 71, 72]


def test_several_topics_by_a_pattern(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    prefix = topics.create()
    rows = orders(0, 3_000)
    for number, letter in enumerate("abc"):
        topics.write(topics.create(f"{prefix}-{letter}"), as_json(rows[number::3]))
    spec = write_spec(tmp_path, broker.address, None, kafka={"topics": None, "pattern": f"{prefix}-[a-c]"})
    done = drained(spec)
    assert done.returncode == 0, done.stderr
    assert totals(spec) == expected(rows)


class Producing:
    """Writes orders to a topic while other things happen, each row once."""

    def __init__(self, topics: Topics, name: str, partitions: int, count: int, pause_s: float) -> None:
        self._topics = topics
        self._name = name
        self._partitions = partitions
        self._pause_s = pause_s
        self.rows = orders(0, count)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            step = 200
            for number, begin in enumerate(range(0, len(self.rows), step)):
                part = as_json(self.rows[begin : begin + step])
                self._topics.write(self._name, part, number % self._partitions)
                time.sleep(self._pause_s)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Producing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(LONG_WAIT_S)
        assert not self._thread.is_alive()
        assert self.error is None, self.error


@pytest.mark.timeout(300)
def test_kills_of_mapper_reducer_and_store_change_nothing(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    name = topics.create(partitions=2)
    spec = write_spec(tmp_path, broker.address, name)
    chance = random.Random(5)
    with running(spec) as controller:
        with Producing(topics, name, 2, 20_000, 0.1) as producing:
            wait_until(lambda: row_count(spec) > 500, lambda: said(spec))
            for role in ("mapper", "reducer", "mapper", "statestore", "reducer", "mapper"):
                wait_until(lambda: bool(workers(controller.pid, role)), f"there is a {role}")  # noqa: B023
                os.kill(chance.choice(workers(controller.pid, role)), signal.SIGKILL)
                time.sleep(1.0)
        wait_until(lambda: row_count(spec) >= len(producing.rows), lambda: said(spec), LONG_WAIT_S)
        assert totals(spec) == expected(producing.rows)


@pytest.mark.timeout(300)
def test_broker_killed_and_restarted_under_a_run_changes_nothing(own_broker: Broker, tmp_path: Path) -> None:
    topics = Topics(own_broker.address)
    name = topics.create(partitions=2)
    rows = orders(0, 9_000)
    spec = write_spec(tmp_path, own_broker.address, name)
    fill(topics, rows[:3_000], name, 2)
    with running(spec) as controller:
        wait_until(lambda: row_count(spec) >= 1, lambda: said(spec))
        own_broker.kill()
        time.sleep(8)
        assert controller.poll() is None, said(spec)
        own_broker.restart()
        fill(topics, rows[3_000:6_000], name, 2)
        wait_until(lambda: row_count(spec) >= 6_000, lambda: said(spec), LONG_WAIT_S)
        own_broker.kill()
        own_broker.restart()
        fill(topics, rows[6_000:], name, 2)
        wait_until(lambda: row_count(spec) >= 9_000, lambda: said(spec), LONG_WAIT_S)
        assert totals(spec) == expected(rows)
    logs = "".join(path.read_text(errors="replace") for path in (tmp_path / "orders.state" / "logs").rglob("mapper*"))
    assert "waiting for it" in logs, "the mapper says what it waits for"


@pytest.mark.timeout(300)
def test_partitions_added_under_a_run_become_mappers_without_a_restart(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    prefix = topics.create()
    first = topics.create(f"{prefix}-a", 1)
    rows = orders(0, 6_000)
    spec = write_spec(
        tmp_path, broker.address, None, kafka={"topics": None, "pattern": f"{prefix}-.*", "start": "latest"}
    )
    with running(spec) as controller:
        wait_until(lambda: len(workers(controller.pid, "mapper")) == 1, lambda: said(spec))
        wait_until(lambda: "1 mappers, 2 reducers" in said(spec), lambda: said(spec))
        wait_until(lambda: _has_state(spec, 1), lambda: said(spec))
        topics.write(first, as_json(rows[:1_000]))
        wait_until(lambda: row_count(spec) == 1_000, lambda: said(spec))
        topics.grow(first, 2)
        second = topics.create(f"{prefix}-b", 1)
        # Before anybody has seen these partitions: their first records are read all the same.
        topics.write(first, as_json(rows[1_000:2_000]), 1)
        topics.write(second, as_json(rows[2_000:3_000]))
        wait_until(lambda: row_count(spec) == 3_000, lambda: said(spec), LONG_WAIT_S)
        os.kill(workers(controller.pid, "reducer")[0], signal.SIGKILL)
        os.kill(workers(controller.pid, "mapper")[-1], signal.SIGKILL)
        fill(topics, rows[3_000:5_000], first, 2)
        topics.write(second, as_json(rows[5_000:]))
        wait_until(lambda: row_count(spec) == 6_000, lambda: said(spec), LONG_WAIT_S)
        assert totals(spec) == expected(rows)
        assert "more partitions" in said(spec)
        assert len(workers(controller.pid, "mapper")) == 3
    done = drained(spec)
    assert done.returncode == 0, done.stderr
    assert totals(spec) == expected(rows), "the next run knows the same partitions"


def _has_state(spec: Path, mappers: int) -> bool:
    """Whether so many mappers have persisted where they begin."""
    if served_at(spec.parent / "orders.state") is None:
        return False
    with StateClient.open(spec.parent / "orders.state") as client:
        return bool(client.scan("orders/mappers").read_all().num_rows == mappers)


@pytest.mark.timeout(300)
def test_partitions_added_under_a_run_become_groups_of_their_own(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    name = topics.create(partitions=4)
    rows = orders(0, 6_000)
    spec = write_spec(tmp_path, broker.address, name, mapper={"partitions_per_mapper": 3})
    fill(topics, rows[:2_000], name, 4)
    with running(spec) as controller:
        wait_until(lambda: row_count(spec) == 2_000, lambda: said(spec), LONG_WAIT_S)
        topics.grow(name, 6)
        fill(topics, rows[2_000:4_000], name, 6)
        # One of them reads the last group, which had room, and finds a larger topic when it starts again.
        for victim in workers(controller.pid, "mapper"):
            os.kill(victim, signal.SIGKILL)
        wait_until(lambda: row_count(spec) == 4_000, lambda: said(spec), LONG_WAIT_S)
        assert totals(spec) == expected(rows[:4_000])
        assert len(workers(controller.pid, "mapper")) == 3
    fill(topics, rows[4_000:], name, 6)
    done = drained(spec)
    assert done.returncode == 0, done.stderr
    assert totals(spec) == expected(rows), "the next run knows the same groups"
    status = json.loads(shuffle("status", str(spec), "--json").stdout)
    assert [mapper["input_rows_left"] for mapper in status["mappers"]] == [0, 0, 0]


def test_partitions_added_between_two_runs_are_read(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    name = topics.create()
    rows = orders(0, 2_000)
    topics.write(name, as_json(rows[:1_000]))
    spec = write_spec(tmp_path, broker.address, name)
    assert drained(spec).returncode == 0
    topics.grow(name, 3)
    fill(topics, rows[1_000:], name, 3)
    done = drained(spec)
    assert done.returncode == 0, done.stderr
    assert totals(spec) == expected(rows)


def test_run_without_a_broker_ends_with_an_error_that_says_so(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "127.0.0.1:1", "orders")
    done = shuffle("run", str(spec), "--no-screen")
    assert done.returncode == 1
    assert "Kafka: asking for the topic 'orders'" in done.stderr
