"""Threads that others depend on: none of them dies alone.

A thread that ends with an exception is not noticed: its process lives on, whatever waits for the thread waits for ever,
and health checks still succeed. So each thread that something else waits for is started here. When one dies, the reason
is logged, and the dying thread itself calls ``on_death`` of whoever started it, which decides:

- a daemon turns its health off and ends its process with an error (``end_process``), so that it is started again;
- a worker stops, and its ``run`` raises the error;
- a store or a client inside a user's process, which is not ours to end, raises the error from every call.

A thread whose function returns has done its work, and ``on_death`` is not called.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from shuffle.errors import ThreadDied
from shuffle.support.exit_codes import EXIT_FAILED
from shuffle.support.logs import get_logger

OnDeath = Callable[[ThreadDied], None]
"""A function that is called once, by the thread that dies. It must not wait for that thread."""

AT_EXIT_S_MAX = 0.5
"""The most seconds for what is registered to be done when a process ends."""

_alive: dict[threading.Thread, None] = {}
_log = get_logger(__name__)


def start_vital(target: Callable[[], object], name: str, on_death: OnDeath) -> threading.Thread:
    """Starts a thread that runs ``target``, and calls ``on_death`` if that raises anything.

    It inherits the context of its caller, so its log lines name the same worker.
    """
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(_run, target, name, on_death), name=name, daemon=True)
    thread.start()
    return thread


def _run(target: Callable[[], object], name: str, on_death: OnDeath) -> None:
    thread = threading.current_thread()
    _alive[thread] = None
    try:
        target()
    except BaseException as error:
        died = _death_of(name, error)
        _log.error("a thread that others depend on has died", thread=name, error=died)
        on_death(died)
        # What is no ordinary exception may be meant for whatever runs the threads; SystemExit ends a thread silently in
        # Python itself, too.
        if not isinstance(error, Exception | SystemExit):
            raise
    finally:
        _alive.pop(thread, None)


def _death_of(name: str, error: BaseException) -> ThreadDied:
    """The error for ``on_death``. It does not have ``error`` as its cause: even if that would pass by itself, the
    thread is gone."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return ThreadDied(f"the thread {name} has died of {reason}{_raised_at(error)}", thread=name)


def alive() -> list[str]:
    """The names of the threads of this process that were started here and live."""
    return sorted(thread.name for thread in list(_alive))


def end_process(error: Exception) -> NoReturn:
    """Ends this process at once, whatever its other threads do, and prints the reason as its last line."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)


def leave(code: int) -> NoReturn:
    """Ends this process with ``code`` when its work is done, without taking the interpreter apart.

    Threads of ours and of Flight still run then. One that writes a line at the wrong moment makes Python abort, and
    whatever started this process would take that for the reason of its end. What is to be done at exit has
    ``AT_EXIT_S_MAX`` seconds: a server of Flight waits there for every call that a client keeps open.
    """
    at_exit = threading.Thread(target=atexit._run_exitfuncs, name="at-exit", daemon=True)
    at_exit.start()
    at_exit.join(AT_EXIT_S_MAX)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _raised_at(error: BaseException) -> str:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None:
        return ""
    code = at.tb_frame.f_code
    return f" (in {code.co_name}, line {at.tb_lineno} of {os.path.basename(code.co_filename)})"
