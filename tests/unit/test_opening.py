"""What a store makes of a folder that is damaged, not whole, of another store, or of an earlier version."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pytest

from shuffle.errors import CorruptData, FormatTooNew, StoreError, StoreNotWritable
from shuffle.statestore import StateClient
from shuffle.statestore.admin import commands
from shuffle.statestore.engine.engine import STORE_ID_KEY
from shuffle.statestore.local.local import LocalStore
from shuffle.statestore.local.marker import FILE as MARKER
from shuffle.statestore.local.marker import Marker
from shuffle.statestore.local.rocks import Rocks
from shuffle.statestore.local.store_folder import FORMAT
from tests.daemons import wait_until

NUMBERS = pa.schema([("n", pa.int64())])
VALUES = pa.schema([("v", pa.int64())])
COMMITS = 40
"""Of the store in these tests: half of them before a restart, so in a file of RocksDB, and half after, in its log."""

Damage = Callable[[Path], object]


def make(folder: Path) -> None:
    with StateClient.open(folder) as client:
        client.create_table("t", key=NUMBERS, value=VALUES)
        client.create_queue("q", NUMBERS, 1)


def commit(client: StateClient, number: int) -> None:
    with client.transaction() as transaction:
        transaction.write("t", pa.table({"n": [number], "v": [number]}))
        transaction.append("q", 0, pa.table({"n": [number]}))
        transaction.commit()


def contents(folder: Path) -> list[int]:
    """The numbers in the table, which are those in the queue."""
    with StateClient.open(folder) as client:
        table: list[int] = client.scan("t").read_all()["n"].to_pylist()
        found, begin = [], 0
        while begin < client.queue("q").bounds()[0][1]:
            rows, begin = client.queue("q").read(0, begin)
            found += rows["n"].to_pylist()
        assert found == table
        return table


def digests(folder: Path) -> dict[str, str]:
    """Every file with its content, but not who had it locked last."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / "LOCK")
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


def refused(folder: Path, kind: type[StoreError] = CorruptData) -> StoreError:
    """The store refuses the folder with one line that names it, and has changed nothing."""
    before = digests(folder)
    with pytest.raises(kind) as caught:
        LocalStore(folder)
    assert digests(folder) == before
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store that was killed after its last commit was acknowledged; ``before`` is its last marker."""
    folder = tmp_path_factory.mktemp("killed") / "state"
    make(folder)
    with StateClient.open(folder) as client:
        for number in range(COMMITS // 2):
            commit(client, number)
    with StateClient.open(folder) as client:
        for number in range(COMMITS // 2, COMMITS):
            before = (folder / MARKER).read_bytes()
            commit(client, number)
        # What a process has written is there after its death: a copy is what kill -9 leaves.
        shutil.copytree(folder, folder.parent / "copy")
    (folder.parent / "before").write_bytes(before)
    return folder.parent / "copy"


@pytest.fixture
def state(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "state"))


def log(folder: Path) -> Path:
    return max((folder / "rocks").glob("*.log"))


def only(folder: Path, pattern: str) -> Path:
    [found] = (folder / "rocks").glob(pattern)
    return found


def flip(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def cut(path: Path, size_bytes: int) -> None:
    os.truncate(path, size_bytes)


def extend(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def blank_end(path: Path) -> None:
    half = path.stat().st_size // 2
    path.write_bytes(path.read_bytes()[:half] + bytes(half))


REFUSED: dict[str, Damage] = {
    "a bit in the middle of the log": lambda folder: flip(log(folder), log(folder).stat().st_size // 2),
    "a bit that makes RocksDB read the log for ever": lambda folder: flip(log(folder), 6, 4),
    "a bit that makes RocksDB read the manifest for ever": lambda folder: flip(only(folder, "MANIFEST-*"), 6, 4),
    "a bit in the last record of the log": lambda folder: flip(log(folder), log(folder).stat().st_size - 20),
    "half of the log": lambda folder: cut(log(folder), log(folder).stat().st_size // 2),
    "three bytes of the log": lambda folder: cut(log(folder), log(folder).stat().st_size - 3),
    "zeros in place of half of the log": lambda folder: blank_end(log(folder)),
    "an empty log": lambda folder: cut(log(folder), 0),
    "no log": lambda folder: log(folder).unlink(),
    "no manifest": lambda folder: only(folder, "MANIFEST-*").unlink(),
    "a bit of the manifest": lambda folder: flip(only(folder, "MANIFEST-*"), 50),
    "half of the manifest": lambda folder: cut(only(folder, "MANIFEST-*"), 60),
    "no CURRENT": lambda folder: only(folder, "CURRENT").unlink(),
    "an empty CURRENT": lambda folder: cut(only(folder, "CURRENT"), 0),
    "another CURRENT": lambda folder: only(folder, "CURRENT").write_text("MANIFEST-000999\n"),
    "a table file missing": lambda folder: min((folder / "rocks").glob("*.sst")).unlink(),
    "a table file cut": lambda folder: cut(min((folder / "rocks").glob("*.sst")), 100),
    "no database": lambda folder: shutil.rmtree(folder / "rocks"),
    "an empty folder for the database": lambda folder: (shutil.rmtree(folder / "rocks"), (folder / "rocks").mkdir()),
    "no marker": lambda folder: (folder / MARKER).unlink(),
    "an empty marker": lambda folder: cut(folder / MARKER, 0),
    "a bit of the marker": lambda folder: flip(folder / MARKER, 20),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_damage_to_what_was_acknowledged_is_refused_and_left_as_it_is(state: Path, damage: str) -> None:
    REFUSED[damage](state)
    refused(state)


def test_refusal_says_how_far_the_database_reaches(state: Path) -> None:
    log(state).unlink()
    error = refused(state)
    assert (error.version, error.acknowledged) == (2 + COMMITS // 2, 2 + COMMITS)
    assert f"version {error.version}" in error.message
    assert f"version {error.acknowledged}" in error.message
    assert "backup" in error.message


TOLERATED: dict[str, Damage] = {
    "nothing": lambda folder: None,
    "garbage behind the log": lambda folder: extend(log(folder), bytes(range(100, 200))),
    "zeros behind the log": lambda folder: extend(log(folder), bytes(100_000)),
    "no options": lambda folder: [path.unlink() for path in (folder / "rocks").glob("OPTIONS-*")],
}


@pytest.mark.parametrize("damage", TOLERATED)
def test_what_is_torn_behind_the_last_acknowledged_commit_is_dropped(state: Path, damage: str) -> None:
    TOLERATED[damage](state)
    assert contents(state) == list(range(COMMITS))
    assert contents(state) == list(range(COMMITS)), "and the next start finds nothing wrong"


@pytest.mark.parametrize("lost_bytes", [0, 3, 40])
def test_commit_that_was_killed_before_its_answer_is_there_whole_or_not_at_all(
    state: Path, killed: Path, lost_bytes: int
) -> None:
    (state / MARKER).write_bytes((killed.parent / "before").read_bytes())
    cut(log(state), log(state).stat().st_size - lost_bytes)
    assert contents(state) == list(range(COMMITS - bool(lost_bytes)))
    assert sorted(path.name for path in state.iterdir() if path.is_dir()) == ["rocks", "segments"]


def test_no_flipped_bit_of_the_log_loses_a_row_unnoticed(killed: Path, tmp_path: Path) -> None:
    size = log(killed).stat().st_size
    for at in range(0, size, size // 12):
        folder = Path(shutil.copytree(killed, tmp_path / str(at)))
        flip(log(folder), at, 1 << at % 8)
        refused(folder)


# --- parts that do not belong together ---


def test_database_of_another_store_is_refused(state: Path, tmp_path: Path) -> None:
    make(tmp_path / "other")
    with StateClient.open(tmp_path / "other") as client:
        for number in range(2 * COMMITS):
            commit(client, number)
    shutil.rmtree(state / "rocks")
    shutil.copytree(tmp_path / "other" / "rocks", state / "rocks")
    assert "another store" in refused(state).message


def test_older_database_beside_newer_segments_is_refused(state: Path, tmp_path: Path) -> None:
    shutil.copytree(state / "rocks", tmp_path / "backup")
    with StateClient.open(state) as client:
        commit(client, COMMITS)
    shutil.rmtree(state / "rocks")
    shutil.copytree(tmp_path / "backup", state / "rocks")
    assert refused(state).acknowledged == 2 + COMMITS + 1


def test_segments_without_the_rest_are_refused(state: Path) -> None:
    for name in ("FORMAT", MARKER):
        (state / name).unlink()
    shutil.rmtree(state / "rocks")
    refused(state, StoreError)


def test_store_that_was_killed_while_it_was_made_is_made_in_the_end(tmp_path: Path) -> None:
    make(tmp_path / "whole")
    for missing in ([MARKER], [MARKER, "rocks"], ["rocks"]):
        folder = tmp_path / "-".join(missing)
        LocalStore(folder).close()
        for name in missing:
            shutil.rmtree(folder / name) if name == "rocks" else (folder / name).unlink()
        make(folder)
        assert contents(folder) == []


def test_store_has_an_id_of_its_own_that_stays(tmp_path: Path) -> None:
    ids = []
    for name in ("one", "one", "two"):
        store = LocalStore(tmp_path / name)
        ids.append(store.store_id)
        store.close()
    assert ids[0] == ids[1] != ids[2]


def test_acknowledged_version_is_written_before_the_answer_and_counted(tmp_path: Path) -> None:
    make(tmp_path)
    with StateClient.open(tmp_path) as client:
        for number in range(3):
            commit(client, number)
            found = Marker.load(tmp_path)
            assert found is not None
            assert found.version == client.stats()["total"]["version"]
            found.close()
        written = client.stats()["total"]["marker_bytes"]
        assert written == 3 * (tmp_path / MARKER).stat().st_size


# --- earlier formats ---


def age(folder: Path) -> None:
    """Make a folder what format 1 was: no marker, and no id in the database."""
    (folder / MARKER).unlink()
    (folder / "FORMAT").write_text("1\n")
    rocks = Rocks(folder / "rocks", create=False)
    rocks.write([([STORE_ID_KEY], [None])])
    rocks.sync()
    rocks.close()


def test_folder_of_format_1_gets_a_marker(state: Path) -> None:
    age(state)
    assert contents(state) == list(range(COMMITS))
    assert (state / "FORMAT").read_text() == f"{FORMAT}\n"
    with StateClient.open(state) as client:
        commit(client, COMMITS)
        shutil.copytree(state, state.parent / "copy")
    log(state.parent / "copy").unlink()
    refused(state.parent / "copy")


def test_folder_of_format_1_with_segments_and_no_database_is_refused(state: Path) -> None:
    age(state)
    shutil.rmtree(state / "rocks")
    refused(state)
    Rocks(state / "rocks").close()
    assert "empty" in refused(state).message


@pytest.mark.parametrize("text", ["-1", "0", "", "what", "1.5", "1_0", "9" * 5_000])
def test_format_that_is_none_is_refused(state: Path, text: str) -> None:
    (state / "FORMAT").write_text(text)
    assert "FORMAT" in refused(state).message


def test_format_of_the_future_is_refused(state: Path) -> None:
    (state / "FORMAT").write_text(f"{FORMAT + 1}\n")
    refused(state, FormatTooNew)


# --- files that nobody knows ---


def test_unknown_files_among_the_segments_are_set_aside(state: Path) -> None:
    known = {path.name for path in (state / "segments").iterdir()}
    unknown = {
        "notes.txt": b"mine",
        f"q2-p0-7-{2 + COMMITS}.seg": b"rows that are in another file",
        "q2-p9-0-1.seg": b"a partition that is not there",
        "q2-p0-1000000-99999.seg": b"begun in a group that is far away",
        "q77-p0-0-1.seg": b"a queue that was never there",
        "staged-77-beef-1.seg": b"staged for a queue that was never there",
    }
    for _ in range(2):
        for name, data in unknown.items():
            (state / "segments" / name).write_bytes(data)
        assert contents(state) == list(range(COMMITS))
        assert {path.name for path in (state / "segments").iterdir()} == known
    aside = {path.name: path.read_bytes() for path in (state / "set_aside").iterdir()}
    assert aside == unknown | {f"{name}.1": data for name, data in unknown.items()}


def test_files_that_are_known_to_be_done_with_are_removed(state: Path) -> None:
    with StateClient.open(state) as client:
        client.create_queue("dropped", NUMBERS, 1)
        dropped = client.store.queues()[-1].queue_id
        client.drop_queue("dropped")
        client.queue("q").trim(0, 5)
        version = client.stats()["total"]["version"]
        queue_id = client.store.queues()[0].queue_id
    known = {path.name for path in (state / "segments").iterdir()}
    for name in (
        f"q{queue_id}-p0-4-1.seg",
        f"q{queue_id}-p0-{COMMITS}-{version + 1}.seg",
        f"q{dropped}-p0-0-{version}.seg",
        f"staged-{queue_id}-beef-1.seg",
    ):
        (state / "segments" / name).write_bytes(b"")
    LocalStore(state).close()
    assert {path.name for path in (state / "segments").iterdir()} == known
    assert not (state / "set_aside").exists()


# --- the folder itself ---


@pytest.mark.parametrize("name", ["rocks", "segments"])
def test_file_in_place_of_a_folder_is_refused(state: Path, name: str) -> None:
    shutil.rmtree(state / name)
    (state / name).write_text("")
    assert name in refused(state, StoreNotWritable).message


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folder_is_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    before = os.umask(0)
    try:
        make(folder)
        with StateClient.open(folder) as client:
            commit(client, 1)
    finally:
        os.umask(before)
    for path in (folder, folder / "rocks", folder / "segments"):
        assert permissions(path) == 0o700
    files = [path for path in (*folder.iterdir(), *(folder / "segments").iterdir()) if path.is_file()]
    assert {path.name for path in files} > {"LOCK", "FORMAT", MARKER}
    assert {permissions(path) for path in files} == {0o600}
    (folder / "logs").mkdir()
    for path in (folder, folder / "rocks", folder / "segments"):
        path.chmod(0o755)
    LocalStore(folder).close()
    for path in (folder, folder / "rocks", folder / "segments"):
        assert permissions(path) == 0o700, "tightened when it is opened again"


def test_folder_with_files_of_others_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("")
    tmp_path.chmod(0o755)
    for _ in range(2):
        LocalStore(tmp_path).close()
        assert permissions(tmp_path) == 0o755
    assert permissions(tmp_path / "rocks") == permissions(tmp_path / "segments") == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a moment")
def test_store_of_another_user_is_refused_in_one_line(state: Path) -> None:
    LocalStore(state).close()
    os.seteuid(65534)
    try:
        for attempt in (StateClient.open, commands.open_existing):
            with pytest.raises(StoreNotWritable, match="Permission denied"):
                attempt(str(state))
    finally:
        os.seteuid(0)


def test_marker_is_synced_now_and_then(tmp_path: Path) -> None:
    make(tmp_path)
    with StateClient.open(tmp_path) as client:
        for number in range(2):
            before = client.stats()["total"]["marker_syncs"]
            commit(client, number)
            wait_until(lambda before=before: client.stats()["total"]["marker_syncs"] == before + 1)
