"""Word count: ``map`` makes many rows out of one, ``reduce`` adds up.

The column to read the text from is the user's own configuration in the spec (``config: {column: message}``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shuffle import Mapper, PartitionedRowset, Reducer, hash_partition
from shuffle.api import WorkerSpec
from statestore import StateClient, Transaction

TABLE = "words"
KEY = pa.schema([("word", pa.string())])
VALUE = pa.schema([("count", pa.int64())])


class SplitWords(Mapper):
    """One row for each word of each line, in the order in which the words stand in it.

    Only what the reducers need goes through the shuffle, so the other columns of the line are dropped. If a word needs
    another column of its line, ``pc.list_parent_indices`` gives the row that it came from, for a ``take``.
    """

    def map(self, rows: pa.Table) -> PartitionedRowset:
        words = words_of(rows[self.config.get("column", "line")])
        return hash_partition(words, by=["word"], reducers=self.spec.reducer_count)


def words_of(lines: pa.ChunkedArray) -> pa.Table:
    """All words of all lines as one column; a line that is null or blank has none."""
    lists = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(pc.utf8_lower(lines)))
    words = pc.list_flatten(lists)
    return pa.table({"word": words}).filter(pc.not_equal(words, ""))


class CountWords(Reducer):
    """Adds the words of each batch to their counts in the table ``words``."""

    def __init__(self, config: Mapping[str, Any], spec: WorkerSpec, state: StateClient) -> None:
        super().__init__(config, spec, state)
        state.create_table(TABLE, key=KEY, value=VALUE, if_not_exists=True)

    def reduce(self, rows: pa.Table) -> Transaction | None:
        batch = rows.group_by("word").aggregate([([], "count_all")]).rename_columns(["word", "count"])
        tx = self.state.transaction()
        known = tx.lookup(TABLE, batch.select(["word"]))
        both = pa.concat_tables([batch, known.select(["word", "count"])])
        tx.write(TABLE, both.group_by("word").aggregate([("count", "sum")]).rename_columns(["word", "count"]))
        return tx
