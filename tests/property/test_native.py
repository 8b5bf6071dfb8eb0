"""The compiled kernels do what their twins in Python do, for every type of column, chunking and number of reducers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shuffle.errors import SpecError
from shuffle.partition import hash_partition, split, split_by_partition
from shuffle.partition.xxhash64 import hashable, xxhash64
from shuffle.support import native

PROJECT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    native.kernels() is None,
    reason="the kernels were not compiled (is there a C compiler?), so there is nothing to test",
)

VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.string(): st.text(max_size=40),
    pa.binary(): st.binary(max_size=100),
    pa.large_string(): st.text(max_size=10),
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-(2**7), 2**7 - 1),
    pa.uint16(): st.integers(0, 2**16 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.timestamp("us"): st.integers(-(2**55), 2**55),
    pa.date32(): st.integers(-100_000, 100_000),
    pa.decimal128(20, 3): st.integers(-(10**19), 10**19).map(lambda n: Decimal(n).scaleb(-3)),
    pa.binary(5): st.binary(min_size=5, max_size=5),
    pa.list_(pa.int32()): st.lists(st.integers(0, 9), max_size=3),
    pa.struct([("a", pa.int64()), ("b", pa.string())]): st.fixed_dictionaries(
        {"a": st.integers(0, 9), "b": st.text(max_size=3)}
    ),
    pa.null(): st.none(),
}


@pytest.fixture(autouse=True)
def _kernels_also_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(split, "NATIVE_ROWS_MIN", 1)
    monkeypatch.setattr(split, "NATIVE_PART_MIN", 0)
    yield
    native.kernels.cache_clear()


def python_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "off")
    native.kernels.cache_clear()
    assert native.kernels() is None


@st.composite
def columns(draw: st.DrawFn, rows: int) -> pa.Array:
    data_type = draw(st.sampled_from(list(VALUES)))
    values = VALUES[data_type]
    with_nulls = draw(st.booleans())
    some = draw(st.lists(st.one_of(st.none(), values) if with_nulls else values, min_size=1, max_size=12))
    picks = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, len(some), rows + 5)
    skip = draw(st.integers(0, 5))
    return pa.array([some[pick] for pick in picks.tolist()], data_type).slice(skip, rows)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    rows = draw(st.one_of(st.integers(1, 40), st.integers(200, 700)))
    table = pa.table({f"c{number}": draw(columns(rows)) for number in range(draw(st.integers(1, 4)))})
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=3)))
    begins, ends = [0, *cuts], [*cuts, rows]
    return pa.concat_tables([table.slice(begin, end - begin) for begin, end in zip(begins, ends, strict=True)])


def differences(rows: pa.Table, indexes: np.ndarray[Any, Any], reducers: int) -> list[str]:
    """Where the split by kernels is not that of Python."""
    found = []
    compiled = split_by_partition(rows, indexes, reducers)
    with pytest.MonkeyPatch.context() as patch:
        python_only(patch)
        expected = split_by_partition(rows, indexes, reducers)
    native.kernels.cache_clear()
    for reducer, ((ours, offsets), (theirs, expected_offsets)) in enumerate(zip(compiled, expected, strict=True)):
        if offsets.tolist() != expected_offsets.tolist() or offsets.dtype != np.uint32:
            found.append(f"offsets of {reducer}: {offsets} and not {expected_offsets}")
        if theirs is None or ours is None:
            found += [] if ours is theirs else [f"rows of {reducer}: {ours} and not {theirs}"]
            continue
        ours.validate(full=True)
        same = ours.schema.equals(theirs.schema, check_metadata=True)
        # NaN is not equal to itself; its text is.
        if not same or str(ours.to_pylist()) != str(theirs.to_pylist()):
            found.append(f"rows of {reducer}: {ours.to_pylist()} and not {theirs.to_pylist()}")
        if [column.null_count for column in ours.columns] != [column.null_count for column in theirs.columns]:
            found.append(f"null counts of {reducer}")
    return found


@settings(max_examples=150, deadline=None)
@given(tables(), st.sampled_from([1, 2, 3, 7, 64, 256, 300]), st.integers(0, 2**32))
def test_split_is_that_of_python(rows: pa.Table, reducers: int, seed: int) -> None:
    indexes = np.random.default_rng(seed).integers(0, reducers, rows.num_rows)
    assert differences(rows, indexes, reducers) == []


def test_differences_are_seen() -> None:
    """The check above can fail: a kernel that copies nothing is found."""
    rows, indexes = pa.table({"a": ["x", "y", "z"]}), np.array([0, 1, 0])
    assert differences(rows, indexes, 2) == []
    library = native.kernels()
    assert library is not None
    kept = library.split_bytes_8
    library.split_bytes_8 = lambda *arguments: 0
    try:
        with pytest.raises((AssertionError, UnicodeDecodeError, pa.ArrowInvalid)):
            assert differences(rows, indexes, 2) == []
    finally:
        library.split_bytes_8 = kept


@settings(max_examples=100, deadline=None)
@given(tables(), st.sampled_from([1, 2, 300]), st.sampled_from([512, 4096, 1000, 32767]))
def test_hashes_and_owners_are_those_of_python(rows: pa.Table, reducers: int, max_parallelism: int) -> None:
    by = [field.name for field in rows.schema if hashable(field.type)]
    if not by:
        return
    hashes = xxhash64([rows[name] for name in by])
    owners = hash_partition(rows, by, reducers, max_parallelism).partition_indexes
    with pytest.MonkeyPatch.context() as patch:
        python_only(patch)
        assert hashes.tolist() == xxhash64([rows[name] for name in by]).tolist()
        assert owners.tolist() == hash_partition(rows, by, reducers, max_parallelism).partition_indexes.tolist()
    native.kernels.cache_clear()


def test_values_at_the_end_of_their_memory_are_read_exactly() -> None:
    """The last values lie at the very end of a mapped page: a byte too many would be a segmentation fault."""
    code = """
import mmap, numpy as np, pyarrow as pa
from shuffle.partition import split, split_by_partition
split.NATIVE_ROWS_MIN, split.NATIVE_PART_MIN = 1, 0
page = mmap.mmap(-1, 2 * mmap.PAGESIZE)
import ctypes
base = ctypes.addressof(ctypes.c_char.from_buffer(page))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(base + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
text = b"0123456789" * 3
page[mmap.PAGESIZE - 30 : mmap.PAGESIZE] = text
data = pa.foreign_buffer(base + mmap.PAGESIZE - 30, 30, page)
offsets = pa.py_buffer(np.array([0, 3, 10, 29, 30], np.int32))
rows = pa.table({"a": pa.Array.from_buffers(pa.binary(), 4, [None, offsets, data])})
parts = split_by_partition(rows, np.array([0, 1, 0, 1]), 2)
assert [p[0]["a"].to_pylist() for p in parts] == [[text[:3], text[10:29]], [text[3:10], text[29:]]]
print("exact")
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout.strip()) == (0, "exact"), found.stderr


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    native.kernels.cache_clear()
    assert native.kernels() is None


def test_a_misspelled_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "no")
    native.kernels.cache_clear()
    with pytest.raises(SpecError, match=r"SHUFFLE_NATIVE is 'no'.*on or off"):
        native.kernels()


def test_without_a_compiler_the_package_is_built_without_kernels(tmp_path: Path) -> None:
    environment = {**os.environ, "CC": "/nonexistent/cc"}
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        str(tmp_path),
        "--build-temp",
        str(tmp_path),
    ]
    found = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert list(tmp_path.rglob("*.so")) == []
    found = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert [path.name for path in tmp_path.rglob("*.so")] == ["_kernels.so"]
