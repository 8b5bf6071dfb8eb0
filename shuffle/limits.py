"""Bounds on everything, and the reason for each number."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

TICKET_BYTES_MAX = 64 * KIB
"""The most bytes of a GetRows ticket. A ticket is a few numbers and a guid, so anything near this is not one."""

TOKEN_BYTES_MAX = 16 * KIB
"""The most bytes of a continuation token. It is kept for every batch in the window and written with every trim."""

KEY_BYTES_MAX = 64 * KIB
"""The most bytes of a key of a sorted table. RocksDB keeps whole keys in its index blocks; longer ones belong in a
value."""

VALUE_BYTES_MAX = 16 * MIB
"""The most bytes of the value of one row of a sorted table. RocksDB copies values through its block cache; larger ones
belong in a queue."""

BATCH_BYTES_MAX = 256 * MIB
"""The most bytes of one record batch on the wire. Arrow Flight cannot carry a message of 2 GiB; this leaves room and
keeps memory low."""

BATCH_ROWS_MAX = 1 << 24
"""The most rows of one record batch of a queue. A column of nulls has no bytes, so bytes alone do not bound rows:
without this a message of a hundred bytes is a batch of 2^62 rows, for which a reader would allocate columns."""

TRANSACTION_BYTES_MAX = 512 * MIB
"""The most bytes of all writes and appends of one transaction: they are in memory at the client and at the store at the
same time."""

TRANSACTION_ROWS_MAX = 5_000_000
"""The most rows written by one transaction: at about a microsecond a row this keeps the store's one writer busy for
seconds at most."""

LOGGED_ROWS_MIN = 4096
"""The least rows that one transaction writes to a table for the table to become logged: from then on its rows go to its
changelog, as blocks, and not one by one to RocksDB. For fewer rows RocksDB is as good, and a table in RocksDB needs no
memory."""

TRANSACTION_APPENDS_MAX = 65_536
"""The most appends of one transaction: the positions of all of them are in the header of one response."""

SECTIONS_BYTES_MAX = 64 * MIB
"""The most bytes of the JSON that describes a commit: enough for the most appends, each with a producer of the longest
name."""

RESPONSE_HEADER_BYTES_MAX = 4 * MIB
"""The most bytes of the header of a response. The largest is that of a commit with the most appends: 42 bytes each."""

WORKER_RESPONSE_S_MAX = 6.0
"""The most seconds that a worker waits for a response of its store, beyond any wait that it requests, before it tries
another connection: a dead connection delays it by so much. A store that is only slow gets the request twice, so only
requests that may be repeated are sent again."""

WAIT_MS_MAX = 60_000
"""The most milliseconds of one long poll. A client that wants to wait longer repeats the request."""

STAGED_TTL_MS_MAX = 7 * 24 * 3_600_000
"""The longest time to live of staged rows, in milliseconds (a week). Rows that were not published by then were
forgotten, and only take up disk space."""

NAME_BYTES_MAX = 255
"""The most bytes of the name of a table, queue, group, member or producer."""

KEY_GROUPS_DEFAULT = 4096
"""The number of key groups unless the spec sets another. It bounds the number of reducers that a processor can ever
have; with 16 groups to a reducer (256 of them) the largest range is at most 7 % over the average. It is a power of two,
so that the remainder of a division is a mask."""
