"""The reducer's side of GetRows against a mapper that sends false handles of shared memory, and false rows."""

from __future__ import annotations

import fcntl
import io
import json
import os
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from shuffle.errors import ShuffleError
from shuffle.ids import Guid, ReducerIndex, ShuffleIndex
from shuffle.messages import GetRows
from shuffle.reducer.exchange import RowStream
from tests.fuzz import arrow
from tests.fuzz.findings import Outcome, Problem
from tests.fuzz.mutate import INTEGERS, changed, damaged, odd_value
from tests.fuzz.oracles import answer_problems

SCHEMA = pa.schema(
    [("n", pa.int64()), ("s", pa.string()), ("b", pa.binary()), ("l", pa.list_(pa.int32())), ("nothing", pa.null())]
)
MEMORY_BYTES = 1 << 16


class _Script:
    """Stands for Flight's client: one exchange whose answers are known beforehand."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def do_exchange(self, descriptor: Any, options: Any) -> tuple[Any, Any]:
        return self, self

    def begin(self, schema: pa.Schema) -> None: ...

    def write_metadata(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def cancel(self) -> None: ...

    def read_chunk(self) -> Any:
        if not self.answers:
            raise StopIteration
        answer = self.answers.pop(0)
        return answer() if callable(answer) else answer


class SharedMemoryTarget:
    """A stream for each input; the memory is this process's own, as another process of the user could make it."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._note_input = note
        self._pipe = os.pipe()
        """A file that cannot be mapped, though its number and inode are right."""
        self._request = GetRows(Guid("g"), ReducerIndex(0), ShuffleIndex(-1), ShuffleIndex(-1), 1000, 1 << 20)

    def run(self, number: int, chance: random.Random) -> Outcome:
        script = _Script()
        stream = RowStream(script, "mapper 0")
        memory = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
        try:
            asked, shown = self._answers(script, memory, chance)
            if asked == 1:  # Else the memory is to be cut between two answers.
                fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._note_input(shown)
            outcome = Outcome("accepted", shown=shown)
            for _ in range(asked):
                outcome = self._taken(stream, shown)
                if outcome.problems:
                    break
            return outcome
        finally:
            stream.close()
            os.close(memory)

    def _taken(self, stream: RowStream, shown: str) -> Outcome:
        try:
            answer = stream.get_rows(self._request, 1.0)
            last: Any  # It is what the mapper said, whatever its type promises.
            for batch, last in answer.batches:
                if not isinstance(last, int) or isinstance(last, bool):
                    return Outcome("accepted", [Problem("wrong", f"a shuffle index {last!r}")], shown=shown)
                _touch(batch)
        except ShuffleError as error:
            return Outcome(error.code, answer_problems(error.message.encode("utf-8", "replace")), shown=shown)
        except _Lie as error:
            told = f"rows that lie were handed on: {str(error).splitlines()[0][:120]}"
            return Outcome("accepted", [Problem("wrong", told)], shown=shown)
        except Exception as error:
            return Outcome("raised", [Problem("untyped", f"{type(error).__name__}: {str(error)[:150]}")], shown=shown)
        return Outcome("accepted", shown=shown)

    # --- answers ---

    def _answers(self, script: _Script, memory: int, chance: random.Random) -> tuple[int, str]:
        """How often to ask, and what the mapper will say."""
        kind = chance.randrange(12)
        if kind <= 3:
            return self._lying_note(script, memory, chance)
        if kind <= 6:
            return self._lying_memory(script, memory, chance)
        if kind == 7:
            return self._shrunk(script, memory, chance)
        if kind <= 9:
            return self._wire(script, chance)
        told = chance.choice(
            (b"", b"@", b"@[]", b"@{}", b"@[1,2,3]", b"{", b'{"code": 5}', b"{}", b"..", b"12+", b"x", b"\xff" * 9)
        )
        told = chance.choice((told, damaged(b'{"code": "rows_gone", "message": "x", "fields": {}}', chance)))
        script.answers.append(_message(told))
        return 1, f"metadata {told!r}"

    def _note(self, memory: int, size: int, last: list[Any]) -> list[Any]:
        return [os.getpid(), memory, os.fstat(memory).st_ino, size, *last]

    def _lying_note(self, script: _Script, memory: int, chance: random.Random) -> tuple[int, str]:
        """Memory that is right, and a note that is not."""
        stream = _stream(chance, 2)
        os.write(memory, stream + bytes(chance.choice((0, 4096))))
        note: Any = self._note(memory, len(stream), [4, 9])
        if chance.random() < 0.5:
            note[chance.randrange(4)] = chance.choice((*INTEGERS, *(odd_value(chance) for _ in range(5)), 0, 1, 2))
        else:
            note = changed(note, chance)
        if chance.random() < 0.1:
            read = self._pipe[0]
            note = [os.getpid(), read, os.fstat(read).st_ino, 100, 1]
            script.answers += [_message(b"@" + _told(note)), _message(NO_ROWS)]
            return 1, f"a pipe: {note}"
        if chance.random() < 0.1:
            os.ftruncate(memory, 0)
        script.answers += [_message(b"@" + _told(note)), _message(NO_ROWS)]
        return 1, f"note {note}"

    def _lying_memory(self, script: _Script, memory: int, chance: random.Random) -> tuple[int, str]:
        """A note that is right, and memory whose rows lie."""
        batch = arrow.Message.of(arrow.some_batch(chance, SCHEMA, rows=chance.choice((1, 5, 50))))
        lie, about = arrow.lying(batch, chance)
        head = arrow.Message.of_schema(SCHEMA).encapsulated()
        stream = head + lie.encapsulated() + arrow.END
        if chance.random() < 0.2:
            stream, about = damaged(_stream(chance, 2), chance), "the stream is damaged"
        os.write(memory, stream)
        script.answers.append(_message(b"@" + _told(self._note(memory, len(stream), [7]))))
        return 1, f"memory: {about}; {stream[len(head) : len(head) + 250].hex()}"

    def _shrunk(self, script: _Script, memory: int, chance: random.Random) -> tuple[int, str]:
        """Memory that is cut between two answers: to touch what is mapped of it is a signal, not an error."""
        stream = _stream(chance, 1) + bytes(MEMORY_BYTES)
        os.write(memory, stream)
        note = _told(self._note(memory, len(stream), [4]))
        left = chance.choice((0, 1, 4096))

        def cut() -> Any:
            os.ftruncate(memory, left)
            return _message(b"@" + note)

        script.answers += [_message(b"@" + note), cut, _message(NO_ROWS)]
        return 2, f"memory of {len(stream)} bytes, cut to {left} after the first answer"

    def _wire(self, script: _Script, chance: random.Random) -> tuple[int, str]:
        """Rows over the wire that lie, as Flight's client would hand them on, with tails of every sort."""
        lie, about = arrow.lying(arrow.Message.of(arrow.some_batch(chance, SCHEMA, rows=5)), chance)
        tail = chance.choice(
            (
                _tail(5),
                _tail(5, more=True),
                _tail(5, flags=255),
                _tail(5, generation=2**32 - 1),
                _tail(5, complete=4),
                _tail(-(2**63)),
                damaged(_tail(5), chance),
                b"5+",
                b"",
                b"x",
                b"9" * 5000,
                b"#",
            )
        )
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(lie.encapsulated()), SCHEMA)
        except (pa.ArrowException, OSError, EOFError):
            batch = arrow.some_batch(chance, SCHEMA, rows=2)  # Flight's client would have refused the other one.
        script.answers += [SimpleNamespace(data=batch, app_metadata=tail), _message(NO_ROWS)]
        return 1, f"wire, tail {tail[:20]!r}, lie: {about}"

    def close(self) -> None:
        pass


class _Lie(Exception):
    """A batch was handed on whose values do not lie in its buffers."""


def _touch(batch: pa.RecordBatch) -> None:
    """Use every value, as a reduce does, unless it is known what that would lead to.

    A null count that is wrong and text that is not UTF-8 are not held against the reducer: no memory but the batch's
    own is read for them, and to look for them would take longer than to reduce the rows.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        if not _HARMLESS.search(str(error)):
            raise _Lie(str(error)) from None
        return
    batch.to_pylist()


_HARMLESS = re.compile(r"null_count value .* doesn't match|Invalid UTF8")


def _message(told: bytes) -> Any:
    return SimpleNamespace(data=None, app_metadata=told)


def _told(value: Any) -> bytes:
    """A note as a mapper packs it; one that cannot be packed, as whatever it is."""
    try:
        pid, fd, inode, size, *last = value
        tails = b"".join(_tail(index, more=at < len(last) - 1) for at, index in enumerate(last))
        return struct.pack("<IIQQ", pid, fd, inode, size) + tails
    except (struct.error, TypeError, ValueError):
        return json.dumps(value).encode("utf-8", "surrogatepass")


def _tail(index: int, flags: int = 0, generation: int = 0, complete: int | None = None, more: bool = False) -> bytes:
    return struct.pack("<cBIqqq", b"#", flags | more, generation, index, index if complete is None else complete, 0)


NO_ROWS = _tail(-1)


def _stream(chance: random.Random, batches: int) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for _ in range(batches):
            writer.write_batch(arrow.some_batch(chance, SCHEMA, rows=5))
    return sink.getvalue()
