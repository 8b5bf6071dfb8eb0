"""``python -m tests.sim``: many seeds, one seed, or the planted bugs."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sim import (
    coverage,
    exporting,
    grouping,
    growth,
    hosting,
    logged,
    mutants,
    product,
    profiles,
    shrink,
    stragglers,
    twins,
)
from tests.sim.simulation import Result, Simulation
from tests.sim.switching import HAS_GREENLET

KEPT = Path(__file__).parent / "kept_seeds.txt"
CHUNK = 20
PROGRESS_S = 60.0
TWICE_EVERY = 25
"""One seed in so many is run a second time, and must leave the same trace."""
HASHED = 3
"""So many seeds are run under another PYTHONHASHSEED, too."""
FAILURES_SHOWN_MAX = 5
FAILURES_SHRUNK_MAX = 1
"""Shrinking takes a hundred runs; the other seeds can be given by ``--seed`` one by one."""
MARKS_OF = {
    None: coverage.EXPECTED,
    profiles.EXPORTER: exporting.MARKS,
    profiles.GROWTH: growth.MARKS,
    profiles.HOSTING: hosting.MARKS,
    profiles.LOGGED: logged.MARKS,
    profiles.PARTITIONS: grouping.MARKS,
    profiles.STRAGGLERS: stragglers.MARKS,
    profiles.TWINS: twins.MARKS,
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.sim", description="The processor in a simulated world.")
    made.add_argument("--seeds", type=int, default=200, help="how many seeds (default 200)")
    made.add_argument("--first", type=int, default=0, help="the first of them")
    made.add_argument("--seed", type=int, help="one seed only, told in detail")
    made.add_argument("--faults", help="of that seed's faults, only these numbers: 3,7,12; none: -; or a profile")
    made.add_argument("--profile", choices=profiles.NAMES, help="what kind of runs; the same as --faults NAME")
    made.add_argument("--trace", action="store_true", help="print the trace of that seed")
    made.add_argument("--mutant", help="plant this bug")
    made.add_argument("--mutants", action="store_true", help="plant every bug in turn and count the seeds it takes")
    made.add_argument("--kept", action="store_true", help="run the seeds of kept_seeds.txt")
    made.add_argument("--kept-too", action="store_true", help="run them first, and then the others")
    made.add_argument("--seconds", type=float, help="stop beginning new seeds after this time")
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    made.add_argument("--json", help="write the figures to this file")
    made.add_argument("--hashes", action="store_true", help="print seed and hash only")
    return made


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.faults in profiles.NAMES:
        options.faults, options.profile = None, options.faults
    if options.profile is not None:
        profiles.use(options.profile)
    if options.mutants:
        return mutants.main(options)
    if options.hashes:
        for seed in range(options.first, options.first + options.seeds):
            print(seed, run_seed((seed, None)).trace_hash)
        return 0
    if options.seed is not None:
        return one(options)
    return many(options)


def run_seed(task: tuple[int, str | None]) -> Result:
    seed, mutant = task
    gc.disable()  # Objects that wait for the collector would be released at times that no seed decides.
    simulation = Simulation(seed)
    if mutant is None:
        return simulation.run()
    with mutants.planted(mutant):
        return simulation.run()


def run_chunk(task: tuple[list[int], str | None]) -> tuple[list[tuple[Result, bool]], float]:
    """Some seeds, for each whether a second run left the same trace, and the processor time of all."""
    seeds, mutant = task
    begin_s = time.process_time()
    results = []
    for seed in seeds:
        result = run_seed((seed, mutant))
        same = seed % TWICE_EVERY != 0 or run_seed((seed, mutant)).trace_hash == result.trace_hash
        results.append((result, same))
    gc.collect()
    return results, time.process_time() - begin_s


def one(options: argparse.Namespace) -> int:
    simulation = Simulation(options.seed, keep_lines=options.trace)
    if options.faults is not None:
        wanted = set() if options.faults == "-" else {int(number) for number in options.faults.split(",")}
        simulation.faults = [fault for fault in simulation.faults if fault.number in wanted]
    for fault in simulation.faults:
        print(f"  {fault}")
    if options.mutant:
        with mutants.planted(options.mutant):
            result = simulation.run()
    else:
        result = simulation.run()
    if options.trace:
        print("\n".join(result.lines))
    print(f"seed {result.seed}: {result.faults} faults, {result.events} events, {result.virtual_us / 1e6:.1f} s of")
    print(f"  virtual time, {result.peace_us / 1e6:.1f} s of them after the faults, trace {result.trace_hash}")
    for violation in result.violations:
        print(f"VIOLATION {violation}")
    return 1 if result.violations else 0


def tasks(options: argparse.Namespace) -> Iterator[tuple[list[int], str | None]]:
    if options.kept:
        seeds = kept_seeds()
    else:
        seeds = list(range(options.first, options.first + options.seeds))
        if options.kept_too:
            seeds = kept_seeds() + seeds
    begin_s = time.monotonic()
    for at in range(0, len(seeds), CHUNK):
        if options.seconds is not None and time.monotonic() - begin_s > options.seconds:
            return
        yield seeds[at : at + CHUNK], options.mutant


def kept_seeds() -> list[int]:
    lines = KEPT.read_text(encoding="utf-8").splitlines()
    return [int(line.split()[0]) for line in lines if line.strip() and not line.startswith("#")]


def spread(jobs: int, function: Any, work: Iterator[Any]) -> Iterator[Any]:
    """The results, as they come; one process more than needed would only share the cores."""
    if jobs <= 1:
        yield from map(function, work)
        return
    # The product must be in the simulated world before anything of it is imported there.
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=product.install) as pool:
        # The pool asks for all of its work at once; a deadline needs it to be asked for bit by bit.
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        waiting = 0
        for item in work:
            pool.apply_async(function, (item,), callback=answers.put, error_callback=answers.put)
            waiting += 1
            while waiting > 2 * jobs:
                yield _answered(answers)
                waiting -= 1
        for _ in range(waiting):
            yield _answered(answers)


def _answered(answers: queue.SimpleQueue[Any]) -> Any:
    answer = answers.get()
    if isinstance(answer, BaseException):
        raise answer
    return answer


@dataclass
class Tally:
    """What a run of many seeds has come to so far."""

    expected: Sequence[str]
    """The marks that must be hit."""
    seeds: int = 0
    rows: int = 0
    events: int = 0
    differing: int = 0
    slowest_us: int = 0
    marks: Counter[str] = field(default_factory=Counter)
    fault_kinds: Counter[str] = field(default_factory=Counter)
    failures: list[Result] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)
    begin_s: float = field(default_factory=time.monotonic)
    cpu_s: float = 0.0
    kept: int = 0

    def add(self, result: Result, same: bool) -> None:
        self.seeds += 1
        self.rows += result.rows
        self.events += result.events
        self.differing += not same
        self.slowest_us = max(self.slowest_us, result.peace_us)
        self.marks.update(result.marks)
        self.fault_kinds.update(result.fault_counts)
        if result.seed < 10:
            self.hashes[result.seed] = result.trace_hash
        if result.violations:
            self.failures.append(result)

    @property
    def faults(self) -> int:
        return sum(self.fault_kinds.values())

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.begin_s

    def missing(self) -> list[str]:
        """Marks that were never reached, where that can be said."""
        return [mark for mark in self.expected if not self.marks[mark]] if self.seeds >= coverage.SEEDS_MIN else []

    def summary(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "faults": self.faults,
            "violations": len(self.failures),
            "failed_seeds": [failure.seed for failure in self.failures],
            "rows": self.rows,
            "events": self.events,
            "wall_s": round(self.wall_s, 1),
            "cpu_s": round(self.cpu_s, 1),
            "slowest_peace_s": self.slowest_us / 1e6,
            "traces_that_differ": self.differing,
            "kept_seeds_run": self.kept,
            "marks_missing": self.missing(),
            "fault_kinds": dict(sorted(self.fault_kinds.items())),
            "marks": dict(sorted(self.marks.items())),
            "greenlet": HAS_GREENLET,
        }

    def told(self) -> str:
        missing = self.missing()
        marked = "all marks hit" if not missing else f"{len(missing)} marks missing"
        return f"{self.seeds} seeds, {self.faults} faults, {len(self.failures)} violations, {marked}"


def many(options: argparse.Namespace) -> int:
    tally = Tally(
        MARKS_OF[options.profile],
        kept=len(kept_seeds()) if options.kept or options.kept_too else 0,
    )
    other = other_hash_seed(options)
    progress_s = tally.begin_s + PROGRESS_S
    for results, cpu_s in spread(options.jobs, run_chunk, tasks(options)):
        tally.cpu_s += cpu_s
        for result, same in results:
            tally.add(result, same)
        if time.monotonic() > progress_s:
            progress_s = time.monotonic() + PROGRESS_S
            print(f"{tally.wall_s:.0f} s: {tally.told()}", file=sys.stderr, flush=True)
            write_figures(options, tally)
    tally.differing += differing_traces(other, tally.hashes)
    write_figures(options, tally)
    tally.failures.sort(key=lambda failure: failure.seed)
    for number, failure in enumerate(tally.failures[:FAILURES_SHOWN_MAX]):
        tell(failure, options, shrunk=number < FAILURES_SHRUNK_MAX)
    print(
        f"{tally.rows} rows, {tally.events} events, {tally.wall_s:.0f} s ({tally.cpu_s:.0f} s of processor time), "
        f"slowest end {tally.slowest_us / 1e6:.1f} s after the faults"
    )
    if tally.differing:
        print(f"{tally.differing} seeds left another trace when run again")
    if tally.missing():
        print(f"never reached: {', '.join(tally.missing())}")
    print(tally.told())
    return 1 if tally.failures or tally.missing() or tally.differing else 0


def write_figures(options: argparse.Namespace, tally: Tally) -> None:
    """Also on the way: a run of hours that is cut short has figures, too."""
    if options.json:
        Path(options.json).write_text(json.dumps(tally.summary(), indent=2))


def other_hash_seed(options: argparse.Namespace) -> subprocess.Popen[str] | None:
    """The first seeds in a process with another PYTHONHASHSEED, beside all the others."""
    if options.kept or options.first or options.seeds < HASHED or options.mutant:
        return None
    profile = ["--profile", options.profile] if options.profile else []
    command = [sys.executable, "-m", "tests.sim", "--hashes", "--seeds", str(HASHED), *profile]
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def differing_traces(other: subprocess.Popen[str] | None, hashes: dict[int, str]) -> int:
    """How many traces of the other process are not the same."""
    if other is None:
        return 0
    answer, _ = other.communicate(timeout=300)
    lines = [line.split() for line in answer.splitlines()]
    same = sum(hashes.get(int(seed)) == trace for seed, trace in lines)
    return HASHED - same


def tell(failure: Result, options: argparse.Namespace, shrunk: bool) -> None:
    print(f"seed {failure.seed} failed:")
    for violation in failure.violations[:3]:
        print(f"  {violation}")
    again = f"python -m tests.sim --seed {failure.seed}" + (f" --mutant {options.mutant}" if options.mutant else "")
    again += f" --profile {options.profile}" if options.profile else ""
    if shrunk:
        shortest = shrink.shrink(failure.seed, options.mutant)
        print(f"  shortest list of faults that still fails ({len(shortest)}):")
        for fault in shortest:
            print(f"    {fault}")
        again += " --faults " + (",".join(str(fault.number) for fault in shortest) or "-")
    print(f"  again with: {again}")
