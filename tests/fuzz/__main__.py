"""``python -m tests.fuzz``: many inputs, or some of them again."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.fuzz.findings import Report, text_of
from tests.fuzz.plan import TARGETS, numbers, target_of
from tests.fuzz.runner import Runner


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Hostile and broken inputs, at every port.")
    made.add_argument("--inputs", type=int, default=2000, help="how many inputs (default %(default)s)")
    made.add_argument("--seed", type=int, help="which inputs they are; without it a new one is taken, and printed")
    made.add_argument("--input", metavar="N", help="this input only, or N-M: these")
    made.add_argument("--targets", default=",".join(TARGETS), help=f"some of {','.join(TARGETS)}; default: all")
    made.add_argument(
        "--no-job", action="store_true", help="without the job that runs meanwhile: it takes seconds to start"
    )
    made.add_argument("--json", metavar="FILE", help="write everything there, too")
    made.add_argument("--keep", action="store_true", help="leave the folder with the store and the logs")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    targets = tuple(options.targets.split(","))
    unknown = set(targets) - set(TARGETS)
    if unknown:
        parser().error(f"unknown targets {sorted(unknown)}; there are {', '.join(TARGETS)}")
    wanted = _wanted(options, targets)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the processes of the world end, too.
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    print(f"seed {seed}, {len(wanted)} inputs, in {folder}", flush=True)
    try:
        runner = Runner(seed, folder, lambda line: print(line, flush=True))
        report = runner.run(wanted, with_job=not (options.no_job or options.input))
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return _told(report, options)


def _wanted(options: argparse.Namespace, targets: tuple[str, ...]) -> list[int]:
    if options.input is None:
        return list(numbers(options.inputs, targets))
    first, _, last = options.input.partition("-")
    some = range(int(first), int(last or first) + 1)
    return [number for number in some if target_of(number) in targets]


def _told(report: Report, options: argparse.Namespace) -> int:
    print(f"\nseed {report.seed}, {report.notes}\n")
    print(report.table())
    if options.json:
        Path(options.json).write_text(json.dumps(report.to_json(), indent=1))
    if not report.findings:
        print("\nno findings")
        return 0
    print(f"\n{len(report.repeated)} kinds of findings:")
    for found in report.findings:
        print(f"{text_of(found, report.seed)}\n    times: {report.repeated[found.signature]}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
