"""The store's lane: false frames, requests with broken fields, clients that disconnect at the wrong moment."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import time
from typing import Any

from shuffle.errors import BadInput, TooLarge
from shuffle.statestore.codec.keys import table_prefix
from shuffle.statestore.wire.lane_frames import GREETING, decode_frame, encode_frame, frame_bytes, local_address
from shuffle.statestore.wire.messages import Header
from tests.fuzz import arrow, calls
from tests.fuzz.findings import Outcome, Problem
from tests.fuzz.mutate import INTEGERS, as_read, changed, damaged, to_json
from tests.fuzz.oracles import answer_problems, has_records, records_problems
from tests.fuzz.targets.base import LaneRows, Questions, bounded
from tests.fuzz.world import ANSWER_S_MAX, FUZZ_QUEUE, LARGE_ROWS, World

LINGERING_MAX = 40
"""Connections that are left with half a question: the next one ends the oldest."""

LONG_WAIT_S = 0.03
"""A question that may wait long, as it says itself, is left after so long."""

VALUE_BYTES_MAX = 100_000
"""No value that is ever sent is larger, so none that comes back may be."""

_NULL = 0xFFFFFFFF


class Gone(Exception):
    """The store has closed the connection."""


class Connection:
    """A plain socket to the lane."""

    def __init__(self, world: World, far: bool) -> None:
        if far:
            self.sock = socket.create_connection(world.places.lane, ANSWER_S_MAX)
        else:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(ANSWER_S_MAX)
            self.sock.connect(local_address(world.places.lane_name))
        self.sock.settimeout(ANSWER_S_MAX)
        if self._exactly(len(GREETING)) != GREETING:
            raise Gone

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.sock.recv(min(count - len(data), 1 << 20))
            if not piece:
                raise Gone
            data += piece
        return data

    def answer(self, timeout_s: float = ANSWER_S_MAX) -> tuple[bytes, bytes]:
        """One frame and the bytes that follow it."""
        self.sock.settimeout(timeout_s)
        begin = self._exactly(4)
        whole = frame_bytes(begin)
        assert whole is not None
        frame = begin + self._exactly(whole - 4)
        header = json.loads(frame[12 : 12 + struct.unpack_from("<I", frame, 4)[0]])
        return frame, self._exactly(header["bytes"]) if "bytes" in header else b""

    def hang_up(self, abruptly: bool) -> None:
        if abruptly:
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class LaneTarget:
    """Keeps one connection for as long as the store does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._questions = Questions(world, "fuzz_lane", "fuzz_lane_q")
        self._connection: Connection | None = None
        self._far = False
        self._lingering: list[Connection] = []
        self._sent: set[Any] = {None}
        """Every value that was ever sent."""
        self._epoch = -1

    def run(self, number: int, chance: random.Random) -> Outcome:
        if self._epoch != self._world.epoch:
            self._forget()
        self._far = chance.random() < 0.3
        kind = chance.randrange(20)
        try:
            if kind <= 12:
                return self._ask(chance)
            if kind <= 15:
                return self._lie(chance)
            if kind <= 17:
                return self._leave_large(chance)
            if kind == 18:
                return self._leave_half(chance)
            return self._slowly(chance)
        except TimeoutError:
            self._drop()
            return Outcome("silent", [], True, f"lane, kind {kind}: no answer")
        except (Gone, OSError) as error:
            self._drop()
            return Outcome("closed", [], True, f"lane, kind {kind}: {error!r}")

    # --- kinds of inputs ---

    def _ask(self, chance: random.Random) -> Outcome:
        """A question with broken fields, in a frame that is right."""
        header: Any
        header, rows = self._question(chance)
        if chance.random() < 0.6:
            header = changed(header, chance)
        if rows is not None and chance.random() < 0.3:
            rows = self._broken_rows(rows, chance)
        data = to_json(header, chance)
        header = as_read(data, header)
        if self._questions.is_harmful(header):
            return Outcome("skipped")
        return self._exchange(_frame(data, rows), header, rows)

    def _question(self, chance: random.Random) -> tuple[Header, LaneRows | None]:
        header, rows = self._questions.make(chance)
        while header["op"] in ("scan", "stage") and chance.random() < 0.9:  # These are asked over Flight.
            header, rows = self._questions.make(chance)
        if header["op"] == "commit" and chance.random() < 0.05:  # Sections in the first row, as if they were many.
            keys, values = rows or ([], [])
            packed: Any = changed(header["sections"], chance) if chance.random() < 0.5 else header["sections"]
            if not self._questions.is_harmful({**header, "sections": packed}):
                rows = [None, *keys], [to_json(packed), *values]
                header = {**header, "sections": None}
        return header, rows

    def _broken_rows(self, rows: LaneRows, chance: random.Random) -> LaneRows:
        keys, values = list(rows[0]), list(rows[1])
        if not keys:
            return [b"x"], [b"y"]
        at = chance.randrange(len(keys))
        column = chance.choice((keys, values))
        prefix = table_prefix(chance.choice((self._questions.table_id, 0, 2**32 - 1)))
        column[at] = chance.choice(
            (None, b"", b"\0", b"x" * 70_000, prefix, prefix + b"\xff", damaged(column[at] or b"", chance))
        )
        return keys, values

    def _lie(self, chance: random.Random) -> Outcome:
        """A frame whose numbers are wrong, which is cut, doubled, or no frame at all."""
        header, rows = self._questions.make(chance)
        frame = bytearray(_frame(to_json(header), rows))
        step = chance.randrange(6)
        if step <= 2:
            struct.pack_into("<I", frame, 4 * step, chance.choice(INTEGERS) % 2**32)
        elif step == 3:
            frame = bytearray(damaged(bytes(frame), chance))
        elif step == 4:
            frame += frame[: chance.randint(1, len(frame))]
        else:
            frame = bytearray(chance.randbytes(chance.choice((1, 4, 12, 100))))
        if self._is_harmful_frame(bytes(frame)):
            return Outcome("skipped")
        whole = frame_bytes(bytes(frame))
        if whole is None or whole > len(frame):  # The store waits for the rest, and rightly.
            self._linger(self._fresh(), bytes(frame))
            return Outcome("left", shown=frame.hex())
        connection = self._fresh()
        connection.sock.sendall(self._remembered(bytes(frame)))
        try:
            answer, following = connection.answer(5.0)
        except Gone:
            return Outcome("closed", shown=frame.hex())
        finally:
            connection.hang_up(abruptly=False)
        return self._judged(answer, following, None, None, frame.hex())

    def _is_harmful_frame(self, frame: bytes) -> bool:
        try:
            header, _ = decode_frame(frame[: frame_bytes(frame)])
        except Exception:
            return False  # Whatever it is, it is not a commit to a table that matters.
        return self._questions.is_harmful(header)

    def _leave_large(self, chance: random.Random) -> Outcome:
        """Hang up in the middle of a large answer."""
        places = self._world.places
        if chance.random() < 0.5:
            header: Header = {"op": "read", "queue": places.queue_ids["bulk"], "partition": 0, "begin": 0}
            frame = encode_frame({**header, "rows": 4000, "bytes": 1 << 22, "wait_ms": 0}, None)
        else:
            large = places.table_ids["large"]
            keys: list[bytes | None] = [table_prefix(large) + f"k{n:04}".encode() for n in range(LARGE_ROWS)]
            frame = encode_frame({"op": "get", "table": large}, (keys, [None] * len(keys)))
        connection = self._fresh()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sock.sendall(frame)
        taken = chance.choice((0, 1, 100, 5000))
        if taken:
            connection.sock.recv(taken)
        time.sleep(chance.choice((0, 0, 0.001, 0.003)))
        connection.hang_up(abruptly=chance.random() < 0.5)
        return Outcome("left", shown=f"a client took {taken} bytes of a large answer and hung up")

    def _leave_half(self, chance: random.Random) -> Outcome:
        """Half a question, then silence or the end; or a whole one, and the end before its answer."""
        header, rows = self._questions.make(chance)
        frame = _frame(to_json(header), rows)
        connection = self._fresh()
        part = frame[: chance.randrange(len(frame) + 1)]
        if chance.random() < 0.5 and len(part) < len(frame):
            self._linger(connection, part)
        else:
            connection.sock.sendall(self._remembered(part))
            connection.hang_up(abruptly=chance.random() < 0.5)
        return Outcome("left", shown=f"{len(part)} of {len(frame)} bytes of {bounded(header)}")

    def _slowly(self, chance: random.Random) -> Outcome:
        """A question byte by byte, its answer in small pieces."""
        header, rows = self._questions.make(chance)
        frame = _frame(to_json(header), rows)[:2000]
        connection = self._fresh()
        self._remembered(frame)
        for at in range(0, len(frame), max(len(frame) // 8, 1)):
            connection.sock.sendall(frame[at : at + max(len(frame) // 8, 1)])
        connection.sock.settimeout(LONG_WAIT_S)
        with contextlib.suppress(OSError):
            for _ in range(8):
                connection.sock.recv(8)
        connection.hang_up(abruptly=False)
        return Outcome("left", shown=f"slowly: {bounded(header)}")

    # --- one question ---

    def _exchange(self, frame: bytes, header: Any, rows: LaneRows | None) -> Outcome:
        shown = f"{bounded(header)} rows={bounded(rows)}"
        if self._connection is None:
            self._connection = self._fresh()
        connection = self._connection
        waits = isinstance(header, dict) and header.get("op") == "read" and header.get("wait_ms", 0) not in (0, 1)
        connection.sock.sendall(self._remembered(frame))
        try:
            answer, following = connection.answer(LONG_WAIT_S if waits else ANSWER_S_MAX)
        except TimeoutError:
            self._drop()
            return Outcome("left", shown=shown) if waits else Outcome("silent", [], True, shown)
        except (Gone, OSError):
            self._drop()
            return Outcome("closed", [], True, shown)
        return self._judged(answer, following, header, rows, shown)

    def _judged(self, answer: bytes, following: bytes, header: Any, rows: LaneRows | None, shown: str) -> Outcome:
        told, found = decode_frame(answer, 1 << 22)
        problems = self._questions.unasked(answer_problems(answer), header)
        if "error" in told:
            code = json.loads(told["error"])["code"]
            if code == "internal":
                problems.append(Problem("untyped", json.loads(told["error"])["message"][:200]))
            return Outcome(code, problems, code in calls.SUSPICIOUS, shown)
        if isinstance(header, dict):
            problems += self._accepted(header, rows, told)
        if has_records(told):
            problems += records_problems(told, following, header)
        if found is not None:
            problems += [
                Problem("leak", f"a value of {len(value)} bytes, and none so large was ever written")
                for value in found[1]
                if value is not None and len(value) > VALUE_BYTES_MAX
            ]
            if isinstance(header, dict) and header.get("table") == self._questions.table_id:
                unsent = [value for value in found[1] if value not in self._sent]
                problems += [Problem("leak", f"a value that nobody has sent: {bounded(value)}") for value in unsent[:1]]
        return Outcome("accepted", problems, False, shown)

    def _accepted(self, header: Header, rows: LaneRows | None, told: Header) -> list[Problem]:
        """What an answer that is no error means for the next questions, and whether it may be one."""
        why = self._questions.nonsense(header)
        problems = [Problem("wrong", f"accepted: {why}")] if why is not None else []
        if header.get("op") in ("open", "get") and "view" in told:
            self._questions.views = [*self._questions.views[-20:], (told["view"], told["version"])]
        if header.get("op") == "commit" and isinstance(header.get("sections"), list) and rows is not None:
            problems += appended_problems(header["sections"], rows)
        return problems

    def _remembered(self, frame: bytes) -> bytes:
        """The frame, whose values may now be found in the fuzzed table."""
        with contextlib.suppress(BadInput, TooLarge, struct.error):
            _, rows = decode_frame(frame)
            self._sent.update(rows[1] if rows is not None else ())
        return frame

    # --- connections ---

    def _fresh(self) -> Connection:
        return Connection(self._world, self._far)

    def _linger(self, connection: Connection, data: bytes) -> None:
        connection.sock.sendall(data)
        self._lingering.append(connection)
        if len(self._lingering) > LINGERING_MAX:
            self._lingering.pop(0).hang_up(abruptly=False)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.hang_up(abruptly=False)
            self._connection = None

    def _forget(self) -> None:
        self._epoch = self._world.epoch
        self._drop()
        self._questions.session = self._world.open_session()
        self._questions.views.clear()

    def close(self) -> None:
        self._drop()
        while self._lingering:
            self._lingering.pop().hang_up(abruptly=False)


def appended_problems(sections: list[Any], rows: LaneRows) -> list[Problem]:
    """Batches that a commit has put into a queue, and that no reader can take."""
    at, problems = 0, list[Problem]()
    for section in sections:
        kind = str(section[0]) if isinstance(section, list) and section else ""
        count = {"read": 1, "range": 1, "expect": 2, "write": 2, "append": 3}.get(kind)
        if count is None:
            continue
        taken = rows[1][at : at + section[count]]
        at += section[count]
        if kind == "append":
            bad = [value for value in taken if value is not None and not arrow.is_sound(value, FUZZ_QUEUE)]
            problems += [Problem("wrong", "a batch that lies was accepted into a queue") for _ in bad[:1]]
    return problems


def _frame(header: bytes, rows: LaneRows | None) -> bytes:
    if rows is None:
        return struct.pack("<III", 8 + len(header), len(header), _NULL) + header
    both = [*rows[0], *rows[1]]
    lengths = struct.pack(f"<{len(both)}I", *(_NULL if value is None else len(value) for value in both))
    body = b"".join([header, lengths, *filter(None, both)])
    return struct.pack("<III", 8 + len(body), len(header), len(rows[0])) + body
