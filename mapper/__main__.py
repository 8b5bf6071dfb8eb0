"""``python -m mapper SPEC --index I``: run one mapper of a streaming processor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shuffle.footprint import keep_freed, keep_small

SPARE_BYTES = 64 << 20
"""A few batches, read and partitioned."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shuffle mapper", description="Run one mapper of a streaming processor.")
    parser.add_argument("spec", metavar="SPEC", help="the YAML file that describes the processor")
    parser.add_argument("--index", type=int, required=True, help="which mapper: the partition of the input, from 0")
    parser.add_argument("--listen", metavar="HOST:PORT", help="where to serve reducers (default: as the spec says)")
    options = parser.parse_args(arguments)
    keep_freed(SPARE_BYTES)
    keep_small()

    from mapper.daemon import run
    from shuffle.cli import report
    from shuffle.config import load_spec
    from shuffle.errors import ShuffleError

    try:
        spec = load_spec(options.spec)
    except ShuffleError as error:
        return report(error)
    return run(spec, options.index, listen=options.listen)


if __name__ == "__main__":
    sys.exit(main())
