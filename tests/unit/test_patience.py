"""What is waited for is said, once, and only when the wait is long."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shuffle import cli
from shuffle.statestore import StateClient
from shuffle.support.slow_wait import ANNOUNCE_AFTER_S, announce_slow
from tests.waiting import WAIT_S, wait_until


def test_short_wait_is_not_told_of() -> None:
    said: list[str] = []
    with announce_slow("nothing", said.append, after_s=30.0):
        pass
    assert said == []


def test_long_wait_is_told_of_once_while_it_lasts() -> None:
    said: list[str] = []
    heard = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        heard.set()

    with announce_slow("the tide", say, after_s=0.01):
        assert heard.wait(30.0)
    assert said == ["waiting for the tide"]


def test_folder_that_another_process_has_open_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "job.state"
    codes: list[int] = []
    with StateClient.open(folder):
        thread = threading.Thread(target=lambda: codes.append(cli.main(["state", "ls", str(folder)])), daemon=True)
        thread.start()
        errors: list[str] = []
        wait_until(lambda: (errors.append(capsys.readouterr().err), bool("".join(errors)))[1])
        assert "".join(errors) == f"waiting for the state store in {folder} to open\n"
        assert thread.is_alive()
        thread.join(WAIT_S)
    assert codes == [1]
    assert "is open in another process" in capsys.readouterr().err
    assert ANNOUNCE_AFTER_S < 1.0
