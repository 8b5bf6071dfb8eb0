"""Bounds on everything, and where each number comes from."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

TICKET_BYTES_MAX = 64 * KIB
"""A ticket is a few numbers and a guid; anything near this is not a ticket."""

TOKEN_BYTES_MAX = 16 * KIB
"""A continuation token: a place in a partition, kept for every batch in the window and written with every trim."""

KEY_BYTES_MAX = 64 * KIB
"""RocksDB keeps whole keys in its index blocks; longer ones belong in a value."""

VALUE_BYTES_MAX = 16 * MIB
"""One row of a sorted table. RocksDB copies values through its block cache; larger things belong in a queue."""

BATCH_BYTES_MAX = 256 * MIB
"""One record batch on the wire. Arrow Flight cannot carry a message of 2 GiB; this leaves room and keeps memory low."""

BATCH_ROWS_MAX = 1 << 24
"""Rows of one record batch of a queue. A column of nulls has no bytes, so bytes alone do not bound rows: without this a
message of a hundred bytes is a batch of 2^62 rows, which a reader would try to put into a column of its own."""

TRANSACTION_BYTES_MAX = 512 * MIB
"""All writes and appends of one transaction: they are in memory at the client and at the store at once."""

TRANSACTION_ROWS_MAX = 5_000_000
"""Rows written by one transaction: at about a microsecond a row this keeps the one writer busy for seconds at most."""

TRANSACTION_APPENDS_MAX = 65_536
"""Appends of one transaction: where each of them ended up is in the header of the one answer."""

SECTIONS_BYTES_MAX = 64 * MIB
"""What a commit is made of, as JSON: as many appends as there may be, each with a producer of the longest name."""

RESPONSE_HEADER_BYTES_MAX = 4 * MIB
"""The largest is that of a commit with as many appends as there may be: 42 bytes for each."""

WORKER_ANSWER_S_MAX = 6.0
"""How long a worker waits for an answer of its store, beyond any wait that it asks for, before it tries another
connection: one that has fallen silent holds it up for so long. A store that is only slow is asked twice, and knows."""

WAIT_MS_MAX = 60_000
"""The longest long poll. A client that wants more asks again."""

STAGED_TTL_MS_MAX = 30 * 24 * 3_600_000
"""Staged rows that nobody has published for a month were forgotten, and take up the disk."""

NAME_BYTES_MAX = 255
"""Names of tables, queues, groups, members and producers."""

KEY_GROUPS_DEFAULT = 4096
"""How many key groups there are unless the spec says otherwise. It bounds the reducers a processor can ever have; with
16 groups to a reducer (256 of them) the largest range is at most 7 % over the average. A power of two, so that the
remainder of a division is a mask."""
