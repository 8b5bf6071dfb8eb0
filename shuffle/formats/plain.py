"""The formats ``raw`` (a value as it is) and ``arrow`` (an Arrow IPC stream of any number of rows in each value)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from shuffle.errors import BadInput
from shuffle.formats.base import NO_VALUE, BadValue, Decoded, Format, check_columns, short

RAW_SCHEMA = pa.schema([("value", pa.binary())])

ROWS_PER_VALUE_MAX = 1 << 24
"""The most rows in one value. A column of nulls has no bytes, so that the size of a value does not bound its rows."""


class RawFormat(Format):
    """One column, ``value``, which may be null."""

    schema = RAW_SCHEMA

    def decode(self, values: pa.Array) -> Decoded:
        return Decoded(pa.table([values], schema=self.schema))

    def encode(self, rows: pa.Table) -> pa.Array:
        column = check_columns(rows, self.schema, "the format raw")["value"]
        return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], pa.binary())


class ArrowFormat(Format):
    """Each value is an Arrow IPC stream: the schema, then batches of rows."""

    is_batched = True

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema

    def decode(self, values: pa.Array) -> Decoded:
        tables, bad, of_value = [], [], []
        for index, value in enumerate(values):
            buffer = value.as_buffer()
            if buffer is None:
                bad.append(BadValue(index, NO_VALUE))
                continue
            try:
                rows = self._read(buffer)
            except (pa.ArrowException, ValueError, OSError, BadInput) as error:
                bad.append(BadValue(index, f"it is not an Arrow stream of the declared columns: {short(error)}"))
                continue
            tables.append(rows)
            of_value.append(np.full(rows.num_rows, index, dtype=np.int64))
        rows = pa.concat_tables(tables) if tables else self.schema.empty_table()
        return Decoded(rows, bad, np.concatenate(of_value) if of_value else np.empty(0, dtype=np.int64))

    def _read(self, value: pa.Buffer) -> pa.Table:
        with pa.ipc.open_stream(value) as reader:
            batches, count = [], 0
            for batch in reader:
                batch.validate()  # What a message says of its buffers may be wrong, and reading beyond them is fatal.
                count += batch.num_rows
                if count > ROWS_PER_VALUE_MAX:
                    raise BadInput(f"over {ROWS_PER_VALUE_MAX} rows in one value")
                batches.append(batch)
            return check_columns(pa.Table.from_batches(batches, reader.schema), self.schema, "the declared schema")

    def encode(self, rows: pa.Table) -> pa.Array:
        rows = check_columns(rows, self.schema, "the format arrow")
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.schema) as writer:
            writer.write_table(rows)
        return pa.array([sink.getvalue().to_pybytes()], pa.binary())
