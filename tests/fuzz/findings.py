"""The outcome of an input, what counts as a finding, and the counts of a run."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

SHOWN_CHARACTERS_MAX = 1200
"""Of an input: enough for a message of a few fields, short enough to be read."""

SAME_SHOWN_MAX = 3
"""Findings of one signature that are kept: the others say nothing new, and are counted."""

KINDS = ("crash", "hang", "traceback", "leak", "wrong", "untyped", "growth")
"""crash: a process or one of its threads died. hang: no answer in time. traceback: an answer with the inside of a
program. leak: bytes that nobody sent. wrong: accepted although it is not valid, or rows other than those that were
acknowledged. untyped: an error that is none of ours. growth: memory, threads or files that did not come back."""


@dataclass(slots=True)
class Problem:
    """Something that must not be."""

    kind: str
    what: str

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


@dataclass(slots=True)
class Outcome:
    """What became of one input."""

    result: str
    """``accepted``, ``left`` (the input ends without waiting for an answer), or the code of a typed error."""
    problems: list[Problem] = field(default_factory=list)
    suspicious: bool = False
    """Something may have broken: look at every process before the next input."""
    shown: str = ""
    """The input, for people."""


@dataclass(slots=True)
class Finding:
    target: str
    first: int
    last: int
    """The input, or the range of inputs among which it is."""
    kind: str
    what: str
    shown: str

    @property
    def signature(self) -> tuple[str, str, str]:
        """Findings that differ only in numbers, or far behind in their text, are one."""
        return self.target, self.kind, re.sub(r"0x[0-9a-f]+|-?[0-9]+", "#", self.what)[:70]

    def command(self, seed: int) -> str:
        inputs = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"python -m tests.fuzz --seed {seed} --input {inputs}"


@dataclass(slots=True)
class Tally:
    """Of one target."""

    inputs: int = 0
    results: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)


class Report:
    """Everything a run has found so far."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tallies: dict[str, Tally] = {}
        self.findings: list[Finding] = []
        self.repeated: Counter[tuple[str, str, str]] = Counter()
        self.notes: dict[str, Any] = {}

    def tally(self, target: str) -> Tally:
        return self.tallies.setdefault(target, Tally())

    def add(self, target: str, number: int, outcome: Outcome) -> list[Finding]:
        """Count one input; the findings that are new."""
        tally = self.tally(target)
        tally.inputs += 1
        tally.results[outcome.result] += 1
        new = []
        for problem in outcome.problems:
            found = Finding(target, number, number, problem.kind, problem.what, outcome.shown)
            if self.add_finding(found):
                new.append(found)
        return new

    def add_finding(self, found: Finding) -> bool:
        """Whether it is to be shown."""
        found.shown = found.shown[:SHOWN_CHARACTERS_MAX]
        self.tally(found.target).kinds[found.kind] += 1
        self.repeated[found.signature] += 1
        if self.repeated[found.signature] > SAME_SHOWN_MAX:
            return False
        self.findings.append(found)
        return True

    def table(self) -> str:
        """For each target its inputs, what became of them, and the findings by kind."""
        lines = [f"{'target':<14}{'inputs':>8}{'accepted':>10}{'refused':>9}{'left':>7}  findings and codes"]
        for name, tally in sorted(self.tallies.items()):
            codes = Counter({code: n for code, n in tally.results.items() if code not in ("accepted", "left")})
            found = ", ".join(f"{n} {kind}" for kind, n in tally.kinds.items()) or "none"
            told = " ".join(f"{code}:{n}" for code, n in codes.most_common())
            numbers = tally.results["accepted"], sum(codes.values()), tally.results["left"]
            lines.append(
                f"{name:<14}{tally.inputs:>8}{numbers[0]:>10}{numbers[1]:>9}{numbers[2]:>7}  findings: {found}; {told}"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "targets": {
                name: {"inputs": tally.inputs, "results": dict(tally.results), "findings": dict(tally.kinds)}
                for name, tally in self.tallies.items()
            },
            "findings": [{**asdict(found), "command": found.command(self.seed)} for found in self.findings],
            "repeated": [[*signature, count] for signature, count in self.repeated.most_common()],
            **self.notes,
        }


def text_of(found: Finding, seed: int) -> str:
    """A finding as it is printed."""
    return (
        f"{found.kind.upper()} {found.target}: {found.what}\n    input: {found.shown}\n    again: {found.command(seed)}"
    )
