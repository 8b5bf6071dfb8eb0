"""Dead letters as they are outside of the state store: in columns of text and numbers, which every kind of output has.

In its queue a dead letter has the refused row as an Arrow stream, because rows of many schemas share the queue. Nobody
can read that in a topic or with SQL. So the row is given twice: as JSON, to be looked at and searched, and as what it
was, for whoever wants to bring it back without a doubt about types.
"""

from __future__ import annotations

import base64

import pyarrow as pa

from shuffle.statestore.admin.text import json_line, json_values
from shuffle.user_code.poison import DEAD_LETTER_SCHEMA, decode_row

OUTSIDE_SCHEMA = pa.schema(
    [
        *(pa.field(field.name, field.type) for field in DEAD_LETTER_SCHEMA if field.name != "row"),
        pa.field("row", pa.string()),
        pa.field("row_arrow", pa.string()),
    ]
)
"""``row`` is the refused row as a JSON object; null if it cannot be decoded. ``row_arrow`` is the Arrow IPC stream of
it, in base64."""


def readable(rows: pa.Table) -> pa.Table:
    """Rows of a dead-letter queue in ``OUTSIDE_SCHEMA``. The same rows become the same values, whenever it is called: a
    batch may be published twice under one name."""
    encoded = rows["row"].to_pylist()
    columns = [rows[name] for name in OUTSIDE_SCHEMA.names[:-2]]
    columns.append(pa.array([_as_json(row) for row in encoded], pa.string()))
    columns.append(pa.array([base64.b64encode(row).decode() for row in encoded], pa.string()))
    return pa.table(columns, schema=OUTSIDE_SCHEMA)


def _as_json(row: bytes) -> str | None:
    try:
        [batch] = decode_row(row).combine_chunks().to_batches()
        return json_line(json_values(batch)[0]).rstrip("\n")
    except Exception:  # Of many types: a time out of range, a text that is none. It must not hold up other rows.
        return None
