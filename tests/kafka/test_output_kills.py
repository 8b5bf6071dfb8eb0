"""``output: {kafka: …}`` as people use it: from a queue to a topic exactly once, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from shuffle.statestore import StateClient
from tests.kafka.topics import Topics
from tests.process.test_output import JOB, fill
from tests.process.test_run_processor import children_of, finished, running
from tests.waiting import WAIT_S, pause, wait_until
from tools.kafka import Broker

pytestmark = pytest.mark.long  # Minutes; `make test-kafka` runs them.

ROWS = 20_000
"""In each of two partitions."""

SPEC = """\
processor: job
state: ./job.state
input: {{queue: in}}
mapper: {{class: "echo_job:ByParity", trim_period: 100ms, batch_rows_max: 200}}
reducer: {{class: "echo_job:Echo", count: 2, batch_rows_max: 100, fetch_rows_max: 100}}
output:
  kafka: {{topic: {topic}, key: n, properties: {{bootstrap.servers: "{address}"}}}}
  batch_rows_max: 500
"""


def job(folder: Path, topic: str, address: str) -> Path:
    (folder / "echo_job.py").write_text(JOB)
    path = folder / "job.yaml"
    path.write_text(SPEC.format(topic=topic, address=address))
    return path


def published(topics: Topics, topic: str) -> list[int]:
    return [json.loads(message.value())["n"] for message in topics.read(topic)]


@pytest.mark.timeout(400)
def test_rows_reach_the_topic_exactly_once_while_everybody_and_the_broker_are_killed(
    own_broker: Broker, topics_of: Callable[[Broker], Topics], tmp_path: Path
) -> None:
    topics = topics_of(own_broker)
    topic = topics.create()
    spec = job(tmp_path, topic, own_broker.address)
    expected = fill(spec, ROWS)
    with running("run", str(spec), "--until-drained", "--no-check") as controller:
        for victim in ("exporter 0-1", "reducer 0", "broker", "statestore", "exporter 0-1"):
            seen = topics.end(topic)
            wait_until(lambda seen=seen: topics.end(topic) > seen + 500, wait_s=2 * WAIT_S)  # type: ignore[misc]
            if victim == "broker":
                # Its exporters stand still with a transaction that is open or visible: see docs/outputs.md, "A broker
                # that is alone".
                exporter = children_of(controller.pid)["exporter 0-1"]
                pause(exporter)
                threading.Event().wait(1.0)
                own_broker.kill()
                own_broker.start()
                os.kill(exporter, signal.SIGCONT)
                continue
            wait_until(lambda victim=victim: victim in children_of(controller.pid))  # type: ignore[misc]
            os.kill(children_of(controller.pid)[victim], signal.SIGKILL)
        assert len(published(topics, topic)) < expected.total(), "killed in the middle"
        assert controller.wait(3 * WAIT_S) == 0, spec.with_suffix(".out").read_text()
    found = published(topics, topic)
    assert Counter(found) == expected
    for parity in range(2):
        of_one_reducer = [n for n in found if n % 2 == parity]
        for partition in range(2):  # The input's order holds for the rows of one mapper and one reducer.
            part = [n for n in of_one_reducer if n // ROWS == partition]
            assert part == sorted(part)
    with StateClient.open(spec.parent / "job.state") as client:
        assert all(begin == end for begin, end in client.queue("job/outbox").bounds()), "the outbox is trimmed"


def test_killed_exporter_leaves_no_transaction_that_holds_up_readers(
    broker: Broker, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topics.create()
    spec = job(tmp_path, topic, broker.address)
    fill(spec, 2_000)
    with monkeypatch.context() as patch:
        patch.setenv("SHUFFLE_CRASH_AT", "exporter.after_publish:2")
        # Each exporter dies at its second publication, until the controller gives up.
        assert finished("run", str(spec), "--until-drained", "--no-check").returncode == 1
    ended = finished("run", str(spec), "--until-drained", "--no-check")
    assert ended.returncode == 0, ended.stderr
    assert Counter(published(topics, topic)) == Counter(range(4_000)), "everything is visible, and once"


def test_topic_that_was_created_anew_stops_the_exporter(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    topic = topics.create()
    spec = job(tmp_path, topic, broker.address)
    fill(spec, 200)
    with running("run", str(spec), "--no-check") as controller:
        wait_until(lambda: len(published(topics, topic)) == 400)
        os.kill(children_of(controller.pid)["exporter 0-1"], signal.SIGSTOP)
        topics.delete(topic)
        threading.Event().wait(1.0)  # The broker answers before all of it is gone.
        topics.create(topic)
        os.kill(children_of(controller.pid)["exporter 0-1"], signal.SIGKILL)
        log = spec.parent / "job.state" / "logs" / "job" / "exporter-0-1.log"
        wait_until(lambda: "has no position, and rows before" in log.read_text(), log.read_text)
    assert published(topics, topic) == [], "nothing is published over the hole"
