"""Jars from Maven's repository, fetched once, each compared with the checksum in a list of this repository.

A list has a line for each jar: ``group:artifact:version`` as Maven names it, and the SHA-256 of its file. Jars are
fetched with the Ivy that comes with PySpark, from where Ivy finds artifacts of Maven by itself;
``SHUFFLE_MAVEN_REPOSITORY`` names another repository, for example a mirror. They are kept in
``$XDG_CACHE_HOME/streaming-shuffle`` (``~/.cache``), outside of the repository, in a folder for each list.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.sax.saxutils import quoteattr

from tools import java_home

REPOSITORY_VARIABLE = "SHUFFLE_MAVEN_REPOSITORY"
FETCH_SECONDS_MAX = 600


class NoJars(Exception):
    """The jars cannot be had here; the message says why."""


@dataclass(frozen=True)
class Jar:
    """One artifact of Maven, and the checksum of its file."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"


@dataclass(frozen=True)
class JarList:
    """The jars of one thing. ``what`` is its name for people, ``name`` that of its folder."""

    what: str
    name: str
    path: Path

    def wanted(self) -> list[Jar]:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        rows = (line.replace(":", " ").split() for line in lines if line and not line.startswith("#"))
        return [Jar(group, artifact, version, sha256) for group, artifact, version, sha256 in rows]

    @property
    def folder(self) -> Path:
        """The folder of the jars, whether they are there or not. Its name has the checksum of the list."""
        cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cached / "streaming-shuffle" / f"{self.name}-{hashlib.sha256(self.path.read_bytes()).hexdigest()[:12]}"

    def fetched(self) -> Path:
        """The folder of the jars, which are fetched if they are not there; ``NoJars`` if they cannot be had."""
        folder = self.folder
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.parent / f"{self.name}.lock"):
            if not folder.is_dir():  # Another process may have fetched them while this one waited.
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as work:
                    self._fetch(Path(work))
                    (Path(work) / "jars").rename(folder)
        return folder

    def _fetch(self, work: Path) -> None:
        """The jars into ``work``/jars, with checksums verified."""
        command = [java(), "-jar", str(_ivy(self.what)), *_ivy_files(work, self.wanted())]
        try:
            done = subprocess.run(
                command, cwd=work, capture_output=True, text=True, timeout=FETCH_SECONDS_MAX, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoJars(f"the jars of {self.what} cannot be fetched: {error}") from error
        if done.returncode != 0:
            last = " ".join((done.stdout + done.stderr).split())[-600:]
            raise NoJars(
                f"the jars of {self.what} cannot be fetched (set {REPOSITORY_VARIABLE} if this machine needs a mirror "
                f"of Maven's repository): {last}"
            )
        for jar in self.wanted():
            content = (work / "jars" / jar.file_name).read_bytes()
            if hashlib.sha256(content).hexdigest() != jar.sha256:
                raise NoJars(f"{jar.file_name} is not the file that {self.path.name} names: its checksum differs")


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ivy_files(work: Path, jars: list[Jar]) -> list[str]:
    """Write the files that tell Ivy what to fetch to ``work``; returns its arguments."""
    root = os.environ.get(REPOSITORY_VARIABLE)
    at = f" root={quoteattr(root)}" if root else ""
    (work / "settings.xml").write_text(
        f'<ivysettings><settings defaultResolver="maven"/><resolvers><ibiblio name="maven" m2compatible="true"'
        f' usepoms="false"{at}/></resolvers></ivysettings>'
    )
    entries = "".join(
        f'<dependency org="{jar.group}" name="{jar.artifact}" rev="{jar.version}" transitive="false">'
        f'<artifact name="{jar.artifact}" type="jar"/></dependency>'
        for jar in jars
    )
    (work / "ivy.xml").write_text(
        '<ivy-module version="2.0"><info organisation="shuffle" module="jars"/>'
        f"<dependencies>{entries}</dependencies></ivy-module>"
    )
    options = ["-settings", "settings.xml", "-cache", str(work / "cache"), "-ivy", "ivy.xml"]
    return [*options, "-retrieve", "jars/[artifact]-[revision].[ext]"]


@cache
def java() -> str:
    """The ``java`` to run jars with; ``NoJars`` if there is none."""
    home = java_home.find()
    if home is None:
        raise NoJars("there is no Java of version 17 or later; `make setup` installs one")
    return str(home / "bin" / "java")


def _ivy(what: str) -> Path:
    pyspark = importlib.util.find_spec("pyspark")
    places = pyspark.submodule_search_locations if pyspark else None
    found = sorted(Path(place) / "jars" for place in places or ())
    ivies = [ivy for jars in found for ivy in sorted(jars.glob("ivy-*.jar"))]
    if not ivies:
        raise NoJars(
            f"the jars of {what} are fetched with the Ivy of PySpark, which is not installed; run `make setup`"
        )
    return ivies[0]
