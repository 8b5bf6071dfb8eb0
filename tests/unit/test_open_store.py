"""Stores are opened by what their address says: a folder, or the scheme of whoever registered it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from shuffle import cli
from shuffle.errors import BadInput, SpecError
from shuffle.spark_connector.options import Options, state_of
from shuffle.spark_connector.store_handle import StoreHandle
from shuffle.spec.config import load_spec
from shuffle.statestore import StateClient
from shuffle.statestore.client import open_store as stores
from shuffle.statestore.client.open_store import OpenOptions, Scheme, folder_of, is_address, open_store, register_scheme
from shuffle.statestore.local.local import LocalStore
from shuffle.statestore.store import Store

NUMBERS = pa.schema([("n", pa.int64())])

SPEC = """\
processor: job
state: STATE
input: {queue: logs}
mapper: {class: "examples.activity:ParseLogs"}
reducer: {class: "examples.activity:CountByUser", count: 1}
"""


class Depot:
    """Somebody's own kind of store: ``depot://name`` is a store in a folder of that name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[tuple[str, OpenOptions]] = []

    def open(self, address: str, options: OpenOptions) -> Store:
        self.opened.append((address, options))
        return LocalStore(self.folder / address.removeprefix("depot://"))

    def fits(self, address: str) -> bool:
        return address.removeprefix("depot://").isalnum()


@pytest.fixture
def depot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Depot:
    monkeypatch.setattr(stores, "_schemes", dict(stores._schemes))
    registered = Depot(tmp_path / "depot")
    register_scheme(Scheme("depot", "depot://name", registered.open, registered.fits))
    return registered


@pytest.mark.parametrize("form", ["{}", "file://{}", "file:{}", "file://localhost{}"])
def test_folder_is_opened_in_this_process(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "a state"
    with StateClient.open(form.format(folder)) as client:
        assert client.address == str(folder)
    assert (folder / "FORMAT").is_file()


def test_folder_in_a_url_may_be_quoted(tmp_path: Path) -> None:
    assert folder_of(f"file://{tmp_path}/a%20state") == tmp_path / "a state"


@pytest.mark.parametrize("url", ["file://elsewhere/state", "file://", "file:"])
def test_file_url_that_names_no_folder_of_this_machine_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match="does not name a folder of this machine"):
        open_store(url)


def test_unknown_scheme_is_refused_with_those_that_there_are(depot: Depot) -> None:
    with pytest.raises(BadInput, match="it looks like grpc://host:port or depot://name"):
        StateClient.open("postgresql://host/database")
    with pytest.raises(BadInput, match="it looks like grpc://host:port or depot://name"):
        StateClient.open("depot://not/a/name")


def test_scheme_of_somebody_else_is_used_through_the_client(depot: Depot) -> None:
    with StateClient.open("depot://one", timeout_s=3.0) as client:
        client.create_table("t", key=NUMBERS, value=pa.schema([("v", pa.string())]))
        with client.transaction() as tx:
            tx.write("t", pa.table({"n": [1], "v": ["x"]}))
            tx.commit()
    with StateClient.connect("depot://one", local_files=False) as client:
        assert client.scan("t").read_all().to_pylist() == [{"n": 1, "v": "x"}]
    assert depot.opened == [("depot://one", OpenOptions(3.0)), ("depot://one", OpenOptions(None, False))]


def test_scheme_of_somebody_else_is_used_by_specs_commands_and_spark(
    depot: Depot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(SPEC.replace("STATE", "depot://one"))
    spec = load_spec(path)
    assert (spec.state, spec.state_folder) == ("depot://one", None)
    with spec.open_state() as client:
        client.create_queue("logs", schema=NUMBERS, partitions=1)
    assert cli.main(["state", "queues", "depot://one", "--json"]) == 0
    assert '"logs"' in capsys.readouterr().out
    monkeypatch.setenv("SHUFFLE_STATE", "depot://two")
    assert load_spec(path).state == "depot://two"

    assert state_of(Options.check("read", {"state": "depot://one"})) == "depot://one"
    with StoreHandle("depot://one", timeout_s=1.0).client() as client:
        assert [queue.name for queue in client.queues()] == ["logs"]


def test_spec_names_the_stores_that_there_are(depot: Depot, tmp_path: Path) -> None:
    for state in ("http://host:7070", "depot://not/a/name", "grpc://host"):
        (tmp_path / "job.yaml").write_text(SPEC.replace("STATE", state))
        with pytest.raises(SpecError, match="is neither a folder nor grpc://host:port nor depot://name"):
            load_spec(tmp_path / "job.yaml")


def test_spec_may_name_its_folder_by_url(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SPEC.replace("STATE", f"file://{tmp_path}/job.state"))
    spec = load_spec(tmp_path / "job.yaml")
    assert (spec.state, spec.state_folder) == (f"{tmp_path}/job.state", tmp_path / "job.state")
    (tmp_path / "job.yaml").write_text(SPEC.replace("STATE", "file://elsewhere/job.state"))
    with pytest.raises(SpecError, match=r":2: state: 'file://elsewhere/job.state' does not name a folder"):
        load_spec(tmp_path / "job.yaml")


@pytest.mark.parametrize("name", ["grpc", "file", "depot"])
def test_scheme_cannot_be_taken_from_somebody(depot: Depot, name: str) -> None:
    with pytest.raises(BadInput, match="registered already"):
        register_scheme(Scheme(name, f"{name}://x", depot.open))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("grpc://host:1", True), ("grpc://[::1]:1", True), ("grpc://host", False), ("host:1", False), ("./a", False)],
)
def test_address_is_told_from_a_folder_without_opening_it(text: str, expected: bool) -> None:
    assert is_address(text) is expected
