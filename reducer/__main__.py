"""``python -m reducer SPEC --index I``: one reducer of a streaming processor, or several in one process."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Sequence

from shuffle.support.process_memory import keep_freed, keep_small, share_freed

SPARE_BYTES = 64 << 20
"""The bytes of freed memory that the process keeps: as much as one batch for ``reduce`` may have, by default."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    share_freed()
    keep_freed(SPARE_BYTES)
    keep_small()

    from shuffle.errors import ShuffleError
    from shuffle.reducer.daemon import run
    from shuffle.spec.config import load_spec
    from shuffle.spec.index_sets import parse_indexes
    from shuffle.support.exit_codes import report
    from shuffle.support.logs import setup_logging

    try:
        indexes = parse_indexes(options.index, "reducer")
        spec = load_spec(options.spec)
    except ShuffleError as error:
        return report(error)
    setup_logging("reducer", spec.processor, indexes[0] if len(indexes) == 1 else None)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return run(spec, indexes, stop=stop)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shuffle reducer", description="Run reducers of a streaming processor.")
    parser.add_argument("spec", metavar="SPEC", help="the processor's spec, a YAML file")
    parser.add_argument(
        "--index", required=True, metavar="I", help="which reducer, counted from 0; several as 0,2,5 or 0-3"
    )
    return parser


if __name__ == "__main__":
    from shuffle.support.vital_threads import leave

    leave(main())
