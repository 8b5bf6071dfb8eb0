"""Which commits an optimistic transaction conflicts with, and what is remembered to detect that."""

from __future__ import annotations

import pytest

from shuffle.statestore.engine.conflicts import ConflictHistory
from shuffle.statestore.key_range import KeyRange

TABLE = 1


def history(*commits: list[bytes], keys_max: int = 1000) -> ConflictHistory:
    """Commits of the versions 1, 2, … over an empty store."""
    changes = ConflictHistory(0, keys_max)
    for version, keys in enumerate(commits, start=1):
        changes.record(version, keys, [TABLE])
    return changes


def test_key_written_after_it_was_read_conflicts() -> None:
    changes = history([b"a"], [b"b"])
    assert changes.conflict(0, [(TABLE, [b"a"])], []) is not None
    assert changes.conflict(1, [(TABLE, [b"a"])], []) is None
    assert changes.conflict(1, [(TABLE, [b"a", b"b"])], []) is not None
    assert changes.conflict(0, [(TABLE, [b"c"])], []) is None


def test_last_write_of_a_key_counts() -> None:
    changes = history([b"a"], [b"a"])
    assert "version 2" in str(changes.conflict(1, [(TABLE, [b"a"])], []))
    assert changes.conflict(2, [(TABLE, [b"a"])], []) is None


@pytest.mark.parametrize(
    ("begin", "end", "conflicts"),
    [
        (b"", None, True),
        (b"b", b"b\0", True),
        (b"b", b"c", True),
        (b"b\0", b"d", False),
        (b"a", b"b", False),
        (b"e", None, False),
        (b"d", None, True),
    ],
)
def test_range_is_half_open(begin: bytes, end: bytes | None, conflicts: bool) -> None:
    changes = history([b"d", b"b"])
    assert (changes.conflict(0, [], [KeyRange(begin, end)]) is not None) == conflicts
    assert changes.conflict(1, [], [KeyRange(begin, end)]) is None


def test_range_looks_at_later_commits_only() -> None:
    changes = history([b"a"], [b"z"], [b"a"])
    everything = [KeyRange(b"a", b"b")]
    assert "version 3" in str(changes.conflict(1, [], everything))
    assert changes.conflict(3, [], everything) is None


def test_nothing_written_is_nothing_to_conflict_with() -> None:
    changes = ConflictHistory(7)
    assert changes.conflict(7, [(TABLE, [b"a"])], [KeyRange(b"", None)]) is None
    assert "since version 7" in str(changes.conflict(6, [(TABLE, [b"a"])], []))


def test_commits_below_every_open_transaction_are_forgotten() -> None:
    changes = history([b"a"], [b"b"], [b"c"])
    changes.forget_before(2)
    assert changes.keys_count == 1
    assert changes.conflict(2, [(TABLE, [b"c"])], []) is not None
    assert changes.conflict(2, [(TABLE, [b"a", b"b"])], []) is None
    assert changes.conflict(1, [], []) is not None, "what it read can no longer be checked"


def test_forgetting_keeps_newer_writes_of_the_same_key() -> None:
    changes = history([b"a"], [b"a"], [b"b"])
    changes.forget_before(1)
    assert changes.conflict(1, [(TABLE, [b"a"])], []) is not None
    changes.forget_before(3)
    assert changes.keys_count == 0
    assert changes.conflict(3, [(TABLE, [b"a", b"b"])], [KeyRange(b"", None)]) is None


def test_memory_is_bounded_by_forgetting_the_oldest() -> None:
    changes = history([b"a", b"b"], [b"c"], [b"d"], keys_max=2)
    assert changes.keys_count == 2
    assert changes.conflict(1, [(TABLE, [b"c"])], []) is not None
    assert "only remembered since version 1" in str(changes.conflict(0, [(TABLE, [b"z"])], []))


def test_commit_larger_than_the_bound_refuses_all_before_it() -> None:
    changes = history([b"a", b"b", b"c"], keys_max=2)
    assert changes.keys_count == 0
    assert changes.conflict(0, [(TABLE, [b"z"])], []) is not None
    assert changes.conflict(1, [(TABLE, [b"a"])], []) is None
