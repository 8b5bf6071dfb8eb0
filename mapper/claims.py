"""What reducers have committed: what their requests claim, and what their rows in the store say.

A claim is accepted, and rows are freed from memory because of it, if it is within what this instance has served, or if
the reducer's row in the store says the same. Nothing is forgotten for good because of a claim alone: the claims that a
trim relies on are compared with the store before. So neither a mistake nor a forgery in a request can lose rows.

No I/O, no threads, no clocks in here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shuffle.errors import FalseClaim, NotServed
from shuffle.ids import NOTHING_COMMITTED, MapperIndex, ReducerIndex, ShuffleIndex
from shuffle.mapper.bucket import Bucket
from shuffle.mapper.spill.index import Spill
from shuffle.messages import GetRows


class Claims:
    """Compares what requests call committed with what was served and with what the store says."""

    def __init__(self, mapper_index: MapperIndex, reducer_count: int) -> None:
        self._mapper_index = mapper_index
        self._durable = [NOTHING_COMMITTED] * reducer_count
        """For each reducer, the last shuffle index that its row in the store is known to call committed. The row may
        say more by now; it never says less."""

    def learn(self, committed: Mapping[ReducerIndex, ShuffleIndex]) -> None:
        """Take note of what the reducers' rows in the store say, or said a moment ago: committed indexes only grow."""
        for reducer_index, row_index in committed.items():
            if reducer_index < len(self._durable):
                self._durable[reducer_index] = max(self._durable[reducer_index], row_index)

    def committed(self, bucket: Bucket) -> ShuffleIndex:
        """The last row that the reducer of ``bucket`` has committed, as far as is known."""
        return max(bucket.freed, self._durable[bucket.reducer_index])

    def believable(self, bucket: Bucket) -> ShuffleIndex:
        """The last row that a request may call committed."""
        return max(bucket.served, self._durable[bucket.reducer_index])

    def check_request(self, request: GetRows, bucket: Bucket) -> None:
        """Raise NotServed if rows are called committed that this instance has never served.

        They may have been served by another instance, or before a restart; then the reducer's row in the store shows
        that they are committed (``learn``), and the request can be tried again.
        """
        known = self.believable(bucket)
        if request.committed_row_index > known:
            raise NotServed(
                f"reducer {request.reducer_index} says it has committed mapper {self._mapper_index}'s rows up to "
                f"{request.committed_row_index}, but the last one that this mapper has served, or that the reducer's "
                f"row in the store was seen to hold, is {known}: nothing was changed. Read the reducer's state again",
                mapper_index=self._mapper_index,
                reducer_index=request.reducer_index,
                committed_row_index=request.committed_row_index,
                served_row_index=known,
            )

    def unconfirmed(
        self, buckets: Iterable[Bucket], spills: Mapping[ReducerIndex, Spill]
    ) -> dict[ReducerIndex, ShuffleIndex]:
        """For each reducer the last row freed because of a claim, where the store has not been seen to say the same."""
        unconfirmed: dict[ReducerIndex, ShuffleIndex] = {}
        for bucket in buckets:
            spill = spills.get(bucket.reducer_index)
            freed = bucket.freed if spill is None else max(bucket.freed, spill.freed)
            if freed > self._durable[bucket.reducer_index]:
                unconfirmed[bucket.reducer_index] = freed
        return unconfirmed

    def check(self, claims: Mapping[ReducerIndex, ShuffleIndex]) -> None:
        """Raise FalseClaim if the store, which was read after ``claims`` were made, does not say the same."""
        for reducer_index, row_index in claims.items():
            durable = self._durable[reducer_index]
            if row_index > durable:
                raise FalseClaim(
                    f"mapper {self._mapper_index}: requests in the name of reducer {reducer_index} called its rows up "
                    f"to {row_index} committed, but its row in the store says {durable}. Nothing is lost: the rows are "
                    f"read, mapped and served again. Find out who asks for rows in the name of reducer {reducer_index}",
                    mapper_index=self._mapper_index,
                    reducer_index=reducer_index,
                    claimed_row_index=row_index,
                    committed_row_index=durable,
                )
