"""The workload, described once: the activity logs of a cluster's master nodes.

Examples, benchmarks and tests all take their rows from here. A log line has a time, the cluster it comes from, the user
on whose behalf it was written (most lines have none), the method and a message: about 115 bytes of Arrow data in all.

Every value of a row is a function of (seed, partition, position) alone: for each position a 64-bit mix of these three
is cut into fields, and each field picks from a small vocabulary. That is why the rows are the same whatever the size of
the batches they are asked for in, and why millions of them a second come out of NumPy and Arrow without a loop.

    skew = "thesis"     ``root`` has 45 percent of the lines that have a user, a few system users 35 percent, and the
                        rest of the users share what remains by Zipf's law
    skew = "uniform"    every user equally often
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Skew = Literal["thesis", "uniform"]

SCHEMA = pa.schema(
    [
        ("timestamp", pa.timestamp("us")),
        ("cluster", pa.string()),
        ("user", pa.string()),
        ("method", pa.string()),
        ("message", pa.string()),
    ]
)
"""The columns of a log line."""

RESULT_SCHEMA = pa.schema(
    [("user", pa.string()), ("cluster", pa.string()), ("last_access", pa.timestamp("us")), ("count", pa.int64())]
)
"""What the activity job keeps: one row for each user and cluster."""

SYSTEM_USERS = ("root", "scheduler", "replicator", "monitoring", "cron", "backup")
ROOT_SHARE = 0.45
SYSTEM_SHARE = 0.35
USERS_MAX = 1 << 15
CLUSTERS_MAX = 1 << 8
BATCH_ROWS_DEFAULT = 1 << 16

_EPOCH_US = 1_767_225_600_000_000  # 2026-01-01 00:00:00 UTC
_ROW_STEP_US = 250
_METHODS = (
    "GetNode",
    "ListNodes",
    "SetAttribute",
    "LockNode",
    "StartTransaction",
    "CommitTransaction",
    "Exists",
    "ReadRows",
)
_MESSAGES = 1 << 13

# The 64 random bits of a row, from the lowest: which message, which user, has it a user, which cluster, which method.
_MESSAGE_BITS, _USER_BITS, _HAS_USER_BITS, _CLUSTER_BITS, _METHOD_BITS = 13, 20, 16, 12, 3
_USER_SHIFT = _MESSAGE_BITS
_HAS_USER_SHIFT = _USER_SHIFT + _USER_BITS
_CLUSTER_SHIFT = _HAS_USER_SHIFT + _HAS_USER_BITS
_METHOD_SHIFT = _CLUSTER_SHIFT + _CLUSTER_BITS

_U64 = np.uint64
_Int64 = np.ndarray[Any, np.dtype[np.int64]]
_GOLDEN = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


def _mix_scalar(value: int) -> int:
    """SplitMix64's finaliser on one number: turns seed and partition into a starting point."""
    value = (value + _GOLDEN) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _random_bits(seed: int, partition: int, begin: int, rows: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """SplitMix64 as a counter-based generator: 64 bits for each position, computed without its predecessors."""
    stream = _mix_scalar(_mix_scalar(seed) ^ partition)
    value = np.arange(begin, begin + rows, dtype=_U64)
    value *= _U64(_GOLDEN)
    value += _U64(stream)
    value ^= value >> _U64(30)
    value *= _U64(0xBF58476D1CE4E5B9)
    value ^= value >> _U64(27)
    value *= _U64(0x94D049BB133111EB)
    value ^= value >> _U64(31)
    return value


def _field(bits: np.ndarray[Any, np.dtype[np.uint64]], shift: int, width: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return ((bits >> _U64(shift)) & _U64((1 << width) - 1)).astype(np.int32)


def user_names(users: int) -> list[str]:
    """All users: the system users first, then ``user00006`` and so on."""
    return [*SYSTEM_USERS[:users], *(f"user{number:05d}" for number in range(len(SYSTEM_USERS), users))]


def cluster_names(clusters: int) -> list[str]:
    return [f"cluster-{number:02d}" for number in range(clusters)]


def _user_weights(users: int, skew: Skew) -> np.ndarray[Any, np.dtype[np.float64]]:
    if skew == "uniform":
        return np.full(users, 1.0 / users)
    system = min(len(SYSTEM_USERS), users)
    weights = np.zeros(users)
    weights[0] = ROOT_SHARE
    if system > 1:
        falling = 1.0 / np.arange(1, system)
        weights[1:system] = SYSTEM_SHARE * falling / falling.sum()
    if users > system:
        falling = 1.0 / np.arange(10, 10 + users - system)
        weights[system:] = (1.0 - ROOT_SHARE - SYSTEM_SHARE) * falling / falling.sum()
    scaled: np.ndarray[Any, np.dtype[np.float64]] = weights / weights.sum()
    return scaled


@lru_cache(maxsize=8)
def _user_of_slot(users: int, skew: Skew) -> np.ndarray[Any, np.dtype[np.int32]]:
    """2^20 slots, each the index of a user, as many slots for a user as it has weight: one lookup draws a user."""
    slots = 1 << _USER_BITS
    edges = np.cumsum(_user_weights(users, skew))
    middles = (np.arange(slots) + 0.5) / slots
    return np.minimum(np.searchsorted(edges, middles), users - 1).astype(np.int32)


@lru_cache(maxsize=1)
def _message_vocabulary() -> pa.Array:
    bits = _random_bits(0x5EED, 0, 0, _MESSAGES)
    verbs = ("Request served", "Mutation applied", "Lock acquired", "Object visited")
    return pa.array(
        [
            f"{verbs[int(value) & 3]} //home/team-{(int(value) >> 2) % 40:02d}/table-{(int(value) >> 8) % 9973:04d}"
            f" request={int(value) >> 36:07x} us={(int(value) >> 20) % 90_000 + 10_000}"
            for value in bits
        ],
        pa.string(),
    )


@dataclass(frozen=True, slots=True)
class Workload:
    """One stream of log lines; equal objects give equal rows."""

    seed: int = 1
    users: int = 5000
    clusters: int = 5
    skew: Skew = "thesis"
    with_user_share: float = 0.15
    """The share of the lines that have a user; the mappers of the activity job drop the others."""

    def __post_init__(self) -> None:
        if not 1 <= self.users <= USERS_MAX:
            raise ValueError(f"users must be between 1 and {USERS_MAX}, not {self.users}")
        if not 1 <= self.clusters <= CLUSTERS_MAX:
            raise ValueError(f"clusters must be between 1 and {CLUSTERS_MAX}, not {self.clusters}")
        if self.skew not in ("thesis", "uniform"):
            raise ValueError(f"skew must be 'thesis' or 'uniform', not {self.skew!r}")
        if not 0.0 <= self.with_user_share <= 1.0:
            raise ValueError(f"with_user_share must be between 0 and 1, not {self.with_user_share}")

    def rows(self, begin: int, end: int, partition: int = 0) -> pa.Table:
        """The rows at positions ``begin`` (inclusive) to ``end`` (exclusive) of one partition."""
        bits = _random_bits(self.seed, partition, begin, end - begin)
        # A line is written every step, give or take less than a step: times rise, as in a log.
        jitter = (bits % _U64(_ROW_STEP_US)).astype(np.int64)
        times = np.arange(begin, end, dtype=np.int64) * _ROW_STEP_US + jitter + _EPOCH_US
        cluster = (_field(bits, _CLUSTER_SHIFT, _CLUSTER_BITS) * self.clusters) >> _CLUSTER_BITS
        user = _user_of_slot(self.users, self.skew)[_field(bits, _USER_SHIFT, _USER_BITS)]
        userless = _field(bits, _HAS_USER_SHIFT, _HAS_USER_BITS) >= round(self.with_user_share * (1 << _HAS_USER_BITS))
        columns = [
            pa.array(times, pa.timestamp("us")),
            pa.array(cluster_names(self.clusters), pa.string()).take(pa.array(cluster)),
            _user_vocabulary(self.users).take(pa.array(user, mask=userless)),
            pa.array(_METHODS, pa.string()).take(pa.array(_field(bits, _METHOD_SHIFT, _METHOD_BITS))),
            _message_vocabulary().take(pa.array(_field(bits, 0, _MESSAGE_BITS))),
        ]
        return pa.Table.from_arrays(columns, schema=SCHEMA)

    def batches(self, rows: int, batch_rows: int = BATCH_ROWS_DEFAULT, partition: int = 0) -> Iterator[pa.Table]:
        """The first ``rows`` rows of one partition, in tables of at most ``batch_rows``."""
        if batch_rows < 1:
            raise ValueError(f"batch_rows must be at least 1, not {batch_rows}")
        for begin in range(0, rows, batch_rows):
            yield self.rows(begin, min(begin + batch_rows, rows), partition)


@lru_cache(maxsize=8)
def _user_vocabulary(users: int) -> pa.Array:
    return pa.array(user_names(users), pa.string())


def generate(rows: int, seed: int = 1, partition: int = 0, **shape: Any) -> pa.Table:
    """``rows`` log lines of one partition as one table; ``shape`` is users, clusters, skew and with_user_share."""
    return pa.concat_tables([SCHEMA.empty_table(), *batches(rows, BATCH_ROWS_DEFAULT, seed, partition, **shape)])


def batches(
    rows: int, batch_rows: int = BATCH_ROWS_DEFAULT, seed: int = 1, partition: int = 0, **shape: Any
) -> Iterator[pa.Table]:
    """The lines of ``generate`` in batches, for callers that do not keep them all in memory."""
    return Workload(seed=seed, **shape).batches(rows, batch_rows, partition)


def partition_rows(rows: int, partitions: int) -> list[int]:
    """How many of ``rows`` rows each partition gets: as even as can be, the first ones one more."""
    share, rest = divmod(rows, partitions)
    return [share + (1 if partition < rest else 0) for partition in range(partitions)]


def oracle(tables: Iterable[pa.Table]) -> pa.Table:
    """The expected result of the activity job: count and last access per (user, cluster).

    It is counted by NumPy over numbered keys, so that it shares neither code nor method with the job, which groups by
    Arrow.
    """
    return oracle_sum(oracle_part(table) for table in tables)


def oracle_part(table: pa.Table) -> pa.Table:
    """The oracle's result for some of the rows, for callers that count while they generate."""
    kept = table.filter(pc.is_valid(table["user"]))
    return _per_key(kept["user"], kept["cluster"], kept["timestamp"], np.ones(kept.num_rows, np.int64))


def oracle_sum(parts: Iterable[pa.Table]) -> pa.Table:
    """The oracle's result for all rows, from the results for parts of them."""
    total = pa.concat_tables([RESULT_SCHEMA.empty_table(), *parts])
    counts = total["count"].to_numpy()
    return _per_key(total["user"], total["cluster"], total["last_access"], counts).sort_by(
        [("user", "ascending"), ("cluster", "ascending")]
    )


def _per_key(users: pa.ChunkedArray, clusters: pa.ChunkedArray, times: pa.ChunkedArray, counts: _Int64) -> pa.Table:
    """The sum of the counts and the latest time for each pair of user and cluster."""
    user, cluster = (pc.dictionary_encode(column.combine_chunks()) for column in (users, clusters))
    width = max(len(cluster.dictionary), 1)
    keys = user.indices.to_numpy().astype(np.int64) * width + cluster.indices.to_numpy()
    found, place = np.unique(keys, return_inverse=True)
    sums, latest = np.zeros(len(found), np.int64), np.full(len(found), np.iinfo(np.int64).min)
    np.add.at(sums, place, counts)
    np.maximum.at(latest, place, times.cast(pa.int64()).to_numpy())
    columns = [
        user.dictionary.take(pa.array(found // width)),
        cluster.dictionary.take(pa.array(found % width)),
        pa.array(latest).cast(pa.timestamp("us")),
        pa.array(sums),
    ]
    return pa.Table.from_arrays(columns, schema=RESULT_SCHEMA)


@dataclass(frozen=True, slots=True)
class Difference:
    """How a table of counts differs from the oracle's, summed over the keys."""

    rows: int
    """The number of rows that the oracle counted."""
    lost: int
    duplicated: int
    wrong_last_access: int
    """The number of keys whose count is right and whose last access is not."""

    @property
    def exact(self) -> bool:
        return not (self.lost or self.duplicated or self.wrong_last_access)

    def __str__(self) -> str:
        verdict = "OK" if self.exact else "FAILED"
        tail = f" wrong_last_access={self.wrong_last_access}" if self.wrong_last_access else ""
        return f"exactly-once: {verdict} rows={self.rows} lost={self.lost} duplicated={self.duplicated}{tail}"


def difference(expected: pa.Table, actual: pa.Table) -> Difference:
    """Compare key by key: a count too low is rows lost, a count too high (or a key nobody expects) rows duplicated."""
    wanted = expected.select(["user", "cluster", "count", "last_access"]).rename_columns(
        ["user", "cluster", "want", "at"]
    )
    found = actual.select(["user", "cluster", "count", "last_access"]).rename_columns(
        ["user", "cluster", "have", "seen"]
    )
    joined = wanted.join(found, keys=["user", "cluster"], join_type="full outer")
    surplus = pc.subtract(pc.fill_null(joined["have"], 0), pc.fill_null(joined["want"], 0))
    surplus_rows = np.asarray(surplus)
    off_time = pc.and_(pc.equal(surplus, 0), pc.invert(pc.fill_null(pc.equal(joined["at"], joined["seen"]), False)))
    return Difference(
        rows=int(pc.sum(wanted["want"]).as_py() or 0),
        lost=int(-surplus_rows[surplus_rows < 0].sum()),
        duplicated=int(surplus_rows[surplus_rows > 0].sum()),
        wrong_last_access=int(pc.sum(off_time).as_py() or 0),
    )
