"""What is waited for is told before anyone gives up, and what gave up says why."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shuffle.errors import BadInput, SpecError, StoreUnavailable
from shuffle.spark_connector.engine import _wait_for_slots
from shuffle.spark_connector.options import Options, state_of
from shuffle.spark_connector.store_handle import StoreHandle


def test_folder_that_nobody_serves_is_told_of_at_once_and_is_the_cause_of_the_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shuffle.spark_connector.waiting.REPORT_AFTER_S", 0.05)
    with pytest.raises(StoreUnavailable, match=r"It was waited for 0.5 s; start it again") as error:
        StoreHandle(str(tmp_path), 0.5).with_retries(lambda client: client.tables())
    cause = error.value.__cause__
    assert isinstance(cause, StoreUnavailable)
    assert (
        capfd.readouterr().err == f"shuffle: waiting: {cause.message}. This gives up after 0.5 s (option 'timeout')\n"
    )
    assert cause.message.startswith(f"no daemon serves the state store in {tmp_path}")


class Executors(SimpleNamespace):
    """A cluster whose executors come up one by one, as a session shows it."""

    master: str
    slots: list[int]

    @property
    def sparkContext(self) -> Any:  # noqa: N802
        return self

    @property
    def defaultParallelism(self) -> int:  # noqa: N802
        return self.slots.pop(0) if len(self.slots) > 1 else self.slots[0]


def test_slots_that_are_missing_are_told_at_once_and_never_waited_for_where_none_can_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shuffle.spark_connector.engine.LOOK_S", 0.01)
    said: list[str] = []
    cluster: Any = Executors(master="spark://master:7077", slots=[2, 2, 4, 5])
    _wait_for_slots(cluster, 5, said.append)
    line = "waiting for 5 task slots, one for each worker: spark://master:7077 has 2 so far. This gives up after 60 s"
    assert said == [line]
    local: Any = Executors(master="local[2]", slots=[2])
    began_s = time.monotonic()
    with pytest.raises(SpecError, match=r"5 workers need 5 task slots, and local\[2\] has 2"):
        _wait_for_slots(local, 5, said.append)
    assert time.monotonic() - began_s < 5
    assert said == [line]


def test_state_is_an_address_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def given(state: str) -> str:
        return state_of(Options.check("read", {"state": state}))

    for state in ("grpc://store:7070", "folder", "./folder", "/a/folder", "~/x", "C:folder"):
        assert given(state) == state
    for state, meant in {
        "http://store:7070/": "grpc://store:7070",
        "grpc+tls://store:7070": "grpc://store:7070",
        "store:7070": "grpc://store:7070",
        "127.0.0.1:7070": "grpc://127.0.0.1:7070",
    }.items():
        with pytest.raises(BadInput, match=f"is neither: did you mean '{meant}'"):
            given(state)
    (tmp_path / "odd:7070").mkdir()
    assert given("odd:7070") == "odd:7070", "a folder may be called so"
