"""What several unit tests start from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine_store import Store


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[Store | None], Store]]:
    stores: list[Store] = []

    def open_again(store: Store | None = None) -> Store:
        stores.append(Store(tmp_path) if store is None else store.reopened())
        return stores[-1]

    yield open_again
    if stores:
        stores[-1].close()
