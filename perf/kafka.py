"""Kafka in and out: how fast are topics read, how does a count compare with Spark's, how late are rows in a topic?

Each is a part of its own, with a real broker (``tools/kafka.py``) on this machine; ``--parts`` chooses.

- *readers* (``perf.parts.kafka_readers``): records into Arrow columns beside a bare loop of the client.
  ``reader_ratio`` and ``raw_ratio`` are rows a second over the bare loop; ``plain_…`` those without the fast path;
- *count* (``perf.parts.kafka_count``): from a topic to a table, beside Spark's own source for Kafka.
  ``count_vs_spark`` is rows a second over Spark's, ``written_per_byte`` what is written here for a byte that is read;
- *latency* (``perf.parts.kafka_latency``): from a topic to a topic, exactly once. ``p99_ms`` is from the producer's
  delivery report to the receipt by a ``read_committed`` consumer.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perf.common import report
from perf.parts import kafka_count, kafka_latency, kafka_readers
from perf.yardsticks.compare_peer import PeerFailed
from shuffle.errors import ShuffleError
from tools.kafka import Broker, NoBroker

READERS, COUNT, LATENCY = "readers", "count", "latency"
PARTS = (READERS, COUNT, LATENCY)
LIMITS = {**kafka_readers.LIMITS, **kafka_count.LIMITS, **kafka_latency.LIMITS}
Found = tuple[dict[str, float], dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    bars: dict[str, float] = {}
    details: dict[str, Any] = {}
    for name in args.parts:
        try:
            bars_of_part, details[name] = measured(name, args)
        except (NoBroker, PeerFailed) as error:
            raise ShuffleError(str(error)) from None
        bars |= bars_of_part
    report.publish("Kafka", bars, details, args.json, LIMITS)
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = report.parser("kafka", "How fast are topics read, counted and written?")
    parser.add_argument("--parts", type=chosen, default=PARTS, help=f"which of {','.join(PARTS)} (default: all)")
    parser.add_argument("--records", type=int, default=1_000_000, help="of the readers (default a million)")
    parser.add_argument("--repeats", type=int, default=5, help="how often each reader is measured (default 5)")
    parser.add_argument("--count-records", type=int, default=4_000_000, help="of the count (default 4 million)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each count is measured (default 3)")
    parser.add_argument("--rows-per-s", type=int, default=1_000, help="of the latency (default 1,000)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the latency (default 20)")
    return parser


def chosen(text: str) -> tuple[str, ...]:
    """The parts that are named, in the order in which they are run."""
    names = text.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return tuple(name for name in PARTS if name in names)


def measured(part: str, args: argparse.Namespace) -> Found:
    """One part, with a broker of its own: what another part has left there does not burden it."""
    ways: dict[str, Callable[[Broker, Path], Found]] = {
        READERS: lambda broker, _: kafka_readers.measure(broker.address, args.records, args.repeats),
        COUNT: lambda broker, folder: kafka_count.measure(broker, folder, args.count_records, args.rounds),
        LATENCY: lambda broker, folder: kafka_latency.measure(broker.address, folder, args.rows_per_s, args.seconds),
    }
    with tempfile.TemporaryDirectory(prefix="perf-kafka-") as made:
        folder = Path(made)
        with Broker(folder / "broker", memory="512m") as broker:
            return ways[part](broker, folder)


if __name__ == "__main__":
    raise SystemExit(report.run_and_report_errors(main))
