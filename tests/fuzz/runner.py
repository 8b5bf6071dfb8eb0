"""Runs inputs: those that need daemons one after the other in this thread, the others in a thread for each child."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shuffle.errors import ShuffleError
from tests.fuzz.children import ChildTarget
from tests.fuzz.findings import Finding, Outcome, Problem, Report, text_of
from tests.fuzz.mutate import chance_for
from tests.fuzz.oracles import GROWTH_FILES_MAX, Usage, file_count, growth_problems, usage_of
from tests.fuzz.plan import ONLINE, target_of
from tests.fuzz.targets.base import Target
from tests.fuzz.targets.control import ControlTarget
from tests.fuzz.targets.flight import FlightTarget
from tests.fuzz.targets.getrows import GetRowsTarget
from tests.fuzz.targets.lane import LaneTarget
from tests.fuzz.targets.metrics import MetricsTarget
from tests.fuzz.world import World, opened

CHECK_EVERY = 250
CHECK_S = 3.0
"""All is looked at after so many inputs and so much time; and at once after an answer that is suspicious."""

CLEAN_EVERY = 5000
"""What fuzzed messages wrote is removed after so many inputs."""

WARM_UP = 300
"""Inputs before memory, threads and files are counted for the first time."""

NARROWED_MAX = 12
"""So often a range of inputs is run again, one by one, to find the one that did it."""

FINDINGS_MAX = 60
"""After so many different findings a run ends: it has failed, and every one costs seconds."""

RESTARTS_MAX = 80
PROGRESS_S = 5.0
SETTLE_S = 25.0
"""Until sessions have expired, staged rows were removed, and servers have noticed that their clients are gone."""

JOB_S_MAX = 90.0

_ONLINE: dict[str, Callable[[World], Target]] = {
    "lane": LaneTarget,
    "flight": FlightTarget,
    "grpc": ControlTarget,
    "getrows": GetRowsTarget,
    "metrics": MetricsTarget,
}


class Runner:
    """One run. ``report`` has the results at any time."""

    def __init__(self, seed: int, folder: Path, say: Callable[[str], None]) -> None:
        self.report = Report(seed)
        self._seed = seed
        self._folder = folder
        self._say = say
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._narrowed = 0
        self._begun_s = time.monotonic()
        self._failed: list[str] = []

    # --- all of it ---

    def run(self, numbers: list[int], with_job: bool = True) -> Report:
        by_target: dict[str, list[int]] = {}
        for number in numbers:
            by_target.setdefault(target_of(number), []).append(number)
        threads = [
            threading.Thread(target=self._offline, args=(name, wanted), name=f"fuzz-{name}", daemon=True)
            for name, wanted in by_target.items()
            if name not in ONLINE
        ]
        threads.append(threading.Thread(target=self._progress, args=(len(numbers),), daemon=True))
        for thread in threads:
            thread.start()
        online = [number for number in numbers if target_of(number) in ONLINE]
        if online:
            with_victim = any(target_of(number) in ("getrows", "metrics") for number in online)
            with opened(self._folder, with_job, with_victim) as world:
                self._online(world, online, with_job)
        for thread in threads[:-1]:
            thread.join()
        self._stop.set()
        threads[-1].join()
        if self._failed:
            raise RuntimeError("; ".join(self._failed))
        self.report.notes["seconds"] = round(time.monotonic() - self._begun_s, 1)
        return self.report

    def _progress(self, count: int) -> None:
        while not self._stop.wait(PROGRESS_S):
            self._say(self._line(count))

    def _line(self, count: int) -> str:
        with self._lock:
            done = {name: tally.inputs for name, tally in self.report.tallies.items()}
            found = len(self.report.repeated)
        passed_s = time.monotonic() - self._begun_s
        told = " ".join(f"{name}:{n}" for name, n in sorted(done.items()))
        return f"{passed_s:6.0f} s  {sum(done.values())} of {count} inputs, {found} kinds of findings  {told}"

    # --- in children ---

    def _offline(self, name: str, numbers: list[int]) -> None:
        target = ChildTarget(name, self._seed, self._folder)
        try:
            for number in numbers:
                self._add(name, number, target.run(number, random.Random()))
                if self._too_many():
                    return
        except Exception as error:
            self._failed.append(f"{name}: {error!r}")
        finally:
            target.close()

    def _add(self, name: str, number: int, outcome: Outcome) -> None:
        with self._lock:
            new = self.report.add(name, number, outcome)
        for found in new:
            self._say(text_of(found, self._seed))

    def _found(self, found: Finding) -> None:
        with self._lock:
            new = self.report.add_finding(found)
        if new:
            self._say(text_of(found, self._seed))

    def _too_many(self) -> bool:
        return len(self.report.repeated) > FINDINGS_MAX

    # --- against daemons ---

    def _online(self, world: World, numbers: list[int], with_job: bool) -> None:
        targets = {name: make(world) for name, make in _ONLINE.items()}
        unchecked: list[int] = []
        checked_s = time.monotonic()
        usages: dict[str, Usage] = {}
        files = 0
        for done, number in enumerate(numbers):
            if done == min(WARM_UP, len(numbers) // 2):
                usages, files = _usages(world), file_count(world.folder / "store")
            outcome = self._one(targets, number)
            unchecked.append(number)
            due = len(unchecked) >= CHECK_EVERY or time.monotonic() - checked_s > CHECK_S
            if outcome.suspicious or due or world.deaths():
                self._look(world, targets, unchecked, outcome)
                unchecked, checked_s = [], time.monotonic()
            if done % CLEAN_EVERY == CLEAN_EVERY - 1:
                self._clean(world, number)
            if self._too_many() or world.restarts > RESTARTS_MAX:
                self.report.notes["stopped"] = f"after {done + 1} inputs: too many findings to go on"
                break
        self._look(world, targets, unchecked or numbers[-1:], None)
        for target in targets.values():
            target.close()
        self._end(world, numbers, usages, files, with_job)

    def _one(self, targets: dict[str, Target], number: int) -> Outcome:
        name = target_of(number)
        outcome = targets[name].run(number, chance_for(self._seed, name, number))
        self._add(name, number, outcome)
        return outcome

    def _look(self, world: World, targets: dict[str, Target], unchecked: list[int], last: Outcome | None) -> None:
        """Look at everything; if something is wrong, find out which input did it, and go on."""
        problems = world.check()
        if not problems:
            return
        suspect = unchecked[-1]
        shown = last.shown if last is not None else ""
        world.repair()
        first = unchecked[0]
        if first != suspect and self._narrowed < NARROWED_MAX:
            self._narrowed += 1
            # The last one first: it was suspicious. But some damage is only noticed by those who come after it.
            again = [suspect, *unchecked[:-1]]
            first, suspect, shown, problems = self._narrow(world, targets, again, problems)
        for problem in problems:
            self._found(Finding(target_of(suspect), first, suspect, problem.kind, problem.what, shown))

    def _narrow(
        self, world: World, targets: dict[str, Target], numbers: list[int], problems: list[Problem]
    ) -> tuple[int, int, str, list[Problem]]:
        """Run the inputs again one by one, looking at everything after each."""
        for number in numbers:
            name = target_of(number)
            outcome = targets[name].run(number, chance_for(self._seed, name, number))
            again = world.check(metrics=name == "metrics")
            if again:
                world.repair()
                return number, number, outcome.shown, again
        return min(numbers), max(numbers), "one of these, or several together", problems

    def _clean(self, world: World, number: int) -> None:
        for problem in world.durable_problems():
            self._found(
                Finding(target_of(number), max(number - CLEAN_EVERY, 0), number, problem.kind, problem.what, "")
            )
        world.clear_tables()
        world.close_sessions()

    def _end(self, world: World, numbers: list[int], usages: dict[str, Usage], files: int, with_job: bool) -> None:
        """What must be as it was when all clients have left."""
        first, last = numbers[0], numbers[-1]
        try:
            self._clean(world, last)
        except ShuffleError as error:
            self._found(Finding("store", first, last, "hang", f"at the end: {error}", ""))
            return
        if with_job:
            wrong = world.job.finish(world.client, JOB_S_MAX)
            self.report.notes["job_rows"] = world.job.rows()
            if wrong is not None:
                self._found(Finding("job", first, last, "wrong", wrong, ""))
        grown = self._grown(world, usages, files)
        deadline_s = time.monotonic() + SETTLE_S
        while grown and time.monotonic() < deadline_s:
            time.sleep(0.25)
            grown = self._grown(world, usages, files)
        for problem in grown:
            self._found(Finding("world", first, last, problem.kind, problem.what, ""))
        self.report.notes["restarts"] = world.restarts
        after = _usages(world)
        self.report.notes["usage"] = {
            name: [_numbers(before), _numbers(after.get(name))] for name, before in usages.items()
        }

    @staticmethod
    def _grown(world: World, usages: dict[str, Usage], files: int) -> list[Problem]:
        if world.restarts:
            return []  # Other processes than those that were counted at the beginning.
        found = []
        for name, after in _usages(world).items():
            if name in usages:
                found += growth_problems(name, usages[name], after)
        more = file_count(world.folder / "store") - files
        if more > GROWTH_FILES_MAX:
            found.append(Problem("growth", f"the store's folder has {more} more files than at the beginning"))
        return found


def _usages(world: World) -> dict[str, Usage]:
    """Of each process; of the store without the memtables and the cache of RocksDB, which have bounds of their own."""
    found = {name: usage for name, pid in world.pids().items() if (usage := usage_of(pid)) is not None}
    if "store" in found:
        total = world.client.stats()["total"]
        held_bytes = total["memtable_bytes"] + total["cache_bytes"]
        found["store"] = replace(found["store"], resident_bytes=found["store"].resident_bytes - held_bytes)
    return found


def _numbers(usage: Usage | None) -> list[int]:
    return [] if usage is None else [usage.resident_bytes, usage.threads, usage.descriptors]
