"""Reduce, commit, settle: the cycle of one batch of rows, the same in a reducer process and in a task of Spark.

    take a batch -> reduce it -> commit its effect with the positions -> or let the persisted row decide

Nothing here starts threads, reads clocks or sleeps by itself: ``CycleEnvironment`` has what differs between callers.
What differs on purpose:

- *How long a store that is away is waited for.* A reducer process waits until it is stopped; a task gives up after the
  time that its query allows, and Spark runs it again (``on_wait``).
- *What else belongs into the transaction.* A task that hands rows over to Spark records where they begin
  (``complete``).
- *What is cached between commits.* A reducer process keeps the rows it has written (``forget``); a task does not live
  long enough for that.
- *What follows a split brain.* It is raised here. A reducer process waits a while and goes on with the core, which has
  been restarted by then; a task fetches everything again, because the rows it had for the batch begin elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shuffle.durable.reducer_state import ReducerState
from shuffle.errors import (
    BadInput,
    CommitConflict,
    CommitUnknown,
    Expired,
    ShuffleError,
    SplitBrain,
    StoreError,
)
from shuffle.ids import ReducerIndex
from shuffle.reducer.commit import Committer
from shuffle.reducer.core import ReduceBatch, Settled
from shuffle.reducer.reduce import Reduced, ReduceStage, user_code_error
from shuffle.support import crash_points
from shuffle.support.logs import get_logger
from shuffle.support.retry import LASTING, Backoff, passes_by_itself

CONFLICTS_MAX = 50
"""The number of conflicts in a row after which the cycle gives up. A few are lost races; with waits that grow, fifty
are not races but a fault."""

_log = get_logger(__name__)


class Core(Protocol):
    """The reducer's core as its owner shares it between threads; see ``ReducerCore`` for what the methods mean."""

    def is_current(self, batch: ReduceBatch) -> bool: ...

    def committed(self, batch: ReduceBatch) -> bool:
        """Whether ``batch`` was still current."""

    def settle(self, batch: ReduceBatch, persisted: ReducerState) -> Settled | None:
        """What became of ``batch``; None if it was not current any more."""


class Metrics(Protocol):
    def observe_reduce(self, seconds: float) -> None: ...

    def observe_commit(self, seconds: float) -> None: ...

    def count_commit(self, rows: int, size_bytes: int, dead_letter_rows: int) -> None: ...

    def count_conflict(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CycleEnvironment:
    """What the cycle needs from its caller: clock, waits, metrics and callbacks."""

    metrics: Metrics
    backoff: Callable[[], Backoff]
    """Makes a new series of growing waits."""
    clock: Callable[[], float]
    sleep: Callable[[float], bool]
    """Waits the given number of seconds; returns False when the process is to stop."""
    on_wait: Callable[[Exception, float], None]
    """A callback that gets an error that will pass, and for how many seconds it has been waited for. It raises if that
    is too long."""
    complete: Callable[[Reduced], None] = lambda reduced: None
    """A callback that adds what the caller needs to a transaction that is about to be committed."""
    forget: Callable[[], object] = lambda: None
    """A callback that empties the cache of rows (``row_cache``)."""


class ReduceCycle:
    """Runs the cycle of one reducer instance. Only one thread at a time may call ``run``."""

    def __init__(
        self,
        stage: ReduceStage,
        committer: Committer,
        core: Core,
        environment: CycleEnvironment,
        *,
        processor: str,
        index: ReducerIndex,
    ) -> None:
        self._stage = stage
        self._committer = committer
        self._core = core
        self._environment = environment
        self._processor = processor
        self._index = index
        self._waits = _Waits(environment)
        """The waits after commits that were not acknowledged, until one is."""
        self._conflicts_in_a_row = 0

    def run(self, batch: ReduceBatch) -> bool:
        """Take ``batch``, which the core has just handed out, to its end; whether it is committed.

        If it is not, it is either not current any more, or the core hands it out again.

        1. Reduce it, as often as the store makes it necessary.
        2. If the core was restarted meanwhile, the result is of no use: abort it.
        3. Let the caller add what it needs, and commit everything together with the positions.
        4. Acknowledged: the core moves on, and the rows are counted, those that were set aside too.
        5. Not acknowledged: empty the cache of rows. After too many conflicts in a row give up, else wait.
        6. Read the persisted row, which decides what became of the commit (``ReducerCore.settle``):

           - It happened. It is counted, unless the store has refused this attempt: then, as far as one can tell,
             another instance has committed the same rows, and that one counts them.
           - It did not happen: the core hands the same rows out again.
           - Another instance is alive: the core starts again from the state that it has written, and SplitBrain is
             raised.

        Raises UserCodeError if the user's code is at fault, errors that do not pass by waiting as they are, and what
        ``on_wait`` raises.
        """
        reduced = self._reduce(batch)  # 1
        if reduced is None:
            return False
        if not self._core.is_current(batch):  # 2
            reduced.abort()
            return False
        error = self._commit(reduced)  # 3
        if error is None:
            self._core.committed(batch)  # 4
            crash_points.reach("reducer.after_commit_known")
            self._count(reduced)
            return True
        self._not_acknowledged(batch, error)  # 5
        return self._settle(reduced, error)  # 6

    # -- reduce -------------------------------------------------------------------------------------------------------

    def _reduce(self, batch: ReduceBatch) -> Reduced | None:
        """The result of the user's code; None when the batch is not current any more, or the process is to stop."""
        waits = _Waits(self._environment)
        while self._core.is_current(batch):
            begin_s = self._environment.clock()
            try:
                crash_points.reach("reducer.before_reduce")
                reduced = self._stage.reduce(batch)
                crash_points.reach("reducer.after_reduce")
            except Exception as error:
                if not passes_by_itself(error):
                    raise
                if not waits.wait(error):
                    return None
                continue
            finally:
                self._environment.metrics.observe_reduce(self._environment.clock() - begin_s)
            if reduced.dead_letter_rows:
                _log.warning("rows set aside", rows=reduced.dead_letter_rows, of_rows=batch.row_count)
            return reduced
        return None

    # -- commit -------------------------------------------------------------------------------------------------------

    def _commit(self, reduced: Reduced) -> ShuffleError | None:
        """None if the commit was acknowledged, else the error after which the persisted row must be read."""
        begin_s = self._environment.clock()
        try:
            self._environment.complete(reduced)
            self._committer.commit(reduced)
        except BadInput as error:
            raise user_code_error(self._processor, self._index, reduced.batch, error) from error
        except LASTING:
            raise
        except (CommitConflict, CommitUnknown, SplitBrain, StoreError, Expired) as error:
            return error
        finally:
            self._environment.metrics.observe_commit(self._environment.clock() - begin_s)
            reduced.abort()  # It has no effect after a commit. If ``complete`` has failed, nothing is left open.
        return None

    def _count(self, reduced: Reduced) -> None:
        batch = reduced.batch
        self._environment.metrics.count_commit(batch.row_count, batch.size_bytes, reduced.dead_letter_rows)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._waits = _Waits(self._environment)
        self._conflicts_in_a_row = 0

    # -- settle -------------------------------------------------------------------------------------------------------

    def _not_acknowledged(self, batch: ReduceBatch, error: ShuffleError) -> None:
        self._environment.forget()
        if isinstance(error, SplitBrain):
            return
        _log.warning("commit not acknowledged", batch=batch.number, attempt=batch.attempt, error=error)
        if not isinstance(error, CommitConflict):
            self._waits.wait(error)
            return
        self._environment.metrics.count_conflict()
        self._conflicts_in_a_row += 1
        if self._conflicts_in_a_row >= CONFLICTS_MAX:
            raise CommitConflict(
                f"processor {self._processor}, reducer {self._index}: {CONFLICTS_MAX} commits in a row lost a race "
                f"over rows that others write: {error.message}. Let each reducer write keys of its own",
                **error.fields,
            ) from error
        self._waits.pause()

    def _settle(self, reduced: Reduced, error: ShuffleError) -> bool:
        batch = reduced.batch
        persisted = self._read_state()
        settled = None if persisted is None else self._core.settle(batch, persisted)
        if settled is Settled.COMMITTED:
            _log.info("the commit had happened", batch=batch.number)
            if isinstance(error, CommitConflict | SplitBrain):
                self._begin_anew()
            else:
                self._count(reduced)
            return True
        if settled is Settled.SPLIT_BRAIN:
            self._begin_anew()
            raise SplitBrain(error.message, reducer=self._index) from error
        return False

    def _read_state(self) -> ReducerState | None:
        """The persisted row, waiting for the store if necessary; None when stopped."""
        waits = _Waits(self._environment)
        while True:
            try:
                return self._committer.read_state()
            except ShuffleError as error:
                if not passes_by_itself(error):
                    raise
                if not waits.wait(error):
                    return None


class _Waits:
    """One series of growing waits, for something that fails again and again."""

    def __init__(self, environment: CycleEnvironment) -> None:
        self._environment = environment
        self._backoff = environment.backoff()
        self._since_s: float | None = None

    def wait(self, error: Exception) -> bool:
        """Wait because of an error that will pass; False when the process is to stop."""
        now_s = self._environment.clock()
        if self._since_s is None:
            self._since_s = now_s
        self._environment.on_wait(error, now_s - self._since_s)
        return self.pause()

    def pause(self) -> bool:
        return self._environment.sleep(self._backoff.next_s())
