"""Spec files: YAML of every shape through the loader. A mistake is one ``SpecError``, found in bounded time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from shuffle.errors import SpecError
from shuffle.spec.config import load_spec
from tests.fuzz.findings import Outcome, Problem
from tests.fuzz.mutate import changed, damaged
from tests.fuzz.oracles import answer_problems

VALID: dict[str, Any] = {
    "processor": "job",
    "state": "./job.state",
    "input": {"queue": "logs"},
    "mapper": {
        "class": "jobs:Parse",
        "memory": "64MiB",
        "batch_rows_max": 1000,
        "batch_bytes_max": "1MiB",
        "read_wait": "500ms",
        "trim_period_ms": 500,
        "on_error": "dead_letter",
        "dead_letter_queue": "letters",
        "listen": "127.0.0.1:0",
        "config": {"a": [1, 2, {"b": "c"}]},
    },
    "reducer": {"class": "jobs:Fold", "count": 2, "fetch_wait": "1s", "share_memory": True, "backoff": "50ms"},
    "spill": {"enabled": True, "age": "2s", "memory_share": "50%", "compression": "lz4"},
    "max_parallelism": 64,
    "lease_ttl": "5s",
    "metrics": True,
}

_TAGS = ("!!python/object:os.system", "!!binary", "!!timestamp", "!!set", "!!float", "!!int", "!!null", "!x", "!!merge")
_SCALARS = (
    "9" * 5000,
    "9" * 5000 + "MiB",
    "1e999",
    "0x" + "f" * 999,
    ".nan",
    ".inf",
    "-.inf",
    "0o777",
    "1_000",
    "~",
    "2001-99-99",
)


class SpecsTarget:
    """Writes each input to the same file, and loads it."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._file = folder / "spec.yaml"
        self._note = note

    def run(self, number: int, chance: random.Random) -> Outcome:
        text = _text(chance)
        self._file.write_bytes(text)
        shown = f"{text[:600]!r} ({len(text)} bytes)"
        self._note(shown)
        try:
            load_spec(self._file)
        except SpecError as error:
            return Outcome(
                "spec",
                answer_problems(error.message.replace(str(self._file), "").encode("utf-8", "replace")),
                shown=shown,
            )
        except Exception as error:
            return Outcome("raised", [Problem("untyped", f"{type(error).__name__}: {str(error)[:150]}")], shown=shown)
        return Outcome("accepted", shown=shown)

    def close(self) -> None:
        pass


def _text(chance: random.Random) -> bytes:
    kind = chance.randrange(20)
    if kind <= 10:
        spec = changed(VALID, chance)
        return yaml.safe_dump(spec, allow_unicode=True, default_flow_style=chance.choice((True, False, None))).encode(
            "utf-8", "surrogatepass"
        )
    valid = yaml.safe_dump(VALID).encode()
    if kind <= 13:
        return damaged(valid, chance, 6)
    if kind == 14:
        return _deep(chance)
    if kind == 15:
        return _aliases(chance)
    if kind == 16:
        lines = valid.decode().splitlines()
        at = chance.randrange(len(lines))
        key = lines[at].partition(":")[0]
        lines[at] = f"{key}: {chance.choice(_SCALARS)}"
        return "\n".join(lines).encode()
    if kind == 17:
        lines = valid.decode().splitlines()
        at = chance.randrange(len(lines))
        key, _, rest = lines[at].partition(":")
        lines[at] = f"{key}: {chance.choice(_TAGS)} {rest}"
        return "\n".join(lines).encode()
    if kind == 18:
        return chance.choice(
            (
                b"",
                b"\xff\xfe" + valid,
                b"\xef\xbb\xbf" + valid,
                valid + b"\n---\n" + valid,
                b"\t" + valid,
                valid * 2,
                b"\0",
                chance.randbytes(300),
            )
        )
    return valid + b"\n# " + b"x" * chance.choice((10, 100_000, 1_100_000))


def _deep(chance: random.Random) -> bytes:
    """Nested beyond what a recursive reader can take."""
    depth = chance.choice((50, 400, 3000, 20_000))
    opening, closing = chance.choice(((b"[", b"]"), (b"{a: ", b"}"), (b"- ", b""), (b"? ", b"")))
    nested = opening * depth + b"1" + closing * depth
    place = chance.choice((b"mapper: {class: 'a:B', config: {x: %s}}\n", b"input: %s\n", b"%s\n", b"spill: %s\n"))
    return place % nested + chance.choice((b"", yaml.safe_dump(VALID).encode()))


def _aliases(chance: random.Random) -> bytes:
    """Texts that grow when they are read, and that refer to themselves."""
    levels = chance.choice((3, 9, 20))
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    inside = "".join(f"  {line}\n" for line in lines)
    looped = ("&a {<<: *a}", "&a [*a]", "&a {x: *a}", "*nobody", "{<<: [*a0, *a0]}", "&a *a")
    if chance.random() < 0.5:
        return yaml.safe_dump(VALID).encode() + f"\nspill: {chance.choice(looped)}\n".encode()
    spec = {name: value for name, value in VALID.items() if name != "mapper"}
    config = inside if chance.random() < 0.7 else f"  x: {chance.choice(looped)}\n"
    mapper = "mapper:\n  class: a:B\n  config:\n" + "".join(f"  {line}\n" for line in config.splitlines())
    return mapper.encode() + yaml.safe_dump(spec).encode()
