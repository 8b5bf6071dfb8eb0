"""Damaged folders of a store, opened again: segment files, RocksDB's log and its other files, and the small ones.

Either the store refuses with one typed line, or every row that was acknowledged is there, and no other; and whatever
it says, the segment files stay where they are.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from shuffle.errors import ShuffleError
from shuffle.statestore import StateClient
from shuffle.statestore.codec.segment import RecordIndex, decode_batch
from shuffle.statestore.local.local import LocalStore
from tests.fuzz.findings import Outcome, Problem
from tests.fuzz.mutate import damaged
from tests.fuzz.oracles import answer_problems

KEY, VALUE = pa.schema([("k", pa.int64())]), pa.schema([("s", pa.string())])
QUEUE = pa.schema([("n", pa.int64()), ("s", pa.string())])
PARTITIONS = 3
COMMITS = 40
ROWS = 5
WHOLE_OF = 20
"""One input in so many opens the whole store; the others read a segment file alone, a hundred times quicker."""


class _Image:
    """A store as a crash leaves it: copied while it was open, after everything was acknowledged."""

    def __init__(self, folder: Path, reopened: bool) -> None:
        self.folder = folder
        self.rows: dict[int, str] = {}
        self.queued: list[list[tuple[int, str]]] = [[] for _ in range(PARTITIONS)]
        live = folder.with_name(f"{folder.name}.live")
        with StateClient(LocalStore(live)) as client:
            client.create_table("t", key=KEY, value=VALUE)
            client.create_queue("q", schema=QUEUE, partitions=PARTITIONS)
            self._fill(client, 0)
        with StateClient(LocalStore(live)) as client:
            if reopened:
                self._fill(client, COMMITS)
            if folder.exists():
                shutil.rmtree(folder)
            shutil.copytree(live, folder)
        shutil.rmtree(live)

    def _fill(self, client: StateClient, first: int) -> None:
        for commit in range(first, first + COMMITS):
            keys = list(range(commit * ROWS, (commit + 1) * ROWS))
            texts = [f"text {key} " * 5 for key in keys]
            with client.transaction() as tx:
                tx.write("t", pa.table({"k": keys, "s": texts}))
                tx.append("q", commit % PARTITIONS, pa.table({"n": keys, "s": texts}))
                tx.commit()
            self.rows.update(zip(keys, texts, strict=True))
            self.queued[commit % PARTITIONS] += zip(keys, texts, strict=True)

    def segments(self) -> list[Path]:
        return sorted((self.folder / "segments").iterdir())


class _Folders:
    """Copies an image, damages it, opens it, and compares what is there with what was acknowledged."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._note = note
        self._images = [_Image(folder / f"image{n}", reopened=bool(n)) for n in range(2)]
        self._copy = folder / "copy"

    def opened(self, image: _Image, damage: Callable[[Path], str]) -> Outcome:
        if self._copy.exists():
            shutil.rmtree(self._copy)
        shutil.copytree(image.folder, self._copy)
        shown = damage(self._copy)
        self._note(shown)
        segments = {path.name for path in self._copy.glob("segments/*")}
        outcome = self._judged(image, shown)
        lost = segments - {path.name for path in self._copy.rglob("*") if path.parent.parent.name != "rocks"}
        if lost:
            outcome.problems.append(Problem("wrong", f"segment files were deleted: {sorted(lost)[:3]}"))
        return outcome

    def _judged(self, image: _Image, shown: str) -> Outcome:
        client: StateClient | None = None
        try:
            client = StateClient(LocalStore(self._copy))
            return Outcome("accepted", self._compared(client, image), shown=shown)
        except ShuffleError as error:
            told = error.message.replace(str(self._copy), "")
            problems = answer_problems(told.encode("utf-8", "replace"))
            if len(told.splitlines()) > 1:
                problems.append(Problem("untyped", f"not one line: {told[:150]!r}"))
            return Outcome(error.code, problems, shown=shown)
        except Exception as error:
            return Outcome("raised", [Problem("untyped", f"{type(error).__name__}: {str(error)[:150]}")], shown=shown)
        finally:
            if client is not None:
                with contextlib.suppress(Exception):
                    client.close()

    def _compared(self, client: StateClient, image: _Image) -> list[Problem]:
        found = {row["k"]: row["s"] for row in client.scan("t").read_all().to_pylist()}
        problems = []
        if found != image.rows:
            problems.append(
                Problem("wrong", f"the store opens with {len(found)} of {len(image.rows)} acknowledged rows")
            )
        queue = client.queue("q")
        for partition, wanted in enumerate(image.queued):
            rows, _ = queue.read(partition, 0, max_rows=10_000)
            if [(row["n"], row["s"]) for row in rows.to_pylist()] != wanted:
                problems.append(Problem("wrong", f"a queue gives {rows.num_rows} of {len(wanted)} rows, or others"))
        return problems

    def close(self) -> None:
        pass


class SegmentsTarget(_Folders):
    """Segment files with bytes flipped, cut off, doubled and appended."""

    def run(self, number: int, chance: random.Random) -> Outcome:
        image = chance.choice(self._images)
        if chance.randrange(WHOLE_OF) == 0:
            return self.opened(image, lambda folder: _damage_one(sorted((folder / "segments").iterdir()), chance))
        file = chance.choice(image.segments())
        return self._read(file, chance)

    def _read(self, file: Path, chance: random.Random) -> Outcome:
        """As the store reads a segment: the index of its records, then each record."""
        whole = file.read_bytes()
        data = damaged(whole, chance)
        shown = f"{file.name}, {len(whole)} bytes, damaged from {_first_difference(whole, data)} on"
        self._note(shown)
        try:
            rows = _rows_of(data, len(whole))
        except ShuffleError as error:
            return Outcome(error.code, answer_problems(error.message.encode()), shown=shown)
        except Exception as error:
            return Outcome("raised", [Problem("untyped", f"{type(error).__name__}: {str(error)[:150]}")], shown=shown)
        if rows != _rows_of(whole, len(whole)):
            return Outcome("accepted", [Problem("wrong", "a damaged segment gives other rows")], shown=shown)
        return Outcome("accepted", shown=shown)


class LogsTarget(_Folders):
    """Everything else of the folder: RocksDB's log and other files, FORMAT and the small ones, whole folders."""

    def run(self, number: int, chance: random.Random) -> Outcome:
        image = chance.choice(self._images)
        return self.opened(image, lambda folder: self._damage(folder, chance))

    def _damage(self, folder: Path, chance: random.Random) -> str:
        kind = chance.randrange(20)
        if kind <= 9:
            return _damage_one(sorted((folder / "rocks").glob("*.log")), chance)
        if kind <= 13:
            return _damage_one(sorted(path for path in (folder / "rocks").iterdir() if path.is_file()), chance)
        if kind <= 17:
            return _damage_one(sorted(path for path in folder.iterdir() if path.is_file()), chance)
        return _damage_folder(folder, chance)


def _rows_of(data: bytes, committed_bytes: int) -> list[Any]:
    index = RecordIndex.load(memoryview(data), committed_bytes, "segment")
    buffer = pa.py_buffer(data)
    rows: list[Any] = []
    for record in range(len(index)):
        begin, end = index.offset(record), index.offset(record + 1)
        head, batch = decode_batch(buffer.slice(begin, end - begin), QUEUE, "segment", begin)
        batch.validate(full=True)
        rows.append((head.first_row, batch.to_pylist()))
    return rows


def _first_difference(one: bytes, other: bytes) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _damage_one(files: list[Path], chance: random.Random) -> str:
    """One of the files, in one of the ways in which files are lost."""
    file = chance.choice(files)
    name = f"{file.parent.name}/{file.name}"
    whole = file.read_bytes()
    kind = chance.randrange(12)
    if kind == 0:
        file.unlink()
        return f"{name} is missing"
    if kind == 1:
        file.write_bytes(b"")
        return f"{name} is empty"
    if kind == 2:
        file.unlink()
        file.mkdir()
        return f"{name} is a folder"
    if kind == 3:
        file.write_bytes(bytes(len(whole)))
        return f"{name} is all zeros"
    if kind == 4:
        at = chance.randrange(len(whole) + 1)
        file.write_bytes(whole[:at])
        return f"{name} is cut to {at} of {len(whole)} bytes"
    if kind == 5:
        tail = chance.randbytes(chance.choice((1, 7, 100, 40_000)))
        file.write_bytes(whole + tail)
        return f"{name} has {len(tail)} bytes more than {len(whole)}"
    if kind == 6 and len(whole) < 100:
        text = chance.choice(
            (
                b"-1",
                b"0",
                b"2",
                b"1.5",
                b"9" * 5000,
                b"\xff",
                b"null",
                b"{}",
                b"[]",
                b"true",
                b'{"version": "x"}',
                b'{"address": 5}',
            )
        )
        file.write_bytes(text)
        return f"{name} says {text[:30]!r}"
    made = damaged(whole, chance)
    file.write_bytes(made)
    return f"{name}, {len(whole)} bytes, damaged from {_first_difference(whole, made)} on"


def _damage_folder(folder: Path, chance: random.Random) -> str:
    """Half a backup: a part of the folder is missing, empty, or something else."""
    part = folder / chance.choice(("rocks", "segments"))
    kind = chance.randrange(3)
    kept = [path for path in part.iterdir() if path.is_file()] if kind == 2 else []
    if kind == 2 and kept:
        gone = chance.sample(kept, chance.randint(1, len(kept)))
        for path in gone:
            path.unlink()
        return f"{part.name} has lost {[path.name for path in gone][:4]}"
    shutil.rmtree(part)
    if kind == 0:
        return f"{part.name} is missing"
    os.mkdir(part) if chance.random() < 0.5 else part.write_bytes(b"x")
    return f"{part.name} is {'empty' if part.is_dir() else 'a file'}"
