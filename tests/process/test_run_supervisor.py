"""The controller's children as real processes: killed, stuck, failing, orphaned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from shuffle.run.supervisor import Child, RestartPolicy, Supervisor
from shuffle.support.exit_codes import EXIT_USER_CODE
from tests import waiting
from tests.waiting import pause

WAIT_S = 30.0
wait_until = partial(waiting.wait_until, wait_s=WAIT_S)

ROOT = Path(__file__).resolve().parents[2]

SLEEPER = """
import sys, time
print("up", flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""
FAILING = """
import sys
print("some log line", file=sys.stderr)
print("error: job: mapper 0: ValueError: bad row", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    for name, text in (("sleeper", SLEEPER), ("stubborn", STUBBORN), ("failing", FAILING)):
        (tmp_path / f"{name}_worker.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    supervisor = Supervisor(stop_s_max=1.0)
    yield supervisor
    supervisor.kill()


def child_of(tmp_path: Path, name: str) -> Child:
    policy = RestartPolicy(delay_s_min=0.01, delay_s_max=0.02)
    return Child(name, f"{name}_worker", list, tmp_path / "logs" / f"{name}.log", policy)


def is_up(child: Child) -> bool:
    return child.log_path.exists() and b"up" in child.log_path.read_bytes()[child.log_begin :]


def test_child_killed_is_started_again(tmp_path: Path, supervisor: Supervisor) -> None:
    child = supervisor.add(child_of(tmp_path, "sleeper"))
    wait_until(lambda: is_up(child))
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: bool(supervisor.tick(time.monotonic())))
    assert child.last_error == "killed by SIGKILL"
    wait_until(lambda: (supervisor.tick(time.monotonic()), child.running)[1])
    assert child.pid != first
    assert child.policy.restarts == 1


def test_child_that_fails_is_reported_with_the_error_of_the_users_code(tmp_path: Path, supervisor: Supervisor) -> None:
    child = supervisor.add(child_of(tmp_path, "failing"))
    wait_until(lambda: (supervisor.tick(time.monotonic()), child.policy.keeps_dying)[1])
    assert child.last_code == EXIT_USER_CODE
    assert child.last_error == "job: mapper 0: ValueError: bad row"
    assert supervisor.keeps_dying() == [child]


def test_children_stop_on_sigterm_and_the_stubborn_are_killed(tmp_path: Path, supervisor: Supervisor) -> None:
    children = [supervisor.add(child_of(tmp_path, name)) for name in ("sleeper", "stubborn")]
    wait_until(lambda: all(map(is_up, children)))
    processes = [child.process for child in children]
    supervisor.stop(children)
    assert [process.returncode for process in processes if process is not None] == [-signal.SIGTERM, -signal.SIGKILL]
    assert supervisor.children == []


def test_child_paused_with_sigstop_is_stopped_too(tmp_path: Path, supervisor: Supervisor) -> None:
    child = supervisor.add(child_of(tmp_path, "sleeper"))
    wait_until(lambda: is_up(child))
    process = child.process
    assert process is not None
    pause(process.pid)
    supervisor.stop([child])
    assert process.returncode == -signal.SIGTERM


def test_children_die_with_a_controller_that_is_killed(tmp_path: Path, supervisor: Supervisor) -> None:
    script = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from shuffle.run.supervisor import Child, Supervisor
        supervisor = Supervisor()
        child = supervisor.add(Child("sleeper", "sleeper_worker", lambda: [], Path(sys.argv[1]) / "orphan.log"))
        while b"up" not in child.log_path.read_bytes():
            time.sleep(0.01)
        print(child.pid, flush=True)
        time.sleep(600)
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, env=environment, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    wait_until(lambda: not _alive(pid))


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
