"""Recognises and upgrades the tables of a processor that were made before its rows had a generation and fronts.

A processor does not start on such tables (``refuse_old_tables``); ``shuffle upgrade SPEC`` rewrites them while nothing
of the processor runs. Tables cannot be changed in place, so this takes several steps, and the process may die after
each of them:

1. The rows of the old tables are written, in their new form, to one row of ``<processor>/meta``: one transaction. From
   here on that row is authoritative.
2. The old tables are dropped, and tables of the new form are created.
3. The rows are written to them and the row in ``<processor>/meta`` is deleted: one transaction.

While that row exists, nothing starts, and another ``shuffle upgrade`` goes on with step 2.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shuffle.durable.mapper_state import MAPPERS_KEY, MAPPERS_ROW, MAPPERS_VALUE
from shuffle.durable.reducer_state import REDUCERS_KEY, REDUCERS_VALUE
from shuffle.durable.tables import mappers_group, query_group, reducers_group
from shuffle.errors import BadInput, SpecError

if TYPE_CHECKING:
    from shuffle.statestore import StateClient

UPGRADE = "upgrade"
"""The name of the row in ``<processor>/meta`` that holds the rows during the upgrade."""

_REDUCERS_ROW = pa.schema([*REDUCERS_KEY, *REDUCERS_VALUE])
_ADDED: dict[str, dict[str, Any]] = {
    "mappers": {"generation": 0, "front": None},
    "reducers": {"generation": 0, "fronts": None},
}
"""The columns that old tables lack, and their values for old rows."""
_NEW = {"mappers": (MAPPERS_KEY, MAPPERS_VALUE, MAPPERS_ROW), "reducers": (REDUCERS_KEY, REDUCERS_VALUE, _REDUCERS_ROW)}


def refuse_old_tables(client: StateClient, processor: str) -> None:
    """Raises ``SpecError`` if the tables of ``processor`` are of the old form, or their upgrade was interrupted."""
    if _old_tables(client, processor) or _unfinished(client, processor) is not None:
        raise SpecError(
            f"the tables of processor {processor!r} were written by an earlier version of this project: stop all that "
            "runs of it, and run `shuffle upgrade SPEC` once; nothing is lost by it",
            processor=processor,
        )


def upgrade(client: StateClient, processor: str) -> bool:
    """Brings the tables of ``processor`` up to date, by the steps above. Returns False if they were so already."""
    packed = _unfinished(client, processor)
    old = _old_tables(client, processor)
    if packed is None and not old:
        return False
    _refuse_running(client, processor)
    if packed is None:  # 1
        with client.transaction() as tx:
            rows = {name: _to_new_form(tx.scan(f"{processor}/{name}").read_all(), name) for name in old}
            tx.write(f"{processor}/meta", pa.table({"name": [UPGRADE], "value": [_pack(rows)]}))
            tx.commit()
    else:
        rows = _unpack(packed)
    for name in old:  # 2
        client.drop_table(f"{processor}/{name}")
    for name, (key, value, _) in _NEW.items():
        client.create_table(f"{processor}/{name}", key=key, value=value, if_not_exists=True)
    with client.transaction() as tx:  # 3
        for name, table in rows.items():
            if table.num_rows:
                tx.write(f"{processor}/{name}", table)
        tx.delete(f"{processor}/meta", pa.table({"name": [UPGRADE]}))
        tx.commit()
    return True


def _old_tables(client: StateClient, processor: str) -> list[str]:
    tables = {table.name: table.value for table in client.tables()}
    existing = {name: tables[f"{processor}/{name}"] for name in _NEW if f"{processor}/{name}" in tables}
    return [name for name, value in existing.items() if not set(_ADDED[name]) <= set(value.names)]


def _unfinished(client: StateClient, processor: str) -> str | None:
    """The packed rows of an upgrade that was interrupted after step 1; None if there is none."""
    if not any(table.name == f"{processor}/meta" for table in client.tables()):
        return None
    row = client.lookup(f"{processor}/meta", pa.table({"name": [UPGRADE]}))
    return str(row["value"][0].as_py()) if row.num_rows else None


def _refuse_running(client: StateClient, processor: str) -> None:
    groups = (mappers_group(processor), reducers_group(processor), query_group(processor))
    running = sum(len(client.leases.members(group)) for group in groups)
    if running:
        raise BadInput(
            f"{running} mappers, reducers or queries of processor {processor!r} run: stop them, and run this again "
            "when their leases are over, which takes a few seconds",
            processor=processor,
        )


def _to_new_form(rows: pa.Table, name: str) -> pa.Table:
    schema = _NEW[name][2]
    columns = [
        rows[field.name]
        if field.name in rows.schema.names
        else pa.array([_ADDED[name][field.name]] * rows.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _pack(rows: dict[str, pa.Table]) -> str:
    parts = []
    for name, table in rows.items():
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        parts.append(f"{name}:{base64.b64encode(sink.getvalue().to_pybytes()).decode()}")
    return " ".join(parts)


def _unpack(packed: str) -> dict[str, pa.Table]:
    parts = (part.split(":") for part in packed.split(" "))
    return {name: pa.ipc.open_stream(base64.b64decode(rows)).read_all() for name, rows in parts}
