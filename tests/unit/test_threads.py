"""Every thread of the product, and what becomes of those who depend on it when it dies.

A new one must be decided upon, too: this list is compared with the code.
"""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.test_tidy import name_of, sources

PRODUCT = ("shuffle/", "mapper/", "reducer/", "statestore/", "spark_connector/", "pyspark_shuffle/")

VITAL = "start_vital"
STARTERS = {
    VITAL,
    "Thread",
    "Timer",
    "InheritableThread",
    "ThreadPoolExecutor",
    "ProcessPoolExecutor",
    "start_new_thread",
}

DECIDED: dict[tuple[str, str], tuple[int, str]] = {
    ("shuffle/support/vital_threads.py", "Thread"): (
        2,
        "what start_vital starts, and what is done at exit: the process ends in a moment, whatever becomes of it",
    ),
    # The store.
    ("statestore/local/local.py", VITAL): (
        2,
        "the writer and the keeper of logs: the store is marked failed; a daemon ends",
    ),
    ("statestore/server/headroom.py", "Thread"): (1, "tries whether threads can be had at all, and is waited for"),
    ("statestore/server/lane_server.py", VITAL): (1, "the lane: the daemon ends"),
    ("statestore/server/session_registry.py", VITAL): (1, "the reaper of sessions: the daemon ends"),
    ("statestore/server/lane_server.py", "ThreadPoolExecutor"): (
        1,
        "sender threads: what goes wrong ends the connection it was done for",
    ),
    ("statestore/server/control_server.py", "ThreadPoolExecutor"): (
        2,
        "gRPC's calls and health: what goes wrong is the call's answer",
    ),
    # Its clients, in anybody's process.
    ("statestore/remote/remote.py", VITAL): (1, "the renewal of the session: every call of the client raises"),
    ("statestore/remote/flight_client.py", VITAL): (1, "the deadlines of streams: every call of the client raises"),
    ("statestore/remote/read_ahead.py", "ThreadPoolExecutor"): (
        1,
        "reading ahead: who needs the rows asks again, and learns",
    ),
    # Mappers and reducers.
    ("mapper/instance.py", VITAL): (2, "ingestion and trim: the mapper process ends"),
    ("reducer/daemon.py", VITAL): (2, "reduce and commit, and a reducer beside others: the process ends"),
    ("reducer/fetch.py", VITAL): (1, "a fetcher: the reducer ends"),
    ("reducer/exporter/daemon.py", VITAL): (1, "the exporter of one partition: the process ends"),
    ("shuffle/discovery.py", VITAL): (2, "lease and directory: the worker ends"),
    ("shuffle/support/metrics.py", VITAL): (1, "the metrics: the worker, or the store's daemon, ends"),
    ("statestore/client/appender.py", VITAL): (1, "an appender: every call and every future of it raises the error"),
    # The controller.
    ("shuffle/run/growth.py", "Thread"): (1, "looks for new partitions once: the next look is made by another"),
    ("shuffle/run/controller.py", "ThreadPoolExecutor"): (
        1,
        "the check of map: its error is raised in the main thread",
    ),
    ("shuffle/run/status.py", "ThreadPoolExecutor"): (
        1,
        "questions to mappers: an error is raised in who asked for the status",
    ),
    ("shuffle/support/slow_wait.py", "Timer"): (1, "says what is waited for; without it nothing is said"),
    ("shuffle/run/launch.py", VITAL): (1, "who watches the parent where the kernel does not: the process ends"),
    ("shuffle/support/flight.py", "Thread"): (
        1,
        "the end of a server: waited for, for a set time; nobody depends on it",
    ),
    # Spark's processes: the error is raised in the query, and Spark does what it does about errors.
    ("spark_connector/reduce.py", "Thread"): (1, "a fetcher: the feed raises its error in the task"),
    ("spark_connector/source/query_lease.py", "Thread"): (
        1,
        "the lease of a query: it runs out, and each commit of positions looks whose the processor is",
    ),
    ("spark_connector/source/reader.py", "Thread"): (1, "fetching ahead: its error is raised in the task"),
    ("spark_connector/sink/staging.py", "ThreadPoolExecutor"): (1, "staging: its error is raised in the task"),
    ("spark_connector/engine.py", "InheritableThread"): (1, "the one Spark job: its end is raised in the command"),
}
"""By file and by what starts it: how many there are, and what happens when one dies."""


def started(tree: ast.AST) -> Counter[str]:
    """What starts threads in this code, and how often."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        names: list[ast.expr] = []
        if isinstance(node, ast.Call):
            names = [node.func]
        elif isinstance(node, ast.ClassDef):
            names = list(node.bases)
        for name in names:
            last = name.attr if isinstance(name, ast.Attribute) else name.id if isinstance(name, ast.Name) else ""
            if last in STARTERS:
                found[last] += 1
    return found


def test_every_thread_is_decided_upon() -> None:
    found = {
        (name_of(path), starter): count
        for path in sources()
        if name_of(path).startswith(PRODUCT)
        for starter, count in started(ast.parse(path.read_text(encoding="utf-8"))).items()
    }
    decided = {place: count for place, (count, _) in DECIDED.items()}
    assert found == decided, "decide what happens when it dies (shuffle/support/vital_threads.py), then say so here"


@pytest.mark.parametrize(
    ("text", "starter"),
    [
        ("threading.Thread(target=f).start()", "Thread"),
        ("class Worker(threading.Thread): pass", "Thread"),
        ("Thread(target=f)", "Thread"),
        ("with ThreadPoolExecutor(4) as pool: pass", "ThreadPoolExecutor"),
        ("futures.ThreadPoolExecutor(4)", "ThreadPoolExecutor"),
        ("threading.Timer(1, f).start()", "Timer"),
        ("start_vital(f, 'name', g)", "start_vital"),
    ],
)
def test_thread_is_seen_in_every_spelling(text: str, starter: str) -> None:
    assert started(ast.parse(text)) == {starter: 1}


def test_annotation_is_not_taken_for_a_thread() -> None:
    assert not started(ast.parse("x: threading.Thread | None = None\nthreading.current_thread()"))
