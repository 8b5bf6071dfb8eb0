"""An appender whose store is killed with ``kill -9`` again and again: every row that it was given is there once."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa

from shuffle.statestore import StateClient
from tests.daemons import StoreProcess, wait_until

NUMBERS = pa.schema([("n", pa.int64())])
KILLS = 3


def test_appender_goes_on_when_the_store_is_killed(tmp_path: Path) -> None:
    store = StoreProcess(tmp_path / "store")
    try:
        with StateClient.connect(store.address) as state:
            queue = state.create_queue("numbers", NUMBERS, partitions=1)
            stop = threading.Event()
            futures = []

            def append() -> None:
                with queue.appender(0) as appender:
                    while not stop.wait(0.001):
                        futures.append(appender.append(pa.record_batch({"n": [len(futures)]}, schema=NUMBERS)))

            thread = threading.Thread(target=append)
            thread.start()
            for _ in range(KILLS):
                seen = len(futures)
                wait_until(lambda seen=seen: len(futures) >= seen + 100)
                store.kill()
                store = StoreProcess(tmp_path / "store", listen=store.listen)
            stop.set()
            thread.join(60)
            rows, end = queue.read(0, 0)
            assert rows["n"].to_pylist() == list(range(len(futures)))
            assert [future.result(timeout=0) for future in futures] == [(n, n + 1) for n in range(end)]
            assert end > KILLS * 100
    finally:
        store.kill()
