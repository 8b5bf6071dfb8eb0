"""The parent's side of ``child``: many inputs for each child, a deadline for each input, a new child after a death."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.daemons import environment
from tests.fuzz.child import NOW
from tests.fuzz.findings import Outcome, Problem

INPUT_S_MAX = 20.0
"""Of one input. The slowest honest one opens a store and takes a tenth of a second on an idle machine."""

START_S_MAX = 60.0

PLACES = {
    "shared_memory": "tests.fuzz.targets.shared_memory:SharedMemoryTarget",
    "segments": "tests.fuzz.targets.folders:SegmentsTarget",
    "logs": "tests.fuzz.targets.folders:LogsTarget",
    "specs": "tests.fuzz.targets.specs:SpecsTarget",
}
"""The targets that run in a child, and their classes."""


class ChildTarget:
    """A target in a process of its own."""

    def __init__(self, name: str, seed: int, folder: Path, place: str | None = None) -> None:
        self._name, self._seed = name, seed
        self._folder = folder
        self._place = place or PLACES[name]
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""

    def run(self, number: int, chance: random.Random) -> Outcome:
        """``chance`` is not used: the child makes its own of the same seed."""
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(b"%d\n" % number)
            process.stdin.flush()
            line = self._line(INPUT_S_MAX)
        except BrokenPipeError:
            line = None
        if line is None:
            return self._died()
        if not line:
            shown = self._now()
            self.close()
            return Outcome("silent", [Problem("hang", f"no answer within {INPUT_S_MAX:g} s")], shown=shown)
        told = json.loads(line)
        return Outcome(**{**told, "problems": [Problem(**problem) for problem in told["problems"]]})

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        self._received = b""
        self._own = Path(tempfile.mkdtemp(prefix=f"{self._name}-", dir=self._folder))
        self._errors = (self._own / "stderr").open("w+b")
        arguments = [self._name, str(self._seed), str(self._own), self._place]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.child", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(),
        )
        if self._line(START_S_MAX) != b"ready":
            told = self._told()
            self.close()
            raise RuntimeError(f"the child for {self._name} did not start: {told}")
        return self._process

    def _line(self, wait_s: float) -> bytes | None:
        """The next line; empty when it takes too long, None when the child is gone."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline_s = time.monotonic() + wait_s
        while b"\n" not in self._received:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
                return b""
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                return None
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _told(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-400:].decode("utf-8", "replace").strip()

    def _died(self) -> Outcome:
        assert self._process is not None
        code = self._process.wait(INPUT_S_MAX)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        told = self._told().splitlines()[-1:] or [""]
        shown = self._now()
        self.close()
        return Outcome("died", [Problem("crash", f"{how}: {told[0]}")], shown=shown)

    def _now(self) -> str:
        """What the child was about to do."""
        return (self._own / NOW).read_text(errors="replace")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait(INPUT_S_MAX)
        for pipe in (process.stdin, process.stdout, self._errors):
            if pipe is not None:
                pipe.close()
