"""The options of ``format("shuffle")``: which ones each use has, and the errors for unknown ones.

Spark passes option names on in lower case, so they are compared in lower case here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shuffle.errors import BadInput
from shuffle.statestore.client.open_store import address_forms, folder_of, is_address
from shuffle.support.endpoint import HOST_PORT, SCHEME
from shuffle.support.suggest import did_you_mean, nearest
from shuffle.support.units import parse_duration_ms, parse_size

Role = Literal["read stream", "write stream", "read", "write"]

TIMEOUT_S_DEFAULT = 60.0
SNAPSHOT_TTL_S_DEFAULT = 600.0

_COMMON = ("state", "timeout")
OPTIONS: dict[Role, tuple[str, ...]] = {
    "read stream": (
        *_COMMON,
        "spec",
        "processor",
        "startingOffsets",
        "maxRowsPerTrigger",
        "maxBytesPerTrigger",
        "minRowsPerTrigger",
        "metadataColumns",
        "work",
        "emit",
    ),
    "write stream": (*_COMMON, "queue", "partitionBy", "partitions", "stagedTtl"),
    "read": (*_COMMON, "table", "queue", "begin", "end", "splits", "snapshotTtl"),
    "write": (*_COMMON, "table", "queue", "partitionBy", "partitions", "key", "stagedTtl"),
}
"""The names of the options for each use of the format."""

MEANINGS: dict[str, str] = {
    "state": "Where the state store is: `grpc://host:port`, or the folder that a daemon on this machine serves.",
    "timeout": "How long a store, or a mapper, that is away is waited for. Default: 60s.",
    "spec": "The spec of the processor, a YAML file; give either this, or `state` and `processor`.",
    "processor": "The name of the processor, with `state` and in place of `spec`.",
    "startingOffsets": "Where a new query begins: `committed` and `earliest` go on after what was committed; `latest` "
    "skips what has been mapped so far, by committing it unread. Default: committed.",
    "maxRowsPerTrigger": "The most rows in one micro-batch. Default: no bound.",
    "maxBytesPerTrigger": "The most bytes in one micro-batch, by the size of the average row. Default: no bound.",
    "minRowsPerTrigger": "As long as there are fewer rows than this, no micro-batch is made. Default: 1.",
    "metadataColumns": "Columns to add, any of `mapper`, `reducer`, `shuffle_index` and `ingestion_time`; each is "
    "called by its name after an underscore. Default: none.",
    "work": "What the tasks do: `read` hands the rows to Spark; `reduce` runs the reducers, and is set by "
    "`reduce_frame` and `reduce_stream`. Default: read.",
    "emit": "A queue to which the reducers append, and whose rows the query then has; for `reduce_frame` and "
    "`reduce_stream`. Default: none.",
    "table": "The table to read, or to write to; give either this or `queue`.",
    "queue": "The queue to read, or to append to.",
    "partitionBy": "The key columns by which rows are spread over the partitions of the queue. Default: slices of rows "
    "go to the partitions in turn.",
    "partitions": "Creates the queue with so many partitions and the columns of the DataFrame, if it is not there. "
    "Default: the queue must exist.",
    "key": "Creates the table with these key columns, if it is not there. Default: the table must exist.",
    "stagedTtl": "How long rows are kept that were written and not committed: longer than a failed driver takes to "
    "come back. Default: 1h.",
    "begin": "The first row of a queue to read: `earliest`, `latest`, a position, or JSON with one for each partition. "
    "Default: earliest.",
    "end": "The row of a queue before which to stop, in the same forms. Default: latest.",
    "splits": "Into how many tasks a table, or each partition of a queue, is cut. Default: 8 for a table; one for each "
    "1,000,000 rows of a partition.",
    "snapshotTtl": "How long the snapshot in which a table is read is kept while no task uses it. Default: 10min.",
}
"""What each option does, for the reference (``python -m tools.reference``)."""

_SPARKS_OWN = frozenset({"path", "checkpointlocation", "queryname", "triggerinterval", "outputmode"})
"""The options that Spark itself adds to those of the user, in lower case."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one use of the format, checked for their names."""

    role: Role
    values: Mapping[str, str]
    """The values of the options by their lower-case names."""

    @staticmethod
    def check(role: Role, given: Mapping[str, str]) -> Options:
        """The options for ``role``. Raises ``BadInput`` for unknown names; the message says what was probably meant."""
        known = {name.lower(): name for name in OPTIONS[role]}
        values = {name.lower(): str(value) for name, value in given.items()}
        wrong = [name for name in values if name not in known and name not in _SPARKS_OWN]
        if wrong:
            raise BadInput("; ".join(_unknown(name, role, known) for name in sorted(wrong)), options=sorted(wrong))
        return Options(role, {name: value for name, value in values.items() if name in known})

    def text(self, name: str) -> str | None:
        value = self.values.get(name.lower())
        return value.strip() if value is not None else None

    def required(self, name: str, meaning: str) -> str:
        value = self.text(name)
        if not value:
            raise BadInput(f'the option {name!r} is missing: .option("{name}", …) is {meaning}', option=name)
        return value

    def one_of(self, names: Sequence[str]) -> str:
        """The one of these options that is given. Raises ``BadInput`` if none or several are."""
        given = [name for name in names if self.text(name)]
        if len(given) != 1:
            listed = " and ".join(repr(name) for name in (given or names))
            how = f"{listed} contradict each other" if given else f"one of the options {listed} is needed"
            raise BadInput(f"{how}: give exactly one of them", options=given)
        return given[0]

    def only_with(self, name: str, other: str) -> None:
        if self.text(name) is not None and not self.text(other):
            raise BadInput(f"the option {name!r} goes with {other!r}, which is not given: leave it out", option=name)

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        value = self.text(name) or default
        for choice in choices:
            if value.lower() == choice.lower():
                return choice
        hint = did_you_mean(value.lower(), choices)
        raise BadInput(f"the option {name!r} is one of {', '.join(choices)}, not {value!r}{hint}", option=name)

    def number(self, name: str, least: int = 1) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not value.isdigit() or int(value) < least:
            raise BadInput(f"the option {name!r} is a whole number of at least {least}, not {value!r}", option=name)
        return int(value)

    def size_bytes(self, name: str) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        try:
            nbytes = parse_size(value)
        except ValueError as error:
            raise BadInput(f"the option {name!r} is a size like 64MiB: {error}", option=name) from None
        if not nbytes:
            raise BadInput(f"the option {name!r} is a size of at least one byte, not {value!r}", option=name)
        return nbytes

    def seconds(self, name: str, default: float) -> float:
        value = self.text(name)
        if value is None:
            return default
        try:
            return parse_duration_ms(value) / 1000
        except ValueError as error:
            raise BadInput(f"the option {name!r} is a time like 30s or 5min: {error}", option=name) from None

    def names(self, name: str) -> list[str]:
        """A list of columns, separated by commas."""
        return [part.strip() for part in (self.text(name) or "").split(",") if part.strip()]


def state_of(options: Options) -> str:
    """Where the state store is: an address, or a folder."""
    forms = " or ".join(address_forms())
    state = options.required("state", f"where the state store is: {forms}, or a folder that a daemon serves")
    match = _SCHEME.fullmatch(state)
    if match is not None and folder_of(state) is None and not is_address(state):
        meant = f"{SCHEME}://{match[2].strip('/')}"
    elif match is None and HOST_PORT.fullmatch(state) and not Path(state).exists():
        meant = f"{SCHEME}://{state}"
    else:
        return state
    raise BadInput(
        f"the option 'state' is {forms}, or a folder that a daemon serves; {state!r} is neither: did you mean "
        f"{meant!r}?",
        option="state",
    )


def likely_role(given: Collection[str]) -> Role:
    """Whether these options, misspelt ones included, look more like those for reading a stream or a batch."""

    def likeness(role: Role) -> float:
        known = [name.lower() for name in OPTIONS[role]]
        return sum(max(difflib.SequenceMatcher(None, name.lower(), k).ratio() for k in known) for name in given)

    return "read stream" if likeness("read stream") > likeness("read") else "read"


def _unknown(name: str, role: Role, known: Mapping[str, str]) -> str:
    near = nearest(name, known)
    if near:
        return f"there is no option {name!r} to {role}; did you mean {known[near]!r}?"
    elsewhere = [other for other, names in OPTIONS.items() if name in {n.lower() for n in names}]
    if elsewhere:
        return f"the option {name!r} is not for this: it is known to {' and '.join(elsewhere)}"
    return f"there is no option {name!r} to {role}; there are {', '.join(sorted(known.values()))}"
