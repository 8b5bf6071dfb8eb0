"""What all tests share: marks by folder, hypothesis profiles, and an environment in which Spark starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from shuffle.support import native

ROOT = Path(__file__).resolve().parent.parent
MARK_OF_FOLDER = {"kafka": "kafka", "process": "process", "spark": "spark"}

# Shared machines are slow now and then: a slow example is not a failure, a hanging one meets the timeout.
settings.register_profile("here", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("here"), max_examples=1000)
# New examples are for whoever can look into what they find. Continuous integration says whether a change is sound: it
# tries the same ones each time, as hypothesis itself would have it there.
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, database=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "here"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(ROOT).parts[1]
        if folder in MARK_OF_FOLDER:
            item.add_marker(MARK_OF_FOLDER[folder])


@pytest.fixture(params=["compiled", "python"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test with the compiled kernels, and once more without them."""
    monkeypatch.setenv(native.SWITCH, "on" if request.param == "compiled" else "off")
    native.kernels.cache_clear()
    yield
    native.kernels.cache_clear()


@pytest.fixture(scope="session")
def spark_environment() -> None:
    """Let Spark find Java and this Python. `make` has set both; this is for pytest started by hand."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    found = subprocess.run(
        [sys.executable, ROOT / "tools" / "java_home.py"], capture_output=True, text=True, timeout=120, check=False
    )
    if found.returncode != 0:
        pytest.fail(f"no Java for Spark:\n{found.stderr}", pytrace=False)
    os.environ["JAVA_HOME"] = found.stdout.strip()


@pytest.fixture(scope="session", autouse=True)
def _spark_environment_where_needed(request: pytest.FixtureRequest) -> None:
    """Tests of Spark need not ask; the others do not pay for the search of a Java."""
    if any(item.get_closest_marker("spark") for item in request.session.items):
        request.getfixturevalue("spark_environment")
