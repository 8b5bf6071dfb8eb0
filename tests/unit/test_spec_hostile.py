"""Specs that no person writes: each is refused in one line with its place, and in little time and memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shuffle import cli
from shuffle.errors import BadInput, SpecError
from shuffle.spec.config import load_spec
from shuffle.spec.yaml_file import DEPTH_MAX, SPEC_BYTES_MAX
from shuffle.statestore import StateClient
from shuffle.statestore.local.local import LocalStore
from shuffle.statestore.server.daemon import main as statestore

SPEC = """\
processor: job
state: ./job.state
input: {queue: logs}
mapper: {class: "job:Parse", memory: 64MiB, config: {a: 1}}
reducer: {class: "job:Fold", count: 2}
"""
DIGITS = "9" * 5_000
BOMB = "\n".join(["x0: &x0 [a, b]", *(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 12))])
CHAIN = "\n".join(["x0: &x0 [a]", *(f"x{n}: &x{n} [*x{n - 1}]" for n in range(1, 60))])


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    began_s = time.monotonic()
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert time.monotonic() - began_s < 30
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert len(line) < 600
    return line.removeprefix(f"{path}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, ":1: more than 32 lists and mappings within each other"),
        ("- " * 100_000, ":1: more than 32 lists and mappings within each other"),
        ("{a: " * 50_000, ":1: more than 32 lists and mappings within each other"),
        (CHAIN, ":32: more than 32 lists and mappings within each other"),
        (BOMB, ": more than 100000 keys and values, with what aliases stand for"),
        ("a: &a [*a]", ":1: the alias *a is inside of what it stands for"),
        ("a: *b", ":1: not YAML: found undefined alias 'b'"),
        ("#" * (SPEC_BYTES_MAX + 1), ": too large for a spec"),
        ("a: \x00", ":1: not YAML: unacceptable character #x0000"),
    ],
    ids=lambda value: value[:20],
)
def test_file_that_is_no_spec(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("64MiB", DIGITS, ":4: mapper.memory: '99999"),
        ("64MiB", f"{DIGITS}MiB", ":4: mapper.memory: '99999"),
        ("count: 2", f"count: {DIGITS}", ":5: reducer.count: '99999"),
        ("processor", f"metrics: {DIGITS}\nprocessor", ":1: metrics: '99999"),
        ("processor", f"lease_ttl: {DIGITS}s\nprocessor", ":1: lease_ttl: '99999"),
        ("processor", f"spill: {{memory_share: {DIGITS}}}\nprocessor", ":1: spill.memory_share: inf is not between"),
        ("a: 1", f"a: {DIGITS}", ":4: mapper.config: cannot be read"),
        ("a: 1", "a: 2026-13-13", ":4: mapper.config: cannot be read"),
        ("a: 1", "a: !!timestamp x", ":4: mapper.config: cannot be read"),
        ("a: 1", "a: 1, 2: b", ":4: mapper.config: cannot be read"),
        ("a: 1", "a: !!python/object/apply:os.system [echo]", ":4: mapper.config: cannot be read"),
        ("logs", '"\\ud800"', ":3: input.queue: '\\ud800' has a character"),
        ("./job.state", '"a\\0b"', ":2: state: 'a\\x00b' has a character"),
        ("./job.state", "~no-such-user/x", ":2: state: '~no-such-user/x' is not a folder"),
        ("./job.state", "http://host:7070", ":2: state: 'http://host:7070' is neither a folder nor grpc://host:port"),
        ("queue: logs", "folder: s3://bucket/key", ":3: input.folder: 's3://bucket/key' is an address"),
        ("processor: job", f"processor: {'j' * 5_000}", ":1: processor: 'jjjj"),
        ("processor: job", f"processor: job\n{'k' * 1_000}: 1", ":2: 'kkkk"),
        ("processor: job", "processor: job\n? [a]\n: 1", "a key is one of dead_letters, input,"),
    ],
)
def test_value_that_nobody_means(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in refused(tmp_path, SPEC.replace(old, new, 1))


def test_spec_may_use_aliases_and_some_depth(tmp_path: Path) -> None:
    deep = "[" * (DEPTH_MAX - 3) + "1" + "]" * (DEPTH_MAX - 3)
    path = tmp_path / "job.yaml"
    path.write_text(SPEC.replace("a: 1", f"a: &deep {deep}, b: *deep"))
    config = load_spec(path).mapper.config
    assert config["a"] == config["b"]


def test_environment_that_names_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.yaml").write_text(SPEC)
    monkeypatch.setenv("SHUFFLE_STATE", "http://host:1")
    with pytest.raises(SpecError, match=r"SHUFFLE_STATE is 'http://host:1', which is not grpc://host:port"):
        load_spec(tmp_path / "job.yaml")


@pytest.mark.parametrize("address", ["http://host:7070", "grpc://host:7070", "s3://bucket/key", "http:/host"])
def test_address_is_not_taken_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (address, Path(address)):
        with pytest.raises(BadInput, match="is an address, and a folder is needed here"):
            LocalStore(given)
    with pytest.raises(SystemExit) as ended:
        statestore(["--path", address])
    assert ended.value.code == 2
    assert "is an address, and a folder is needed here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["http://host:7070", "postgresql://host/db", "http:/host", Path("grpc://host:1")])
def test_address_of_another_kind_is_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for opener in (StateClient.open, StateClient.connect):
        with pytest.raises(BadInput, match="it looks like grpc://host:port, and a store that no daemon serves"):
            opener(address)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["state", "ls", "http://host:7070"]) == 2
    assert "it looks like grpc://host:port" in capsys.readouterr().err
