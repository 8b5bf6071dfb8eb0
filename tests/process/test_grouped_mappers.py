"""Mappers that read several partitions each: run, killed in the middle of it, drained, and refused another grouping."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.process.test_mapper_hosting import SCHEMA, append, opened, write_spec
from tests.process.test_run_processor import children_of, counts_in, finished, running
from tests.waiting import WAIT_S, wait_until

PARTITIONS = 7
ALL = range(PARTITIONS)


def test_run_with_groups_of_partitions_whose_mapper_is_killed_counts_every_row_once(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "partitions_per_mapper: 4")
    with opened(tmp_path) as client:
        client.create_queue("logs", schema=SCHEMA, partitions=PARTITIONS)
        expected = append(client, 500, ALL)
    workers = {"statestore", "mapper 0", "mapper 1", "reducer 0", "reducer 1"}
    with running("run", str(spec), "--no-check", "--no-screen") as controller:
        wait_until(lambda: children_of(controller.pid).keys() == workers)
        with opened(tmp_path) as client:
            wait_until(lambda: counts_in(client).total() > 0)
            for _ in range(3):
                killed = children_of(controller.pid)["mapper 0"]
                for _ in range(5):
                    expected += append(client, 40, ALL)
                os.kill(killed, signal.SIGKILL)
                expected += append(client, 40, ALL)
                wait_until(lambda pid=killed: children_of(controller.pid).get("mapper 0", pid) != pid)  # type: ignore[misc]
            wait_until(lambda: counts_in(client) == expected)
        status = json.loads(finished("status", str(spec), "--json").stdout)
        assert [mapper["live"]["index"] for mapper in status["mappers"]] == [0, 1]
        controller.send_signal(signal.SIGTERM)
        assert controller.wait(WAIT_S) == 0
    with opened(tmp_path) as client:
        assert counts_in(client) == expected
        expected += append(client, 100, ALL)
    checked = finished("check", str(spec))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    ended = finished("run", str(spec), "--until-drained")
    assert ended.returncode == 0, ended.stderr
    with opened(tmp_path) as client:
        assert counts_in(client) == expected
        assert all(begin == end for begin, end in client.queue("logs").bounds())
        assert client.scan("job/reads").read_all().num_rows == 0
    other = write_spec(tmp_path, "partitions_per_mapper: 2")
    refused = finished("run", str(other), "--until-drained")
    assert refused.returncode != 0
    assert "groups of 4 of its 7 partitions" in refused.stderr
