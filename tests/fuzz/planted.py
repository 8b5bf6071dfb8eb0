"""A target with planted bugs of every type: a fuzzer that does not find these would not find real ones."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.findings import Outcome, Problem
from tests.fuzz.oracles import answer_problems

KINDS = ("fine", "crash", "hang", "traceback", "wrong", "untyped")


class PlantedTarget:
    """What it does follows from the number of the input."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._note = note

    def run(self, number: int, chance: random.Random) -> Outcome:
        kind = KINDS[number % len(KINDS)]
        shown = f"the planted {kind}, {chance.random():.6f}"
        self._note(shown)
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "hang":
            time.sleep(60)
        if kind == "traceback":
            return Outcome(
                "accepted", answer_problems(b'oh: Traceback (most recent call last):\n  File "x"'), shown=shown
            )
        if kind == "fine":
            return Outcome("accepted", shown=shown)
        return Outcome("accepted", [Problem(kind, "planted")], shown=shown)

    def close(self) -> None:
        pass
