"""Broken values: JSON with fields removed, doubled and of other types, numbers at borders, and damaged bytes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

INTEGERS = (
    *(0, 1, -1, 2, 7, 255, 256, 1023, 1024, 1025, 65535, 65536, 100_000),
    *(2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 2**70),
)
"""Around the borders of every width that a number may be kept in, and of the limits of frames."""

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 1.5, -0.0, 1e308, float("nan"), float("inf"), "", "0", "-1", "x", "\x00", "\ud800", "ü" * 40),
    *([], {}, [[]], [None], {"": None}, [[[[[]]]]], [1, 2, 3], {"a": {"b": []}}, "9" * 400, "x" * 3000),
)
"""What may stand where a number or a name is meant."""

STEPS_MAX = 3
"""Changes of one input: with more, the first check refuses it and nothing behind that check is tried."""


def chance_for(seed: int, target: str, number: int) -> random.Random:
    """The source of everything that is random in one input."""
    return random.Random(f"{seed}/{target}/{number}")


def odd_value(chance: random.Random) -> Any:
    """A value that hardly any field is meant to have."""
    return chance.choice(INTEGERS) if chance.random() < 0.5 else copy.deepcopy(chance.choice(ODD_VALUES))


def changed(value: Any, chance: random.Random) -> Any:
    """``value``, of any shape that JSON has, with one to a few changes somewhere inside it; the original is kept."""
    made = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, STEPS_MAX))):
        made = _changed_once(made, chance)
    return made


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container inside ``value`` with each of its keys or indexes."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        found += [(value, key) for key in value]
        for inner in value.values():
            found += _places(inner)
    elif isinstance(value, list):
        found += [(value, index) for index in range(len(value))]
        for inner in value:
            found += _places(inner)
    return found


def _changed_once(value: Any, chance: random.Random) -> Any:
    places = _places(value)
    if not places:
        return odd_value(chance)
    container, key = chance.choice(places)
    old = container[key]
    step = chance.randrange(10)
    if step == 0:
        del container[key]
    elif step == 1:
        if isinstance(container, list):
            container.insert(key, copy.deepcopy(old))
        else:
            container[chance.choice(("x", "", "op ", str(key) * 2))] = copy.deepcopy(old)
    elif step == 2:
        container[key] = [old]
    elif step == 3:
        container[key] = nudged(old, chance)
    elif step == 4 and len(places) > 1:
        other, other_key = chance.choice(places)
        container[key] = copy.deepcopy(other[other_key])
    else:
        container[key] = odd_value(chance)
    return value


def nudged(value: Any, chance: random.Random) -> Any:
    """Almost the same value: one more or less, another type of the same meaning, a text cut or prolonged."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return chance.choice((value + 1, value - 1, -value, float(value), str(value), value << 32, value * 1.5))
    if isinstance(value, str):
        return chance.choice((value[:-1], value + "x", value.upper(), value + "\x00", value * 50))
    if isinstance(value, list):
        return value[::-1] if chance.random() < 0.5 else value * chance.choice((2, 40))
    return odd_value(chance)


def to_json(value: Any, chance: random.Random | None = None) -> bytes:
    """As JSON, NaN and all; sometimes with a field twice, which JSON allows and a dictionary cannot hold."""
    text = json.dumps(value)
    if chance is not None and isinstance(value, dict) and value and chance.random() < 0.05:
        key = chance.choice(list(value))
        text = f"{text[:-1]}, {json.dumps(str(key))}: {json.dumps(odd_value(chance))}}}"
    return text.encode("utf-8", "surrogatepass")


def as_read(data: bytes, written: Any) -> Any:
    """What a reader of the JSON ``data`` finds; a field that is there twice counts by its last value."""
    return json.loads(data) if isinstance(written, dict) else written


def damaged(data: bytes, chance: random.Random, steps_max: int = STEPS_MAX) -> bytes:
    """``data`` with bits flipped, pieces cut, doubled or overwritten, or a number at a border put over some."""
    made = bytearray(data)
    for _ in range(chance.randint(1, steps_max)):
        made = _damaged_once(made, chance)
    return bytes(made)


def _damaged_once(data: bytearray, chance: random.Random) -> bytearray:
    if not data:
        return bytearray(chance.randbytes(chance.randint(1, 16)))
    at = chance.randrange(len(data))
    step = chance.randrange(8)
    if step <= 2:
        data[at] ^= 1 << chance.randrange(8)
    elif step == 3:
        del data[at:]
    elif step == 4:
        data += chance.randbytes(chance.choice((1, 3, 8, 64)))
    elif step == 5:
        width = chance.choice((4, 8))
        border = (chance.choice(INTEGERS) & (1 << 8 * width) - 1).to_bytes(width, "little")
        data[at : at + width] = border[: len(data) - at]
    elif step == 6:
        piece = data[at : at + chance.randint(1, 64)]
        data[at:at] = piece
    else:
        del data[at : at + chance.randint(1, 64)]
    return data
