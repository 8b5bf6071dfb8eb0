"""Sizes and durations: every spelling, what is none, and how they are printed. A spec and Spark take the same ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from shuffle.errors import BadInput, SpecError
from shuffle.limits import GIB, KIB, MIB
from shuffle.spark_connector.options import Options
from shuffle.spec.config import load_spec
from shuffle.support.units import (
    DURATION_UNITS,
    SIZE_UNITS,
    exact_duration,
    exact_size,
    parse_duration_ms,
    parse_size,
    rough_size,
)

SPEC = """
processor: job
state: ./state
input: {{queue: logs}}
mapper: {{class: "a:B", memory: "{size}"}}
reducer: {{class: "a:B", count: 1}}
spill: {{age: "{duration}"}}
"""


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("10", 10), ("1KiB", 1024), ("2 MB", 2_000_000), ("1.5GiB", 3 * 2**29), ("64kib", 65536), ("1_000", 1000)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "ms"),
    [("500ms", 500), ("5s", 5_000), ("1.5s", 1_500), ("2m", 120_000), ("2 min", 120_000), ("1D", 86_400_000)],
)
def test_durations(text: str, ms: int) -> None:
    assert parse_duration_ms(text) == parse_duration_ms(text, plain_ms=True) == ms


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 parsec", "1e3", "nan", "1" * 33, "1..5s", "s5", "١s"])
def test_sizes_and_durations_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)
    with pytest.raises(ValueError):
        parse_duration_ms(text, plain_ms=True)


def test_plain_duration_is_refused_and_the_error_says_what_to_write() -> None:
    with pytest.raises(ValueError, match="'30' has no unit of time: write 30s or 30ms"):
        parse_duration_ms("30")
    assert parse_duration_ms("30", plain_ms=True) == 30
    assert parse_duration_ms("0") == 0


def test_units_do_not_end_where_they_should_go_on() -> None:
    with pytest.raises(ValueError, match="no unit of size"):
        parse_size("5s")
    with pytest.raises(ValueError, match="no unit of time"):
        parse_duration_ms("5MiB")


# ---- the same in a spec and in an option of Spark -------------------------------------------------------------------


def spec_says(tmp_path: Path, size: str, duration: str) -> tuple[int, int]:
    path = tmp_path / "job.yaml"
    path.write_text(SPEC.format(size=size, duration=duration))
    spec = load_spec(path)
    return spec.mapper.memory_bytes, spec.spill.age_ms


def spark_says(size: str, duration: str) -> tuple[int | None, float]:
    options = Options.check("read stream", {"maxBytesPerTrigger": size, "timeout": duration})
    return options.size_bytes("maxBytesPerTrigger"), options.seconds("timeout", 0.0) * 1000


@pytest.mark.parametrize("size", [f"{10**8 // scale + 1}{unit}" for unit, scale in SIZE_UNITS.items()] + ["67108864"])
def test_spec_and_spark_read_the_same_size(tmp_path: Path, size: str) -> None:
    assert spec_says(tmp_path, size, "1s")[0] == spark_says(size, "1s")[0] == parse_size(size)


@pytest.mark.parametrize("duration", [f"1{unit}" for unit in DURATION_UNITS] + ["1.5s", "2 min"])
def test_spec_and_spark_read_the_same_duration(tmp_path: Path, duration: str) -> None:
    assert spec_says(tmp_path, "64MiB", duration)[1] == spark_says("64MiB", duration)[1] == parse_duration_ms(duration)


@pytest.mark.parametrize("duration", ["30", "5 weeks", "soon"])
def test_spec_and_spark_refuse_the_same_duration_in_the_same_words(tmp_path: Path, duration: str) -> None:
    with pytest.raises(ValueError) as said:
        parse_duration_ms(duration)
    with pytest.raises(SpecError) as by_spec:
        spec_says(tmp_path, "64MiB", duration)
    with pytest.raises(BadInput) as by_spark:
        spark_says("64MiB", duration)
    assert str(by_spec.value).endswith(f"spill.age: {said.value}")
    assert by_spark.value.message == f"the option 'timeout' is a time like 30s or 5min: {said.value}"


@pytest.mark.parametrize("size", ["0", "0MiB", "many"])
def test_spark_refuses_what_is_no_size(size: str) -> None:
    with pytest.raises(BadInput, match="the option 'maxBytesPerTrigger' is a size"):
        spark_says(size, "1s")


# ---- printed --------------------------------------------------------------------------------------------------------


def test_sizes_are_printed_without_loss_or_in_brief() -> None:
    assert [exact_size(n) for n in (0, 1000, KIB, 3 * MIB, GIB + 1, 2048 * GIB)] == [
        *("0 B", "1,000 B", "1 KiB", "3 MiB", "1,073,741,825 B", "2 TiB")
    ]
    assert [rough_size(n) for n in (0, 1023, KIB, 1536 * KIB, GIB, 5000 * GIB, 2000 * 1024 * GIB)] == [
        *("0 B", "1,023 B", "1.0 KiB", "1.5 MiB", "1.0 GiB", "4.9 TiB", "2,000.0 TiB")
    ]


def test_printed_values_are_read_back() -> None:
    for nbytes in (1, 1000, 64 * KIB, 5 * MIB, 7 * GIB):
        assert parse_size(exact_size(nbytes).replace(",", "")) == nbytes
    for ms in (0, 1, 999, 1000, 90_000, 600_000, 7_200_000):
        assert parse_duration_ms(exact_duration(ms)) == ms
