"""What the tests with a real Kafka broker share: the broker, and topics to write to.

Where the broker's jars cannot be had, all of these tests are left out with the reason; with SHUFFLE_TEST_KAFKA=always,
as `make test-kafka` sets it, they fail instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kafka.topics import Topics
from tools.kafka import Broker, NoBroker, fetched_jars


@pytest.fixture(scope="session", autouse=True)
def _jars() -> None:
    try:
        fetched_jars()
    except NoBroker as error:
        if os.environ.get("SHUFFLE_TEST_KAFKA") == "always":
            pytest.fail(f"no Kafka broker: {error}", pytrace=False)
        pytest.skip(f"left out, since no Kafka broker can be had here: {error}")


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory, _jars: None) -> Iterator[Broker]:
    """One broker for all tests that do it no harm."""
    with Broker(tmp_path_factory.mktemp("broker")) as started:
        yield started


@pytest.fixture
def own_broker(tmp_path: Path, _jars: None) -> Iterator[Broker]:
    """A broker for a test that kills it."""
    with Broker(tmp_path / "broker") as started:
        yield started


@pytest.fixture
def topics(broker: Broker) -> Topics:
    return Topics(broker.address)


@pytest.fixture
def topics_of() -> Callable[[Broker], Topics]:
    return lambda broker: Topics(broker.address)
