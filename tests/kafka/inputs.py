"""Kafka inputs for tests: opened without a spec file, and spec files for whole processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shuffle.mapper.readers.kafka.input import KafkaInput
from shuffle.spec.kafka import input_options
from shuffle.statestore import StateClient

FAST_PATH = True
"""Whether inputs may use the fast path, where a test does not say so; tests of readers are made with both."""

JSON = {"format": "json", "schema": {"n": "int64", "s": "string"}}


def kafka_input(address: str, topics: str | list[str] | None, folder: Path = Path(), **options: Any) -> KafkaInput:
    """An input with its options, as a spec would have them."""
    given: dict[str, Any] = {"properties": {"bootstrap.servers": address}, "fast_path": FAST_PATH, **options}
    if topics is not None:
        given["topics"] = topics
    mistakes: list[str] = []
    made = input_options(given, lambda path, what: mistakes.append(f"{path}: {what}"))
    assert made is not None, mistakes
    client: StateClient | None = None
    opened = KafkaInput({"kafka": made}, client, folder)  # type: ignore[arg-type] # It asks the cluster, not the store.
    opened.processor = "tests"
    return opened


def write_spec(folder: Path, address: str, topics: Any, reducers: int = 2, **changes: Any) -> Path:
    """A spec that counts rows by user and adds their amounts up."""
    spec: dict[str, Any] = {
        "processor": "orders",
        "state": "./orders.state",
        "input": {
            "kafka": {
                "topics": topics,
                "properties": {"bootstrap.servers": address},
                "format": "json",
                "schema": {"user": "string", "n": "int64"},
            }
        },
        "mapper": {"class": "tests.kafka.jobs:ByUser", "trim_period": "200ms"},
        "reducer": {"class": "tests.kafka.jobs:Totals", "count": reducers},
    }
    for section, change in changes.items():
        if section == "kafka":
            spec["input"]["kafka"] |= change
            spec["input"]["kafka"] = {key: value for key, value in spec["input"]["kafka"].items() if value is not None}
        else:
            spec[section] |= change
    path = folder / "orders.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path
