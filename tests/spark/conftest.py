"""What the tests of the Spark connector share: one Spark session, one state store daemon, and rows to compare."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from shuffle.examples.local import LocalSystem
from shuffle.examples.spark_pipeline import Mappers
from shuffle.statestore import StateClient
from tests.spark.programs import KilledDrivers, PipelineRun

ROOT = Path(__file__).resolve().parent.parent.parent

JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
"""For JVMs that live for seconds: what the better compiler would cost, they would never earn."""


@pytest.fixture(scope="session", autouse=True)
def _environment() -> None:
    """Of all Spark processes that tests start: they find the project, and start quickly."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ["JDK_JAVA_OPTIONS"] = JAVA_OPTIONS
    # Spark talks to its Python workers over ports that it takes for a moment. One of those may just have been that of a
    # daemon which a test has killed, and whoever still looks for that daemon would be taken for the worker: Spark reads
    # the first bytes of a gRPC connection as the length of a secret, and ends the query with "Java heap space".
    os.environ["PYSPARK_UDS_MODE"] = "true"


@pytest.fixture(scope="session", autouse=True)
def _started_early(request: pytest.FixtureRequest, _environment: None) -> None:
    """The pipeline takes a minute. It starts at once, beside the tests before its own."""
    if any("pipeline" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("pipeline")


@pytest.fixture(scope="session")
def killed_drivers(system: LocalSystem, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KilledDrivers]:
    with KilledDrivers(system, tmp_path_factory.mktemp("killed")) as started:
        yield started


@pytest.fixture(scope="session")
def pipeline(_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the one run of the pipeline, whichever of pytest's processes has started it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "pipeline"
    try:
        folder.mkdir()
    except FileExistsError:
        yield folder
        return
    with PipelineRun(folder):
        yield folder
        PipelineRun.result(folder)  # Another process of pytest may still wait for it.


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def connect_port() -> int:
    """Where the one session also serves Spark Connect."""
    return _free_port()


@pytest.fixture(scope="session")
def spark(_environment: None, connect_port: int) -> Iterator[SparkSession]:
    """One for all. The connector itself needs none of these settings; a task may fail twice, so that a Python worker
    can be killed without ending its query."""
    session = (
        SparkSession.builder.master("local[2,3]")
        .appName("tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.plugins", "org.apache.spark.sql.connect.SparkConnectPlugin")
        .config("spark.connect.grpc.binding.port", str(connect_port))
        .config("spark.sql.session.timeZone", "Europe/Berlin")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.python.filterPushdown.enabled", "true")
        .config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        .config("spark.driver.memory", "1g")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSystem]:
    with LocalSystem(tmp_path_factory.mktemp("system")) as running:
        yield running


@pytest.fixture
def state(system: LocalSystem) -> Iterator[StateClient]:
    with system.connect() as client:
        yield client


@pytest.fixture
def start_mappers(system: LocalSystem) -> Iterator[Callable[[dict[str, Any], int], Mappers]]:
    started: list[Mappers] = []

    def start(spec: dict[str, Any], count: int) -> Mappers:
        started.append(Mappers(system, system.write_spec(spec), count))
        return started[-1]

    yield start
    for mappers in started:
        mappers.close()
