"""A child process for inputs that need no daemon: reads the numbers of inputs, and responds with the outcome of each.

``python -m tests.fuzz.child TARGET SEED FOLDER``; started by ``children``.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path

from tests.fuzz.mutate import chance_for

ADDRESS_BYTES_MAX = 12 << 30
"""An input that makes a decoder ask for more memory than this meets an error, not the machine's limit."""

NOW = "now"
"""The file in which a child says what it is about to do: after its death it can say nothing."""


def main(target: str, seed: int, folder: Path, place: str) -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever is printed by others is not an answer.
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES_MAX, ADDRESS_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module, _, name = place.partition(":")
    now = os.open(folder / NOW, os.O_RDWR | os.O_CREAT)

    def note(shown: str) -> None:
        os.ftruncate(now, 0)
        os.pwrite(now, shown.encode("utf-8", "replace"), 0)

    made = getattr(importlib.import_module(module), name)(folder, note)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        number = int(line)
        outcome = made.run(number, chance_for(seed, target, number))
        answers.write(json.dumps(asdict(outcome)) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]))
