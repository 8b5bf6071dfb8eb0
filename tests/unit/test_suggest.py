"""Did you mean: one slip is recognised, another word is not."""

from __future__ import annotations

import pytest

from shuffle.support.suggest import did_you_mean, nearest

KNOWN = ("memory", "listen", "on_error", "age")


@pytest.mark.parametrize(
    ("word", "meant"),
    [("memroy", "memory"), ("lisen", "listen"), ("onerror", "on_error"), ("agee", "age"), ("memory", "memory")],
)
def test_one_slip_is_recognised(word: str, meant: str) -> None:
    assert nearest(word, KNOWN) == meant
    assert did_you_mean(word, KNOWN, "; there are others") == f"; did you mean {meant!r}?"


@pytest.mark.parametrize("word", ["", "x", "partitions", "Ω"])
def test_another_word_is_not(word: str) -> None:
    assert nearest(word, KNOWN) is None
    assert did_you_mean(word, KNOWN) == ""
    assert did_you_mean(word, KNOWN, "; there are others") == "; there are others"


def test_names_may_come_from_anything_that_can_be_gone_through() -> None:
    assert nearest("agee", {"age": 1}) == nearest("agee", iter(["age"])) == "age"
    assert nearest("age", []) is None
