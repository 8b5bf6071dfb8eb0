"""The rows of tables as they are on the disk: those in the database, and over them the blocks of changelogs.

Blocks are decoded here a second time, by code that shares nothing with the product's.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from tests.sim.disk import Disk

Block = tuple[int, dict[bytes, bytes | None]]
"""The version of a block, and its rows; None for a deleted one."""

UNEVEN = 0xFFFFFFFF
"""In place of the length of every value, where lengths differ."""


class DurableTables:
    """What a store would read of its tables if it were opened now."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._blocks: dict[tuple[object, ...], list[Block]] = {}
        """The blocks that were decoded before, by where they are."""
        rows = (value for key, value in disk.keys.items() if key.startswith(b"\0ct"))
        self._table_ids = {struct.pack(">I", json.loads(value)["table_id"]) for value in rows}

    def get_all(self, keys: list[bytes]) -> list[bytes | None]:
        """The durable value of each key, or None."""
        logs = self._logs()
        return [self._value(logs.get(key[1:5], {}), key) for key in keys]

    def _value(self, log: dict[bytes, bytes | None], key: bytes) -> bytes | None:
        return log[key] if key in log else self._disk.keys.get(key)

    def _logs(self) -> dict[bytes, dict[bytes, bytes | None]]:
        """The rows of every changelog, by the id of the table."""
        found: dict[bytes, list[Block]] = {}
        for key, value in self._disk.keys.items():
            kind, table = key[:1], key[1:5]
            if kind == b"l":
                found.setdefault(table, []).extend(self._decoded((key, value), lambda stored: [stored[1]]))
            elif kind == b"q" and table in self._table_ids and key[9:10] == b"s":
                size_bytes = struct.unpack_from("<QQ", value)[1]
                begin = struct.unpack(">Q", key[10:])[0]
                partition = self._disk.keys.get(key[:9] + b"p")
                first = struct.unpack("<QQ", partition)[0] if partition is not None else 0
                at = value[16:].decode(), size_bytes, first - begin
                found.setdefault(table, []).extend(self._decoded(at, lambda place: self._payloads(*place)))
        logs = {}
        for table, blocks in found.items():
            log: dict[bytes, bytes | None] = {}
            for _, rows in sorted(blocks, key=lambda block: block[0]):
                log.update(rows)
            logs[table] = log
        return logs

    def _decoded(self, at: tuple[Any, ...], payloads: Callable[[tuple[Any, ...]], list[bytes]]) -> list[Block]:
        if at not in self._blocks:
            self._blocks[at] = [decode(payload) for payload in payloads(at)]
        return self._blocks[at]

    def _payloads(self, name: str, size_bytes: int, first_row: int) -> list[bytes]:
        data = bytes(self._disk.files[name][:size_bytes])
        schema_bytes = struct.unpack_from("<8sII", data)[2]
        at = (16 + schema_bytes + 7) & ~7
        found = []
        while at < len(data):
            _, payload_bytes, row, _, _ = struct.unpack_from("<4sIQII", data, at)
            if row >= first_row:
                found.append(data[at + 32 : at + 32 + payload_bytes])
            at += 32 + payload_bytes
        return found


def decode(block: bytes) -> Block:
    """The version and the rows of one block."""
    _, rows, version, key_bytes, value_bytes, count, flags = struct.unpack_from("<4sIQIIII", block)
    sizes = [struct.unpack_from("<II", block, 32 + 8 * part) for part in range(count)]
    at = 32 + 8 * count
    parts = []
    for stored, raw in sizes:
        part = block[at : at + stored]
        parts.append(part if stored == raw else pa.decompress(part, raw, codec="zstd", asbytes=True))
        at += stored
    keys = _column(parts, rows, key_bytes)
    there = [True] * rows
    if flags:
        bitmap = parts.pop(0)
        there = [bool(bitmap[row // 8] >> row % 8 & 1) for row in range(rows)]
    values = _column(parts, rows, value_bytes)
    return version, {key: value if exists else None for key, value, exists in zip(keys, values, there, strict=True)}


def _column(parts: list[bytes], rows: int, width: int) -> list[bytes]:
    if width != UNEVEN:
        turned = parts.pop(0)
        return [bytes(turned[row + rows * byte] for byte in range(width)) for row in range(rows)]
    lengths, data = struct.unpack(f"<{rows}I", parts.pop(0)), parts.pop(0)
    found, at = [], 0
    for length in lengths:
        found.append(data[at : at + length])
        at += length
    return found
