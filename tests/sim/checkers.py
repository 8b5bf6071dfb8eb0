"""The invariants, checked from the bytes on the disk and the messages seen, without any code of the product.

The numbers in the messages are those of the list of invariants in ``docs/reliability.md``. Formats are decoded here a
second time, from their description: so a codec that is wrong in both directions is found.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tests.sim.export_checker import ExportChecker
from tests.sim.grouping import GroupChecker
from tests.sim.spill_checker import SpillChecker
from tests.sim.tail_checker import Tail, TailChecker, produced_rows
from tests.sim.transaction_checker import TransactionChecker
from tests.sim.workload import Oracle

if TYPE_CHECKING:
    from tests.sim.disk import Disk
from tests.sim.durable_tables import DurableTables


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: int, what: str) -> None:
        super().__init__(f"invariant {invariant}: {what}")
        self.invariant = invariant


def _ordered_int32(number: int) -> bytes:
    return struct.pack(">I", number ^ 0x80000000)


class Names:
    """Where tables and queues are on the disk, from the catalogue's rows."""

    def __init__(self, keys: dict[bytes, bytes]) -> None:
        self.tables: dict[str, bytes] = {}
        self.queues: dict[str, bytes] = {}
        for key, value in keys.items():
            if key.startswith(b"\0ct"):
                parsed = json.loads(value)
                self.tables[parsed["name"]] = b"t" + struct.pack(">I", parsed["table_id"])
            elif key.startswith(b"\0cq"):
                parsed = json.loads(value)
                self.queues[parsed["name"]] = b"q" + struct.pack(">I", parsed["queue_id"])


class Checkers:
    """All of them, over one run."""

    def __init__(self, oracle: Oracle, disk: Disk, on_violation: Callable[[], None] = lambda: None) -> None:
        self.oracle = oracle
        self.disk = disk
        self.on_violation = on_violation
        self.violations: list[Violation] = []
        names = Names(disk.keys)
        self._tables = DurableTables(disk)
        mappers, reducers = range(oracle.workload.mapper_count), range(oracle.workload.reducer_count)
        self._mappers, self._reducers = mappers, reducers
        self._reducer_keys = [names.tables["job/reducers"] + _ordered_int32(r) for r in reducers]
        self._mapper_keys = [names.tables["job/mappers"] + _ordered_int32(m) for m in mappers]
        self._effect_keys = {
            (m, r): names.tables["effects"] + _ordered_int32(m) + _ordered_int32(r) for m in mappers for r in reducers
        }
        self._spills = SpillChecker(oracle, disk, names.queues)
        self._transactions = TransactionChecker()
        self.tails = TailChecker(oracle, self.violated)
        self.exports = ExportChecker(oracle, disk, names.queues.get("job/outbox"), self.violated)
        partitions = range(len(oracle.workload.partitions))
        self._input_keys = [names.queues["input"] + struct.pack(">I", partition) + b"p" for partition in partitions]
        self._queues = names.queues
        self.committed = [[-1] * len(mappers) for _ in reducers]
        """Per reducer and mapper: the last committed index that was ever durable."""
        self._widths = [0] * len(reducers)
        """Per reducer: of how many mappers its row is."""
        self._mapper_states = [(0, 0, 0)] * len(mappers)
        self._groups: GroupChecker | None = None
        if oracle.workload.groups:
            reads = names.tables["job/reads"]
            self._groups = GroupChecker(oracle, self._tables, reads, self._input_begin, self.violated)
        self._input_begins = [0] * len(mappers)
        self._last_rows: tuple[bytes | None, ...] = ()
        self._served: dict[tuple[str, int], int] = {}
        """By the mapper's guid and reducer: the last index that was in any answer."""
        self.commits_seen = 0

    def violated(self, invariant: int, what: str) -> None:
        self.violations.append(Violation(invariant, what))
        self.on_violation()

    # durable contents

    def durable_version(self) -> int:
        return int(self.disk.keys.get(b"\0v", b"0"))

    def on_durable(self) -> None:
        """After every change of what a crash would leave."""
        if self._groups is not None:
            self._groups.look()
        self.exports.on_durable()
        get = self.disk.keys.get
        rows = tuple(self._table_rows([*self._reducer_keys, *self._mapper_keys, *self._effect_keys.values()]))
        rows += tuple(get(key) for key in (*self._input_keys, *self._spills.partition_keys))
        if rows == self._last_rows:
            return
        self._last_rows = rows
        self.commits_seen += 1
        self._spills.look()
        self._check_committed()
        effects = self._table_rows(list(self._effect_keys.values()))
        self._check_effects(dict(zip(self._effect_keys, effects, strict=True)), self.committed, "on disk")
        for mapper in self._mappers:
            self._check_mapper(mapper)

    def _table_rows(self, keys: list[bytes]) -> list[bytes | None]:
        """The durable rows of tables with these keys."""
        try:
            return self._tables.get_all(keys)
        except (struct.error, KeyError, ValueError, IndexError, OSError, pa.ArrowException) as error:
            self.violated(8, f"a changelog cannot be read from the disk: {error!r}")
            return [None] * len(keys)

    def _check_committed(self) -> None:
        for reducer, value in enumerate(self._table_rows(self._reducer_keys)):
            if value is None:
                if max(self.committed[reducer]) >= 0:
                    self.violated(3, f"the row of reducer {reducer} is gone")
                continue
            committed, generation, fronts = decode_reducer_row(value)
            if len(committed) < self._widths[reducer]:
                self.violated(
                    3, f"reducer {reducer}: its row had {self._widths[reducer]} mappers, now {len(committed)}"
                )
            self._widths[reducer] = len(committed)
            self.tails.on_reducer_row(reducer, committed, generation, fronts)
            for mapper, index in enumerate(committed):
                before = self.committed[reducer][mapper]
                if index < before:
                    self.violated(3, f"reducer {reducer}, mapper {mapper}: committed fell from {before} to {index}")
                if index not in self.oracle.effects[mapper][reducer]:
                    self.violated(3, f"reducer {reducer}, mapper {mapper}: committed {index} is no row of its own")
            # Of a mapper that came after the row was written nothing is committed.
            self.committed[reducer] = committed + [-1] * (len(self._mappers) - len(committed))

    def _check_effects(
        self, values: dict[tuple[int, int], bytes | None], committed: Sequence[Sequence[int]], where: str
    ) -> None:
        for (mapper, reducer), value in values.items():
            found = struct.unpack_from("<qq", value, 1) if value is not None else (0, 0)
            expected = self.oracle.effects[mapper][reducer].get(committed[reducer][mapper])
            if expected is not None and found != expected:
                self.violated(
                    2,
                    f"{where}: mapper {mapper}, reducer {reducer}: {found[0]} rows folded, and committed "
                    f"{committed[reducer][mapper]} stands for {expected[0]}"
                    + ("" if found[0] != expected[0] else " (in another order, or others)"),
                )

    def _check_mapper(self, mapper: int) -> None:
        [value] = self._table_rows([self._mapper_keys[mapper]])
        if value is not None:
            rows_in, rows_out, generation, front, length = struct.unpack_from("<qqiqI", value, 1)
            token = value[33 : 33 + length]
            self.tails.on_mapper_row(mapper, rows_in, rows_out, generation, None if value[0] & 16 else front)
            self._check_mapper_state(mapper, rows_in, rows_out, self._position(mapper, token))
        if self._groups is not None:
            self._groups.check_trimmed(mapper)
            return
        position = self._mapper_states[mapper][2]
        begin = self._input_begin(mapper)
        if begin < self._input_begins[mapper]:
            self.violated(7, f"input {mapper}: what was trimmed came back, {self._input_begins[mapper]} to {begin}")
        self._input_begins[mapper] = begin
        if begin > position:
            self.violated(7, f"input {mapper} is trimmed up to {begin}, and the mapper's state is at {position}")

    def _position(self, mapper: int, token: bytes) -> int:
        if self._groups is not None:
            return self._groups.position(mapper, token)
        return int(struct.unpack(">q", token)[0]) if token else 0

    def _input_begin(self, partition: int) -> int:
        """The position up to which a partition of the input is trimmed."""
        row = self.disk.keys.get(self._input_keys[partition])
        return int(struct.unpack("<QQ", row)[0]) if row is not None else 0

    def _check_mapper_state(self, mapper: int, rows_in: int, rows_out: int, position: int) -> None:
        before = self._mapper_states[mapper]
        self._mapper_states[mapper] = rows_in, rows_out, position
        oracle = self.oracle
        if rows_in < before[0] or rows_out < before[1] or position < before[2]:
            self.violated(3, f"mapper {mapper}: its state fell from {before} to {(rows_in, rows_out, position)}")
        if oracle.input_ends[mapper].get(rows_in) != rows_out:
            self.violated(5, f"mapper {mapper}: input row {rows_in} and shuffle row {rows_out} do not belong together")
            return
        positions = oracle.positions[mapper]
        low = positions[rows_in - 1] + 1 if rows_in else 0
        high = positions[rows_in] if rows_in < len(positions) else len(oracle.workload.inputs[mapper])
        if not low <= position <= high:
            self.violated(5, f"mapper {mapper}: the token says {position}, input row {rows_in} is in {low} to {high}")
        for reducer in self._reducers:
            done = self.committed[reducer][mapper]
            wrong = self._spills.problem(mapper, reducer, done, rows_out)
            if wrong is not None:
                self.violated(7, f"mapper {mapper} has passed row {wrong}, committed is {done}")

    # messages

    def on_commit(self, request: Any, version: int) -> None:
        """A commit is about to be acknowledged."""
        wrong = self._transactions.problem(request, version)
        if wrong is not None:
            self.violated(4, wrong)
        if version > self.durable_version():
            self.violated(8, f"version {version} is acknowledged and {self.durable_version()} is durable")

    def on_get_rows(
        self,
        mapper: int,
        ticket: dict[str, Any],
        found: Sequence[Any],
        tails: Sequence[Tail],
        input_end: int,
        is_lie: bool = False,
    ) -> None:
        """An answer to GetRows, as the mapper sends it, when its input has come to ``input_end``."""
        reducer, cursor, committed = ticket["reducer_index"], ticket["from_row_index"], ticket["committed_row_index"]
        durable = self.committed[reducer][mapper]
        if committed > durable and not is_lie:
            self.violated(7, f"reducer {reducer} tells mapper {mapper} it committed {committed}: durable is {durable}")
        if ticket["processor"] != "job":
            self.violated(7, f"mapper {mapper} answers a request of processor {ticket['processor']}")
        batches = [(rows, tail.last) for rows, tail in zip(found, tails, strict=False)]
        produced = produced_rows(self.oracle, mapper, input_end)
        self.tails.on_answer(mapper, ticket, [rows.num_rows for rows in found], tails, produced)
        at, served = (ticket["mapper_id"], reducer), [last for _, last in batches]
        if committed > max(durable, self._served.get(at, -1)):
            self.violated(7, f"mapper {mapper} believes that reducer {reducer} committed {committed}, never served")
        self._served[at] = max([self._served.get(at, -1), *served])
        expected = [row for row in self.oracle.parts[mapper][reducer] if row[0] > cursor]
        at = 0
        for rows, last in batches:
            outs = rows.column(1).to_pylist()
            wanted = expected[at : at + len(outs)]
            if [out for _, out in wanted] != outs or rows.column(0).to_pylist() != [mapper] * len(outs):
                hole = 6 if outs and outs[0] in [out for _, out in expected] else 5
                self.violated(
                    hole, f"mapper {mapper} answered reducer {reducer} after {cursor}: {outs}, should be {wanted}"
                )
                return
            if wanted and wanted[-1][0] != last:
                self.violated(5, f"mapper {mapper}, reducer {reducer}: {outs} end at {wanted[-1][0]}, not at {last}")
                return
            at += len(outs)

    def on_snapshot(self, committed: list[list[int]], effects: dict[tuple[int, int], tuple[int, int]]) -> None:
        """What a reader saw at one moment."""
        for (mapper, reducer), found in effects.items():
            expected = self.oracle.effects[mapper][reducer].get(committed[reducer][mapper])
            if found != expected:
                self.violated(
                    2, f"a snapshot shows {found} for mapper {mapper}, reducer {reducer}, and should {expected}"
                )

    def on_window(self, mapper: int, window_bytes: int, limit_bytes: int, batch_bytes: int) -> None:
        if window_bytes > limit_bytes + batch_bytes:
            self.violated(9, f"mapper {mapper} holds {window_bytes} bytes, the limit is {limit_bytes} and one batch")

    def on_parts(self, mapper: int, parts: Sequence[tuple[int, int]], committed: Sequence[int]) -> None:
        """What is held for whom: (reducer, last index) of each part in the window."""
        for reducer, last in parts:
            if last <= committed[reducer]:
                self.violated(9, f"mapper {mapper} holds rows up to {last} for reducer {reducer}: all are committed")

    def on_spills(self, mapper: int, trimmed: Mapping[int, int]) -> None:
        """Up to where a mapper takes the spill of each reducer to be trimmed: what it is wrong about stays for ever."""
        for reducer, position in trimmed.items():
            begin = self._spills.begin(mapper, reducer)
            if position > begin:
                said = f"mapper {mapper} takes the spill of reducer {reducer} to be trimmed up to {position}"
                self.violated(11, f"{said}, and it is up to {begin}")

    # the end

    def done(self) -> bool:
        """Everything committed and everything trimmed, by what is durable."""
        oracle = self.oracle
        for mapper in self._mappers:
            if any(self.committed[reducer][mapper] != oracle.last(mapper, reducer) for reducer in self._reducers):
                return False
            total = len(oracle.positions[mapper])
            if self._mapper_states[mapper][0] != total:
                return False
            if self._groups is None and total and self._input_begins[mapper] <= oracle.positions[mapper][-1]:
                return False
        if self._groups is not None and not self._groups.is_done():
            return False
        return not self._spills.left() and self.tails.is_told() and self.exports.is_done()

    def behind(self) -> str:
        """For a run that does not come to its end: who is missing what."""
        wanted = [[self.oracle.last(mapper, reducer) for mapper in self._mappers] for reducer in self._reducers]
        return (
            f"committed {self.committed}, of {wanted}; mapper states {self._mapper_states}, of "
            f"{[len(positions) for positions in self.oracle.positions]} input rows; "
            f"input trimmed to {self._input_begins}; spilled {self._spills.left()}; {self.tails.behind()}; "
            f"{self.exports.behind()}"
        )

    def at_end(self) -> None:
        """Whole contents: state, dead letters, output."""
        self._last_rows = ()
        self.on_durable()
        effects = self._table_rows(list(self._effect_keys.values()))
        for pair, value in zip(self._effect_keys, effects, strict=True):
            found = struct.unpack_from("<qq", value, 1) if value is not None else (0, 0)
            expected = self.oracle.effects[pair[0]][pair[1]][self.oracle.last(*pair)]
            if found != expected:
                self.violated(1, f"mapper {pair[0]}, reducer {pair[1]}: {found} at the end instead of {expected}")
        try:
            self._check_dead_letters()
            if self.oracle.workload.with_outbox:
                self.exports.at_end()
            elif self.oracle.workload.with_output:
                self._check_output()
        except (struct.error, KeyError, ValueError, OSError, pa.ArrowException) as error:
            self.violated(8, f"a queue cannot be read from the disk: {error!r}")

    def _check_dead_letters(self) -> None:
        letters = self._rows("job/mapper_dead_letters", 0)
        found = Counter((row["mapper"], row["position"]) for row in letters)
        self._compare("mapper dead letters", found, self.oracle.map_letters)
        letters = self._rows("job/reducer_dead_letters", 0)
        rows = [(row, pa.ipc.open_stream(row["row"]).read_all().to_pylist()[0]) for row in letters]
        reduced = Counter((inner["mapper"], row["worker"], inner["out"]) for row, inner in rows)
        self._compare("reducer dead letters", reduced, set(self.oracle.reduce_letters))
        for row, inner in rows:
            exact = self.oracle.reduce_letters.get((inner["mapper"], row["worker"], inner["out"]))
            if row["position"] != exact and "its position lies between" not in row["reason"]:
                self.violated(10, f"a dead letter says position {row['position']}, and is {exact}")

    def _compare(self, what: str, found: Counter[Any], expected: set[Any]) -> None:
        missing = expected - set(found)
        extra = {row: count for row, count in found.items() if row not in expected or count != 1}
        if missing or extra:
            self.violated(10, f"{what}: missing {sorted(missing)}, too much {sorted(extra.items())}")

    def _check_output(self) -> None:
        for reducer in self._reducers:
            rows = self._rows("output", reducer)
            for mapper in self._mappers:
                outs = [row["out"] for row in rows if row["mapper"] == mapper]
                expected = [out for _, out in self.oracle.parts[mapper][reducer] if out >= 0]
                if outs != expected:
                    self.violated(1, f"output of reducer {reducer}, mapper {mapper}: {outs} instead of {expected}")

    def _rows(self, queue: str, partition: int) -> list[dict[str, Any]]:
        """A queue's partition, decoded from its segment files."""
        if queue not in self._queues:
            return []
        prefix = self._queues[queue] + struct.pack(">I", partition) + b"s"
        rows: list[dict[str, Any]] = []
        for key in sorted(key for key in self.disk.keys if key.startswith(prefix)):
            value = self.disk.keys[key]
            size_bytes = struct.unpack_from("<QQ", value)[1]
            rows.extend(decode_segment(bytes(self.disk.files[value[16:].decode()][:size_bytes])))
        return rows


def decode_reducer_row(value: bytes) -> tuple[list[int], int, bytes | None]:
    """The committed indexes, the generation and, unless they are null, the fronts."""
    generation, length, fronts_length = struct.unpack_from("<iII", value, 1)
    committed = list(struct.unpack(f"<{length // 8}q", value[13 : 13 + length]))
    return committed, generation, None if value[0] & 4 else value[13 + length : 13 + length + fronts_length]


def decode_segment(data: bytes) -> list[dict[str, Any]]:
    schema_bytes = struct.unpack_from("<8sII", data)[2]
    schema = pa.ipc.read_schema(pa.py_buffer(data[16 : 16 + schema_bytes]))
    at = (16 + schema_bytes + 7) & ~7
    rows: list[dict[str, Any]] = []
    while at < len(data):
        payload_bytes = struct.unpack_from("<4sIQII", data, at)[1]
        payload = pa.py_buffer(data[at + 32 : at + 32 + payload_bytes])
        rows.extend(pa.ipc.read_record_batch(payload, schema).to_pylist())
        at += 32 + payload_bytes
    return rows
