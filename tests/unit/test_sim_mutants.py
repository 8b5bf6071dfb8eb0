"""Planted bugs must be planted: one whose target was moved or renamed fails the run, and does not pass for found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.sim import mutants


class Product:
    def step(self) -> str:
        return "right"


def _plant(monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    monkeypatch.setitem(mutants.MUTANTS, "mine", mutant)


def test_planted_bug_is_there_for_the_length_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, lambda patch: patch(Product, "step", lambda self: "wrong"))
    with mutants.planted("mine"):
        assert Product().step() == "wrong"
    assert Product().step() == "right"


def test_planted_bug_without_a_target_is_an_error_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(patch: Any) -> None:
        patch(Product, "step", lambda self: "wrong")
        patch(Product, "moved_elsewhere", lambda self: None)

    _plant(monkeypatch, mutant)
    with pytest.raises(mutants.NoTarget, match="moved_elsewhere"), mutants.planted("mine"):
        pass
    assert Product().step() == "right"


def test_planted_bug_that_replaces_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, lambda patch: None)
    with pytest.raises(mutants.NoTarget, match="replaces nothing"), mutants.planted("mine"):
        pass


def test_planted_bug_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(mutants.NoTarget, match="no planted bug"), mutants.planted("nobody"):
        pass


def test_run_with_a_planted_bug_without_a_target_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _plant(monkeypatch, lambda patch: patch(Product, "moved_elsewhere", None))
    monkeypatch.setattr("tests.sim.cli.run_seed", _run_seed)
    from tests.sim.cli import parser

    assert mutants.main(parser().parse_args(["--mutants", "--mutant", "mine", "--jobs", "1"])) == 1
    told = capsys.readouterr().out
    assert "moved_elsewhere" in told
    assert told.strip().endswith("0/1 found")


def _run_seed(task: Any) -> None:
    with mutants.planted(task[1]):
        raise AssertionError("it was planted")


@pytest.mark.parametrize(
    "violation",
    [
        "the thread trim has died of AttributeError: 'Transaction' object has no attribute '_client'",
        "the thread process has died of TypeError: mine.<locals>.advanced() takes 2 arguments but 3 were given",
    ],
)
def test_run_with_a_planted_bug_that_does_not_fit_the_product_any_more_fails(
    violation: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _plant(monkeypatch, lambda patch: patch(Product, "step", lambda self: "wrong"))
    monkeypatch.setattr("tests.sim.cli.run_seed", lambda task: SimpleNamespace(violations=[violation]))
    from tests.sim.cli import parser

    assert mutants.main(parser().parse_args(["--mutants", "--mutant", "mine", "--jobs", "1"])) == 1
    assert "the planted bug itself is broken" in capsys.readouterr().out
