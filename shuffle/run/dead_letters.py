"""Dead letters, which are the rows that a processor has set aside: counting, reading, dropping and replaying them.
``shuffle.user_code.poison`` finds such rows and encodes them.

*Replay* takes them from the front of their queue, in order:

- Rows that ``map`` refused are appended again to the partition of the input queue that they came from, in one
  transaction with the trim of the dead letters. They get new positions and are mapped like any others. (A folder of
  files cannot be appended to: there the file is what must be corrected.)
- Rows that ``reduce`` refused cannot go back to the input: ``map`` would change them a second time, and other rows that
  it made of the same input row may be counted already. ``reduce`` is called with them here, and what it writes is
  committed in one transaction with the trim. Those that it refuses again go to the end of the queue, with the new
  reason. The processor must not be running: its reducers may remember what they have written to their tables.

So each row takes effect once, however often a replay is started or interrupted. Two replays at the same time conflict
on a row of ``PROCESSOR/meta`` that both expect to be unchanged. If the spec moves dead letters to a place outside
(``dead_letters``), these commands are about the rows that are not there yet: see ``taking_letters``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shuffle.api import Reducer, WorkerSpec
from shuffle.durable.meta import META_KEY, META_ROW
from shuffle.durable.tables import Role, reducers_group
from shuffle.errors import BadInput, CommitConflict, ShuffleError, SpecError, UserCodeError
from shuffle.ids import new_guid
from shuffle.limits import MIB
from shuffle.preflight.check import count_mappers
from shuffle.reducer.outputs.opening import emitter
from shuffle.run.taking_letters import note_taken, refuse_beside_exporter
from shuffle.spec.config import ProcessorSpec
from shuffle.support.logs import get_logger
from shuffle.user_code.create import create_reducer
from shuffle.user_code.load import load_class
from shuffle.user_code.poison import (
    DEAD_LETTER_SCHEMA,
    decode_row,
    is_transient,
    locate_poison,
    raised_at,
    reason_of,
    split_rows,
)

if TYPE_CHECKING:
    from shuffle.statestore import Queue, StateClient, Transaction

ROLES: tuple[Role, ...] = ("mapper", "reducer")
"""The roles that can set rows aside."""

REPLAY_ROWS_MAX = 10_000
"""The most rows replayed in one transaction: ``reduce`` is called with them many times if one of them still fails."""
READ_BYTES_MAX = 16 * MIB
"""The most bytes of dead letters that are read at once."""
ATTEMPTS_MAX = 10
"""The most attempts of one transaction, when others write to the same rows."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DeadLetterQueue:
    """A dead-letter queue of a processor, and the number of rows in it."""

    queue: str
    """The name of the queue."""
    roles: list[str]
    """The roles whose rows go to the queue: mapper, reducer, or, if the spec says so, both."""
    rows: int
    """The number of rows that are in the queue, over all partitions."""
    rows_ever: int
    """The number of rows appended since the queue was created, including those that were replayed, dropped, or refused
    again."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One row that was set aside."""

    queue: str
    """The name of the dead-letter queue."""
    partition: int
    """The partition of the dead-letter queue."""
    position: int
    """The position of the row in that partition."""
    fields: dict[str, Any]
    """The columns of the row in the queue (``DEAD_LETTER_SCHEMA``)."""

    @property
    def origin(self) -> str:
        """The worker that refused the row and the row's index there, as text."""
        worker, mapper, at = self.fields["worker"], self.fields["mapper"], self.fields["position"]
        if self.fields["role"] == "mapper":
            return f"mapper {worker}, input row {at}"
        return f"reducer {worker}, row {at} of mapper {mapper} (in its shuffle numbering)"

    def original(self) -> pa.Table:
        """The row that was refused."""
        try:
            return decode_row(self.fields["row"])
        except (pa.ArrowException, OSError) as error:
            raise ShuffleError(f"{self.queue}, partition {self.partition}, row {self.position}: {error}") from None


# Reading -------------------------------------------------------------------------------------------------------------


def dead_letter_queues(spec: ProcessorSpec, client: StateClient, role: Role | None = None) -> list[DeadLetterQueue]:
    """The dead-letter queues of the processor that exist, including one with the default name that is no longer used
    by the spec."""
    existing = {queue.name for queue in client.queues() if queue.schema.equals(DEAD_LETTER_SCHEMA)}
    roles: dict[str, list[str]] = {}
    for each in ROLES:
        roles.setdefault(spec.dead_letter_queue(each), []).append(each)
    queues = []
    for name, users in roles.items():
        if name in existing and (role is None or role in users):
            bounds = client.queue(name).bounds()
            rows = sum(end - begin for begin, end in bounds)
            queues.append(DeadLetterQueue(name, users, rows, sum(end for _, end in bounds)))
    return queues


def dead_letter_summary(queues: list[DeadLetterQueue]) -> str:
    """The number of dead letters in these queues: ``3 dead letters (job/mapper_dead_letters)``. Empty if there are
    none."""
    waiting = [queue for queue in queues if queue.rows]
    rows = sum(queue.rows for queue in waiting)
    names = ", ".join(queue.queue for queue in waiting)
    return f"{rows:,} dead letter{'s' if rows > 1 else ''} ({names})" if waiting else ""


def dead_letter_note(spec: ProcessorSpec, client: StateClient) -> str:
    """A note for the last line of a run if there are dead letters: those rows have not been counted."""
    try:
        words = dead_letter_summary(dead_letter_queues(spec, client))
    except ShuffleError as error:
        _log.warning("dead letters not counted", error=error)
        return ""
    return f"; {words}: `shuffle dead-letters {spec.path.name} show` prints them" if words else ""


def read_dead_letters(client: StateClient, queue: str) -> Iterator[DeadLetter]:
    """All dead letters in ``queue``, partition by partition, the oldest first; only a few are in memory at a time."""
    handle = client.queue(queue)
    for partition, (begin, end) in enumerate(handle.bounds()):
        position = begin
        while position < end:
            rows, after = handle.read(partition, position, REPLAY_ROWS_MAX, READ_BYTES_MAX, one_answer=True)
            if not rows.num_rows:
                break
            for number, row in enumerate(rows.to_pylist(), start=position):
                yield DeadLetter(queue, partition, number, row)
            position = after


def newest_dead_letter(client: StateClient, queue: str) -> DeadLetter | None:
    """The newest dead letter of the partition that has most of them; None if there are none."""
    handle = client.queue(queue)
    bounds = handle.bounds()
    partition = max(range(len(bounds)), key=lambda index: bounds[index][1] - bounds[index][0])
    begin, end = bounds[partition]
    if begin == end:
        return None
    rows, _ = handle.read(partition, end - 1, max_rows=1)
    return DeadLetter(queue, partition, end - 1, rows.to_pylist()[0]) if rows.num_rows else None


# Dropping and replaying ----------------------------------------------------------------------------------------------


def drop(spec: ProcessorSpec, client: StateClient, queue: str) -> int:
    """Drops all dead letters in ``queue`` and returns their number."""
    refuse_beside_exporter(client, spec.processor, queue)
    bounds = client.queue(queue).bounds()
    with client.transaction() as tx:
        for partition, (begin, end) in enumerate(bounds):
            if begin < end:
                note_taken(client, tx, queue, partition, end)
                tx.trim(queue, partition, end)
        tx.commit()
    return sum(end - begin for begin, end in bounds)


@dataclass(slots=True)
class Replayed:
    """The numbers of rows of a replay."""

    to_input: int = 0
    """The number of rows that were appended to the input queue again."""
    reduced: int = 0
    """The number of rows that ``reduce`` has accepted now."""
    refused: int = 0
    """The number of rows that ``reduce`` has refused again."""


class Replay:
    """Replays the dead letters of one processor. The rows that are committed are counted in ``done``, even after an
    error."""

    def __init__(self, spec: ProcessorSpec, client: StateClient) -> None:
        self._spec = spec
        self._client = client
        self._reducers: dict[int, Reducer] = {}
        self.done = Replayed()

    def run(self, queue: DeadLetterQueue) -> None:
        """Replays all dead letters that are in ``queue`` now."""
        refuse_beside_exporter(self._client, self._spec.processor, queue.queue)
        handle = self._client.queue(queue.queue)
        for partition, (_, end) in enumerate(handle.bounds()):
            attempts = 0
            while True:
                try:
                    if not self._take_some(handle, partition, end):
                        break
                    attempts = 0
                except CommitConflict:
                    attempts += 1
                    if attempts >= ATTEMPTS_MAX:
                        raise
                    for reducer in self._reducers.values():
                        reducer.forget()

    def _take_some(self, queue: Queue, partition: int, end: int) -> bool:
        """Replays, in one transaction, the first dead letters of a partition that are of one worker. Returns whether
        there were any before ``end``.

        The marker is read before the bounds, and the commit expects it to be unchanged: so no other replay has taken
        dead letters of this processor in between.
        """
        name = f"dead letters of {queue.name}, partition {partition}"
        marker = self._client.lookup(self._spec.meta_table, pa.table([[name]], schema=META_KEY))
        begin = queue.bounds()[partition][0]
        if begin >= end:
            return False
        rows, _ = queue.read(partition, begin, min(REPLAY_ROWS_MAX, end - begin), READ_BYTES_MAX)
        taken = _same_worker(rows.to_pylist())
        if taken[0]["processor"] != self._spec.processor:
            raise BadInput(
                f"the next row of {queue.name} is of the processor {taken[0]['processor']!r}: replay it with the spec"
                " of that one",
                queue=queue.name,
            )
        decoded = [DeadLetter(queue.name, partition, begin + i, row).original() for i, row in enumerate(taken)]
        # A changed map may have given rows another schema: those are left for the next transaction.
        originals = list(takewhile(lambda row: row.schema.equals(decoded[0].schema), decoded))
        taken, after = taken[: len(originals)], begin + len(originals)
        done = Replayed()
        if taken[0]["role"] == "mapper":
            tx = self._to_input(int(taken[0]["mapper"]), pa.concat_tables(originals), done)
        else:
            tx = self._reduced(queue.name, partition, taken, pa.concat_tables(originals), done)
        with tx:
            note_taken(self._client, tx, queue.name, partition, after)
            tx.trim(queue.name, partition, after)
            if marker.num_rows:
                tx.expect(self._spec.meta_table, marker)
            else:
                tx.expect_absent(self._spec.meta_table, pa.table([[name]], schema=META_KEY))
            # The guid makes the value unique: positions start again at 0 when a queue is dropped and created anew.
            tx.write(self._spec.meta_table, pa.table([[name], [f"{after} {new_guid()}"]], schema=META_ROW))
            tx.commit()
        self.done.to_input += done.to_input
        self.done.reduced += done.reduced
        self.done.refused += done.refused
        return True

    def _to_input(self, mapper: int, rows: pa.Table, done: Replayed) -> Transaction:
        source = self._spec.input
        queue = source.consumes
        if queue is None:
            raise BadInput(
                f"rows of an input with {source.kind} cannot be replayed, only those of a queue: correct the file that"
                " they are from, or what else it reads, then drop them (`shuffle dead-letters SPEC drop --role mapper`)"
            )
        tx = self._client.transaction()
        tx.append(queue, mapper, rows)
        done.to_input = rows.num_rows
        return tx

    # Reducers

    def _reduced(
        self, queue: str, partition: int, taken: list[dict[str, Any]], rows: pa.Table, done: Replayed
    ) -> Transaction:
        """The user's transaction over the rows that ``reduce`` accepts now, with the others as new dead letters."""
        if self._client.leases.members(reducers_group(self._spec.processor)):
            raise BadInput(f"{self._spec.processor} is running: stop it before its reducers' rows are replayed")
        try:
            reducer = self._reducer(int(taken[0]["worker"]))
            poison_rows = locate_poison(rows, lambda part: _attempt(reducer, part))
            bad = {poison.row: poison.reason for poison in poison_rows}
            good, _ = split_rows(rows, list(bad))
            reducer.forget()
            tx = _call(reducer, good) if good.num_rows else None
        except Exception as error:
            if is_transient(error) or isinstance(error, SpecError):
                raise
            raise UserCodeError(f"{queue}: replay: {reason_of(error)}{raised_at(error)}") from error
        tx = tx or self._client.transaction()
        if bad:
            again = [{**taken[row], "reason": reason} for row, reason in bad.items()]
            tx.append(queue, partition, pa.Table.from_pylist(again, schema=DEAD_LETTER_SCHEMA))
        done.reduced, done.refused = good.num_rows, len(bad)
        return tx

    def _reducer(self, index: int) -> Reducer:
        if index not in self._reducers:
            spec = self._spec
            worker = WorkerSpec(
                spec.processor,
                index,
                new_guid(),
                count_mappers(spec, self._client),
                spec.reducer.count,
                spec.max_parallelism,
            )
            emit = emitter(spec, self._client, index)
            self._reducers[index] = create_reducer(
                load_class(spec, "reducer"), spec.reducer.config, worker, self._client, emit
            )
        return self._reducers[index]


def _same_worker(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows at the front that are of one worker, so that the ``reduce`` of a reducer gets its own rows only."""

    def worker_of(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["processor"], row["role"], row["worker"]

    return list(takewhile(lambda row: worker_of(row) == worker_of(rows[0]), rows))


def _call(reducer: Reducer, rows: pa.Table) -> Transaction | None:
    tx = reducer.reduce(rows)
    if tx is not None:
        tx.check()
    return tx


def _attempt(reducer: Reducer, rows: pa.Table) -> None:
    reducer.forget()
    tx = _call(reducer, rows)
    if tx is not None:
        tx.abort()
