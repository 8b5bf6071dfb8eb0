"""``examples/kafka_orders``: orders from a topic to totals in another one, and on to a folder of Parquet files."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from shuffle.examples import kafka_orders
from shuffle.statestore import StateClient
from tests.kafka.processors import as_json, shuffle
from tests.kafka.topics import Topics
from tools.kafka import Broker

pytestmark = pytest.mark.long  # Minutes; `make test-kafka` runs them.

EXAMPLES = Path(kafka_orders.__file__).parent
COUNTRIES = {"ann": "de", "bob": "fr", "cid": "de"}


def test_orders_are_counted_enriched_published_and_archived(
    broker: Broker, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA", broker.address)
    orders, totals = topics.create("orders", partitions=2), topics.create("totals")
    chance = random.Random(7)
    rows = [
        {"customer": chance.choice([*COUNTRIES, "dan", None]), "cents": chance.randrange(10_000)} for _ in range(4_000)
    ]
    for partition in range(2):
        topics.write(orders, as_json(rows[partition::2]), partition)
    specs = [shutil.copy(EXAMPLES / name, tmp_path) for name in ("kafka_orders.yaml", "kafka_orders_archive.yaml")]
    with StateClient.open(tmp_path / "orders.state") as client:
        kafka_orders.remember_customers(client, COUNTRIES)
    for spec in specs:
        done = shuffle("run", str(spec), "--until-drained")
        assert done.returncode == 0, done.stderr
    kept = [row for row in rows if row["customer"] is not None]
    expected = {
        name: {
            "orders": Counter(row["customer"] for row in kept)[name],
            "cents": sum(row["cents"] for row in kept if row["customer"] == name),
            "country": COUNTRIES.get(name),
        }
        for name in [*COUNTRIES, "dan"]
    }
    published = [json.loads(message.value()) for message in topics.read(totals)]
    last = {row.pop("customer"): row for row in published}
    assert last == expected, "the newest total of each customer"
    keys = ds.partitioning(pa.schema([("country", pa.string())]), flavor="hive")
    archived = ds.dataset(tmp_path / "archive", partitioning=keys).to_table().to_pylist()
    assert len(archived) == len(published)
    most = {row["customer"]: row for row in sorted(archived, key=lambda row: row["orders"])}
    assert {name: {key: row[key] for key in ("orders", "cents", "country")} for name, row in most.items()} == expected
