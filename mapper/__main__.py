"""``python -m mapper SPEC --index I``: run one mapper of a streaming processor, or several in one process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shuffle.support.process_memory import keep_freed, keep_small, share_freed

SPARE_BYTES_MAX = 64 << 20
"""The most bytes of freed memory that the process keeps for its next batches, unless half of the memory limit is less.
It is enough for a few batches, read and partitioned."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    share_freed()
    keep_small()

    from shuffle.errors import ShuffleError
    from shuffle.mapper.daemon import run
    from shuffle.spec.config import load_spec
    from shuffle.spec.index_sets import parse_indexes
    from shuffle.support.exit_codes import report

    try:
        indexes = parse_indexes(options.index)
        spec = load_spec(options.spec)
    except ShuffleError as error:
        return report(error)
    keep_freed(min(SPARE_BYTES_MAX, spec.mapper.memory_bytes // 2))
    return run(spec, indexes, listen=options.listen, advertise=options.advertise)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shuffle mapper", description="Run mappers of a streaming processor.")
    parser.add_argument("spec", metavar="SPEC", help="the YAML file that describes the processor")
    parser.add_argument(
        "--index", required=True, help="which mapper: the partition of the input, from 0; several as 0,2,5 or 0-3"
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="where to serve reducers (default: as the spec says)")
    parser.add_argument(
        "--advertise",
        metavar="HOST[:PORT]",
        help="where reducers reach this mapper, if that is not where it listens (default: as the spec says)",
    )
    return parser


if __name__ == "__main__":
    from shuffle.support.vital_threads import leave

    leave(main())
