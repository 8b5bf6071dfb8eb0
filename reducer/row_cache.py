"""What a reducer knows of its tables without asking: the rows that its acknowledged commits have read or written.

A reducer's keys are its own, so what it wrote last is what is there, and a lookup of a few keys need not travel. It is
not taken on trust: whatever a transaction was told from memory, it names as what the store must hold when it commits
(``Transaction.expect``). Should somebody else have written there, the commit is a conflict like any other, everything
known is forgotten, and the rows are reduced again with what the store says.

Large lookups go to the store as ever: for them the way there is not what takes the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shuffle.limits import MIB
from shuffle.statestore import StateClient, Transaction
from shuffle.statestore.codec.arrow_bytes import Binary, arrayed, listed
from shuffle.statestore.codec.sorted_table import Table
from shuffle.statestore.request import Committed, Expect
from shuffle.statestore.store import Store

KEYS_MAX = 512
"""Keys of a lookup that is answered from memory, and of a write that is remembered."""

KNOWN_BYTES_MAX = 16 * MIB
"""Of all keys and values known; the longest known go first."""

ROW_BYTES = 200
"""What a row costs besides its key and value."""


class KnownRows:
    """Encoded keys and values of any tables; a value of None says that there is no such row."""

    def __init__(self, bytes_max: int = KNOWN_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._rows: dict[bytes, bytes | None] = {}
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def among(self, keys: Iterable[bytes]) -> dict[bytes, bytes | None]:
        """The rows that are known, of these keys."""
        rows = self._rows
        return {key: rows[key] for key in keys if key in rows}

    def learn(self, rows: Mapping[bytes, bytes | None]) -> None:
        """A commit was acknowledged that has read or written these."""
        for key, value in rows.items():
            if key in self._rows:
                self._size_bytes -= _size_of(key, self._rows.pop(key))
            self._rows[key] = value
            self._size_bytes += _size_of(key, value)
        while self._size_bytes > self._bytes_max:
            oldest = next(iter(self._rows))
            self._size_bytes -= _size_of(oldest, self._rows.pop(oldest))

    def forget(self) -> bool:
        """After anything but an acknowledged commit; whether there was something to forget."""
        had_some = bool(self._rows)
        self._rows, self._size_bytes = {}, 0
        return had_some


def _size_of(key: bytes, value: bytes | None) -> int:
    return len(key) + len(value or b"") + ROW_BYTES


class KnowingClient(StateClient):
    """A client whose transactions use what is known. It shares the store of ``client``, which is the one to close."""

    def __init__(self, client: StateClient, known: KnownRows) -> None:
        super().__init__(client.store)
        self._known = known

    def transaction(self) -> Transaction:
        return KnowingTransaction(self, self.store, self._known)


class KnowingTransaction(Transaction):
    def __init__(self, client: StateClient, store: Store, known: KnownRows) -> None:
        super().__init__(client, store)
        self._known = known
        self._seen: dict[bytes, bytes | None] = {}
        """What this transaction was told of the store, from there or from memory."""

    def _get(self, table: Table, keys: Binary) -> Binary:
        """The values of ``keys``, the missing ones null:

        1. those that this transaction has seen before, as it saw them;
        2. those that are known, which become something the commit expects;
        3. the others from the store, which become something the commit has read;
        4. over all of them, what this transaction wrote itself.
        """
        if not 0 < len(keys) <= KEYS_MAX:
            return super()._get(table, keys)
        self._check_open()
        wanted: list[bytes] = listed(keys)
        as_given = listed if isinstance(keys, list) else arrayed
        unseen = [key for key in wanted if key not in self._seen]  # 1
        known = self._known.among(unseen)  # 2
        if known:
            self._seen.update(known)
            names, values = as_given(list(known)), as_given(list(known.values()))
            self._expect(Expect(table.table_id, names, values), table.schema.name)
        asked = [key for key in unseen if key not in known]  # 3
        if asked:
            found = self._get_stored(table, as_given(asked))
            self._seen.update(zip(asked, listed(found), strict=True))
        own = self._own_writes(table.table_id)  # 4
        return as_given([own[key] if key in own else self._seen[key] for key in wanted])

    def commit(self) -> Committed:
        try:
            answer = super().commit()
        except BaseException:
            self._known.forget()
            raise
        if any(len(write.keys) > KEYS_MAX for write in self._request.writes):
            # What is known of the others may be true still, but such a reducer does not live by it.
            self._known.forget()
            return answer
        for write in self._request.writes:
            self._seen.update(zip(listed(write.keys), listed(write.values), strict=True))
        self._known.learn(self._seen)
        return answer
