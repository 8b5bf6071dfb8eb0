"""The store against plain dicts and lists, over every operation, with orderly ends and crashes in between.

A crash is what ``kill -9`` leaves: the files as they are while the store is open, at whatever it was about to do. The
machine copies them and goes on with the copy, so the store that was left never gets to close what the copy has.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shuffle.errors import CommitConflict, ConstraintViolated, Expired, OutOfRange, SequenceError
from shuffle.statestore import StateClient
from shuffle.statestore.engine import ordered_table
from shuffle.statestore.engine.ordered_table import PRODUCER_SEQUENCES_MAX

PARTITIONS = 2
SEGMENT_BYTES = 1_200
"""So small that a few appends fill a segment: most of what can go wrong is at its ends."""

KEYS = st.tuples(st.sampled_from(["", "a", "a\0", "a\0b", "b", "é"]), st.integers(-2, 2))
VALUES = st.none() | st.integers(0, 5)
NUMBERS = st.lists(st.integers(0, 9), max_size=4)
INDEXES = st.integers(0, PARTITIONS - 1)

COPY_ATTEMPTS_MAX = 100

Key = tuple[str, int]


def keys_table(keys: list[Key]) -> pa.Table:
    return pa.table({"s": pa.array([s for s, _ in keys], pa.string()), "n": pa.array([n for _, n in keys], pa.int64())})


def rows_table(rows: dict[Key, int | None]) -> pa.Table:
    return keys_table(list(rows)).append_column("v", pa.array(list(rows.values()), pa.int64()))


def numbers_table(numbers: list[int]) -> pa.Table:
    return pa.table({"x": pa.array(numbers, pa.int64())})


def as_dict(rows: pa.Table) -> dict[Key, int | None]:
    return {(row["s"], row["n"]): row["v"] for row in rows.to_pylist()}


def copy_of_one_moment(folder: Path, copy: Path) -> None:
    """What a crash now would leave. RocksDB deletes and renames in the background: then the copy is made again."""

    def files() -> dict[Path, tuple[int, int]]:
        found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
        return {path: (status.st_size, status.st_mtime_ns) for path, status in found.items()}

    for _ in range(COPY_ATTEMPTS_MAX):
        shutil.rmtree(copy, ignore_errors=True)
        with contextlib.suppress(OSError):  # (a file went while it was being looked at)
            before = files()
            shutil.copytree(folder, copy)
            if files() == before:
                return
    raise AssertionError(f"{folder} never stood still")


class StoreModel(RuleBasedStateMachine):
    """``rows``, ``queue`` and ``begins`` are what the store must hold; transactions have copies to change."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ordered_table, "SEGMENT_BYTES_MAX", SEGMENT_BYTES)
        self.root = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.lives = 0
        self.left: list[StateClient] = []
        self.client = StateClient.open(self.root / "0")
        self.rows: dict[Key, int | None] = {}
        self.queue: list[list[int]] = [[] for _ in range(PARTITIONS)]
        self.begins = [0] * PARTITIONS
        self.sequences: list[dict[int, tuple[int, int]]] = [{} for _ in range(PARTITIONS)]
        self.staged: dict[str, list[int]] = {}
        self.snapshots: list[tuple[Any, dict[Key, int | None]]] = []

    @initialize()
    def create(self) -> None:
        key = pa.schema([("s", pa.string()), ("n", pa.int64())])
        self.client.create_table("t", key, pa.schema([("v", pa.int64())]), {"small": "v <= 5"})
        self.client.create_queue("q", pa.schema([("x", pa.int64())]), PARTITIONS)

    # --- single operations ---

    @rule(rows=st.dictionaries(KEYS, VALUES, max_size=4), deleted=st.lists(KEYS, max_size=3))
    def write_and_delete(self, rows: dict[Key, int | None], deleted: list[Key]) -> None:
        with self.client.transaction() as tx:
            tx.write("t", rows_table(rows))
            tx.delete("t", keys_table(deleted))
            tx.commit()
        self.rows |= rows
        for key in deleted:
            self.rows.pop(key, None)

    @rule(partition=INDEXES, numbers=NUMBERS)
    def append(self, partition: int, numbers: list[int]) -> None:
        begin = len(self.queue[partition])
        self.queue[partition] += numbers
        assert self.client.queue("q").append(partition, numbers_table(numbers)) == (begin, len(self.queue[partition]))

    @rule(partition=INDEXES, numbers=NUMBERS, sequence=st.integers(0, 30))
    def append_as_producer(self, partition: int, numbers: list[int], sequence: int) -> None:
        seen = self.sequences[partition]
        remembered = dict(sorted(seen.items())[-PRODUCER_SEQUENCES_MAX:])
        queue = self.client.queue("q")
        if sequence in remembered:
            assert queue.append(partition, numbers_table(numbers), "p", sequence) == remembered[sequence]
        elif seen and sequence < max(seen):
            with pytest.raises(SequenceError):
                queue.append(partition, numbers_table(numbers), "p", sequence)
        else:
            begin = len(self.queue[partition])
            self.queue[partition] += numbers
            seen[sequence] = begin, len(self.queue[partition])
            assert queue.append(partition, numbers_table(numbers), "p", sequence) == seen[sequence]

    @rule(partition=INDEXES, index=st.integers(0, 40))
    def trim(self, partition: int, index: int) -> None:
        if index > len(self.queue[partition]):
            with pytest.raises(OutOfRange):
                self.client.queue("q").trim(partition, index)
        else:
            self.client.queue("q").trim(partition, index)
            self.begins[partition] = max(self.begins[partition], index)

    @rule(numbers=NUMBERS)
    def stage(self, numbers: list[int]) -> None:
        self.staged[self.client.queue("q").stage(numbers_table(numbers))] = numbers

    @precondition(lambda self: self.staged)
    @rule(data=st.data(), partition=INDEXES, before=NUMBERS, after=NUMBERS)
    def publish(self, data: st.DataObject, partition: int, before: list[int], after: list[int]) -> None:
        staged_id = data.draw(st.sampled_from(sorted(self.staged)))
        with self.client.transaction() as tx:
            tx.append("q", partition, numbers_table(before))
            tx.publish("q", partition, staged_id)
            tx.append("q", partition, numbers_table(after))
            tx.commit()
        self.queue[partition] += before + self.staged.pop(staged_id) + after
        with self.client.transaction() as tx:
            tx.publish("q", partition, staged_id)
            with pytest.raises(Expired):
                tx.commit()

    # --- transactions ---

    @rule(
        mine=st.dictionaries(KEYS, VALUES, max_size=3),
        deleted=st.lists(KEYS, max_size=2),
        read=st.lists(KEYS, max_size=3),
        scans=st.booleans(),
        others=st.dictionaries(KEYS, VALUES, max_size=2),
        numbers=NUMBERS,
    )
    def interleaved(
        self,
        mine: dict[Key, int | None],
        deleted: list[Key],
        read: list[Key],
        scans: bool,
        others: dict[Key, int | None],
        numbers: list[int],
    ) -> None:
        """A transaction reads, another one writes, and the first commits only if nothing it read was touched."""
        with self.client.transaction() as tx:
            own = dict(self.rows)
            assert as_dict(tx.lookup("t", keys_table(read))) == {key: own[key] for key in read if key in own}
            tx.write("t", rows_table(mine))
            tx.delete("t", keys_table(deleted))
            own |= mine
            for key in deleted:
                own.pop(key, None)
            if scans:
                assert as_dict(tx.scan("t", begin=("a",)).read_all()) == {k: v for k, v in own.items() if k >= ("a",)}
            tx.append("q", 0, numbers_table(numbers))
            with self.client.transaction() as other:
                other.write("t", rows_table(others))
                other.commit()
            self.rows |= others
            if any(key in read or (scans and key >= ("a",)) for key in others):
                with pytest.raises(CommitConflict):
                    tx.commit()
                return
            tx.commit()
        self.rows |= mine
        for key in deleted:
            self.rows.pop(key, None)
        self.queue[0] += numbers

    @rule(rows=st.dictionaries(KEYS, VALUES, max_size=2), numbers=NUMBERS)
    def refused(self, rows: dict[Key, int | None], numbers: list[int]) -> None:
        with self.client.transaction() as tx:
            tx.append("q", 1, numbers_table(numbers))
            tx.write("t", rows_table(rows))
            tx.trim("q", 1, 10**6)
            with pytest.raises(OutOfRange):
                tx.commit()
        with pytest.raises(ConstraintViolated):
            self.write_and_delete({**rows, ("bad", 0): 6}, [])

    # --- reading ---

    @rule(begin=KEYS, end=KEYS, reverse=st.booleans(), limit=st.none() | st.integers(0, 4))
    def scan(self, begin: Key, end: Key, reverse: bool, limit: int | None) -> None:
        found = self.client.scan("t", begin=begin, end=end, reverse=reverse, limit=limit).read_all()
        wanted = sorted((key for key in self.rows if begin <= key < end), reverse=reverse)[:limit]
        assert list(as_dict(found).items()) == [(key, self.rows[key]) for key in wanted]

    @precondition(lambda self: len(self.snapshots) < 3)
    @rule()
    def take_snapshot(self) -> None:
        self.snapshots.append((self.client.snapshot(), dict(self.rows)))

    @precondition(lambda self: self.snapshots)
    @rule()
    def release_snapshot(self) -> None:
        self.snapshots.pop(0)[0].close()

    @rule(partition=INDEXES, data=st.data(), max_rows=st.integers(1, 5))
    def read(self, partition: int, data: st.DataObject, max_rows: int) -> None:
        begin = data.draw(st.integers(self.begins[partition], len(self.queue[partition])))
        found, after = self.client.queue("q").read(partition, begin, max_rows=max_rows)
        assert found["x"].to_pylist() == self.queue[partition][begin : begin + max_rows]
        assert after == begin + found.num_rows
        if self.begins[partition]:
            with pytest.raises(OutOfRange):
                self.client.queue("q").read(partition, self.begins[partition] - 1)

    # --- ends and beginnings ---

    @rule()
    def reopen(self) -> None:
        self.snapshots.clear()
        self.client.close()
        self.client = StateClient.open(self.root / str(self.lives))

    @rule(garbage=st.binary(max_size=40))
    def crash(self, garbage: bytes) -> None:
        """Everything was acknowledged, so everything must be there; what lies behind it must not."""
        before = self.root / str(self.lives)
        self.lives += 1
        after = self.root / str(self.lives)
        copy_of_one_moment(before, after)
        for file in (after / "segments").iterdir():
            if not file.name.startswith("staged-"):
                with file.open("ab") as torn:
                    torn.write(garbage)
        (after / "segments" / "q1-p0-999-999.seg").write_bytes(garbage)
        self.snapshots.clear()
        self.left.append(self.client)
        self.client = StateClient.open(after)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not self.client.tables():
            return
        assert as_dict(self.client.scan("t").read_all()) == self.rows
        queue = self.client.queue("q")
        assert queue.bounds() == [(b, len(rows)) for b, rows in zip(self.begins, self.queue, strict=True)]
        for index, numbers in enumerate(self.queue):
            assert queue.read(index, self.begins[index])[0]["x"].to_pylist() == numbers[self.begins[index] :]
        for snapshot, rows in self.snapshots:
            assert as_dict(snapshot.scan("t").read_all()) == rows
            assert as_dict(snapshot.lookup("t", keys_table(list(self.rows)))) == {
                key: rows[key] for key in self.rows if key in rows
            }

    def teardown(self) -> None:
        self.snapshots.clear()
        for client in (*self.left, self.client):
            client.close()
        self.patch.undo()
        shutil.rmtree(self.root)


TestStoreModel = StoreModel.TestCase
TestStoreModel.settings = settings(max_examples=max(settings().max_examples // 2, 1), stateful_step_count=25)
