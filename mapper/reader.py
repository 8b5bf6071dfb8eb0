"""What an input is to the rest of the system: the contracts ``PartitionReader`` and ``Input``.

A reader reads one partition. ``read`` returns the rows after a continuation token and the token after them. Rows must
come in the same order, with the same content, every time; how many come at once is free. Only the token says where they
stand, so positions in the input need not be consecutive.

An input is what its readers belong to. Nobody but an input and its readers knows what is in a token.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from shuffle.formats.base import Decoded
from shuffle.ids import Token
from shuffle.limits import MIB

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

BATCH_BYTES_MAX_DEFAULT = 16 * MIB

GAPS_MAX = 1_000
"""The number of reads in a row that may return only a gap before the search for the end of a partition is given up, to
be made again later."""

START = Token(b"")
"""The token of a mapper that never ran: the beginning of what the partition holds."""


class PartitionReader(ABC):
    """One partition of the input. Rows must come in the same order, with the same content, whenever they are read."""

    wait_ms: int = 0
    """The milliseconds for which ``read`` may wait for rows when there are none. They are set from the spec."""
    batch_bytes_max: int = BATCH_BYTES_MAX_DEFAULT
    """The most bytes that ``read`` should return; a single row may have more. They are set from the spec."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The schema of the rows that ``map`` gets: those that ``read`` returns, or ``decode`` makes of them. It is
        always the same."""

    @abstractmethod
    def read(self, begin_row_index: int, end_row_index: int, token: Token) -> tuple[pa.Table, Token]:
        """The next rows after ``token``, and the token after them.

        They get the indexes from ``begin_row_index`` on, and below ``end_row_index``, in the mapper's input numbering:
        the difference is the most rows that may be returned. If there are no rows, an empty table is returned after
        ``wait_ms`` at the latest; the token may have moved over a gap.
        """

    @abstractmethod
    def trim(self, row_index: int, token: Token) -> None:
        """Everything before ``token`` is committed and may be deleted. Idempotent; may act later.

        It is called from another thread than ``read``.
        """

    def decode(self, rows: pa.Table) -> Decoded:
        """The rows for ``map``, made of the rows that ``read`` returned, or of some of them. Default: the same rows.

        A reader of messages returns them from ``read`` as they are, and decodes them here: messages that cannot be
        decoded keep their numbers in the input numbering, and are refused like rows for which ``map`` raises.
        ``schema`` is then that of the decoded rows.
        """
        return Decoded(rows)

    def start(self) -> Token:
        """The token of the first row there is now.

        It is persisted before anything is read, so that the numbering has a fixed origin even if the input is trimmed
        by others before this mapper first persists its progress.
        """
        return START

    def lag_rows(self, token: Token) -> int | None:
        """The number of rows after ``token``, if that is cheap to know; otherwise None."""
        return None

    def interrupt(self) -> None:  # noqa: B027 (most readers have nothing to do)
        """Make a ``read`` that waits return soon. It is called from another thread."""

    def close(self) -> None:  # noqa: B027 (as above)
        """Release what is open. Nothing is read afterwards."""


class Input(ABC):
    """An input: its partitions, and what its tokens say about them.

    To be named in a spec as ``input: {class: "module:Class", …}``, a subclass implements ``partition_count`` and
    ``open``. Everything else has a default. An object is created in each process that needs one: in every mapper, in
    ``shuffle run``, ``check`` and ``status``, and in the driver of a Spark query.
    """

    consumes: str | None = None
    """The name of the queue of the state store that this input reads and trims; None if there is none. A queue has one
    consumer only."""

    processor: str = ""
    """The name of the processor. It is set once the object is created."""
    known_partitions: str | None = None
    """What ``partitions`` returned when it was last persisted; None if it never was. It is set once the object is
    created."""

    def __init__(self, config: Mapping[str, Any], state: StateClient, folder: Path) -> None:
        self.config = config
        """The options in the spec, with the defaults of ``config_schema`` if the class declares one."""
        self.state = state
        """A client of the processor's state store."""
        self.folder = folder
        """The folder of the spec, for options that are relative paths."""

    @abstractmethod
    def partition_count(self) -> int:
        """The number of partitions, and so of mappers. It may not change while the processor has state."""

    def partitions(self) -> str | None:
        """The numbers of the partitions, for an input that can get more of them: one line of text, which is persisted
        and found in ``known_partitions`` afterwards.

        A partition keeps its number for ever, and new ones get the numbers after those of all others. None, the
        default, says that the number of partitions never changes.
        """
        return None

    @abstractmethod
    def open(self, partition: int) -> PartitionReader:
        """A reader of one partition, counted from 0."""

    def open_to_look(self, partition: int) -> PartitionReader:
        """A reader for somebody who only looks at the rows, and is no mapper: it leaves no trace."""
        return self.open(partition)

    def trim(self, tokens: Mapping[int, Token]) -> bool:
        """Trim several partitions at once, each as ``PartitionReader.trim`` does; False, the default, if that is not
        possible, and nothing was done."""
        return False

    def describe(self) -> str:
        """One line that identifies the rows of this input: a processor that has state is refused another input.

        Default: the class and all its options. Leave out options that may change, for example an address.
        """
        options = json.dumps(self.config, sort_keys=True, default=str)
        return f"class {type(self).__module__}:{type(self).__qualname__} {options}"

    def ends(self) -> Mapping[int, Token] | None:
        """For each partition the token after the last row that it holds now. None, the default, means unknown.

        Without it ``shuffle run --until-drained`` ends once ``read`` finds no more rows after what was committed,
        and a Spark query with ``availableNow`` once it has what was mapped when it began.
        """
        return None

    def reached(self, partition: int, token: Token, end: Token | None) -> bool:
        """Whether everything before ``end`` is before ``token``, too. Whoever implements ``ends`` implements this.

        ``token`` may be empty, if nothing has been read. The default is for inputs without ``ends``: whether no row can
        be read after ``token``.
        """
        if end is not None:
            raise NotImplementedError(f"{type(self).__qualname__} implements ends(), but not reached()")
        reader = self.open(partition)
        try:
            for _ in range(GAPS_MAX):
                rows, after = reader.read(0, 1, token)
                if rows.num_rows or after == token:
                    return not rows.num_rows
                token = after
            return False
        finally:
            reader.close()

    def rows_left(self, tokens: Mapping[int, Token]) -> Mapping[int, int]:
        """For each partition the number of rows after its token, for ``shuffle status``. By default none is known."""
        return {}

    def check_start(self, started: Callable[[], Mapping[int, Token]]) -> None:  # noqa: B027 (most lose nothing)
        """Raise ``SpecError`` if rows are gone that a partition still has to read which has no state yet.

        ``started`` returns the partitions that have one, each with its token. Call it after you have looked at the
        input: a mapper writes its state before it trims.
        """

    def close(self) -> None:  # noqa: B027 (as above)
        """Release what is open. Its readers are closed by then."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()
