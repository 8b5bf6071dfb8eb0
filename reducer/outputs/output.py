"""What an output is to the rest of the system: the contract ``Output``.

An output adds the rows that a reducer emits to the transaction in which the reducer commits its positions. So they take
effect exactly once, with the rows that they were made of. An output to somewhere outside of the state store does the
same with a queue, from which a process of its own carries the rows on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from shuffle.statestore import StateClient, Transaction


class Output(ABC):
    """Where the reducers of one processor emit rows to. An object is created in each process that needs one."""

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        self.config = config
        """The keys of the section ``output`` in the spec, and their values."""
        self.folder = folder
        """The folder of the spec, for values that are relative paths."""

    @abstractmethod
    def prepare(self, client: StateClient, reducer_count: int) -> None:
        """Check that rows of this many reducers can be taken; ``SpecError`` says what to do if not.

        It is called before the start and again by every worker, so it must be repeatable.
        """

    @abstractmethod
    def emit(self, tx: Transaction, reducer_index: int, rows: pa.Table | pa.RecordBatch) -> None:
        """Add rows of one reducer to its transaction, which is committed, or dropped and made again, by others."""
