"""``python -m shuffle.reducer.exporter SPEC``: carries what reducers emit to an output outside of the state store."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Sequence

from shuffle.support.process_memory import keep_freed, keep_small

SPARE_BYTES = 64 << 20
"""The bytes of freed memory that the process keeps: as much as one batch may have, by default."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    keep_freed(SPARE_BYTES)
    keep_small()

    from shuffle.errors import ShuffleError
    from shuffle.reducer.exporter.chosen import Chosen
    from shuffle.reducer.exporter.daemon import run
    from shuffle.reducer.exporter.repair import set_position
    from shuffle.spec.config import load_spec
    from shuffle.spec.index_sets import parse_indexes
    from shuffle.support.exit_codes import report
    from shuffle.support.logs import setup_logging

    try:
        indexes = None if options.index is None else parse_indexes(options.index, "exporter")
        chosen = Chosen(indexes, options.dead_letters)
        spec = load_spec(options.spec)
        if options.position is not None:
            print(set_position(spec, chosen, options.position))
            return 0
    except ShuffleError as error:
        return report(error)
    setup_logging("exporter", spec.processor, indexes[0] if indexes and len(indexes) == 1 else None)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return run(spec, chosen, draining=options.draining, stop=stop)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shuffle exporter", description="Carry what reducers emit to an output outside of the state store."
    )
    parser.add_argument("spec", metavar="SPEC", help="the processor's spec, a YAML file")
    parser.add_argument(
        "--index",
        metavar="I",
        help="which partitions of the outbox, one for each reducer, counted from 0: 0,2,5 or 0-3 (default: all, and "
        "the dead letters)",
    )
    parser.add_argument(
        "--dead-letters",
        choices=("mapper", "reducer", "all"),
        help="not the outbox but the rows that this role has set aside; --index then counts partitions of their queue",
    )
    parser.add_argument(
        "--draining", action="store_true", help="publish small batches, too, so that the outbox is soon empty"
    )
    parser.add_argument(
        "--position",
        type=int,
        metavar="N",
        help="do not export: note that all rows before N are outside and none from N on, after a position was lost",
    )
    return parser


if __name__ == "__main__":
    from shuffle.support.vital_threads import leave

    leave(main())
