"""Structured logs on stderr: an event in words, and fields.

They are JSON lines when stderr is not a terminal or with ``SHUFFLE_LOG=json``, otherwise (or with ``SHUFFLE_LOG=text``)
short readable lines. ``SHUFFLE_LOG_LEVEL`` is debug, info (the default), warning or error.

    log = get_logger(__name__)
    log.info("window trimmed", entries=3, input_unread_row_index=1200)
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

VALUE_CHARS_MAX = 2_000
"""The most characters of one field of a log line; longer ones are cut, since people read the lines and there are
many."""

_ROOT = "shuffle-service"
_ERROR_FIELDS_MAX = 8

_stamp: ContextVar[int | str | None] = ContextVar("shuffle_log_index", default=None)
"""The index of the worker whose code runs, in a process with several."""


class Logger:
    """``log.info(event, **fields)`` over a standard logger."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: Any) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", event, extra={"event_fields": fields})


def get_logger(name: str) -> Logger:
    """The logger of one module. Until ``setup_logging`` was called, warnings and errors go to stderr as they are."""
    return Logger(logging.getLogger(f"{_ROOT}.{name}"))


def setup_logging(
    role: str,
    processor: str | None = None,
    index: int | None = None,
    stream: TextIO | None = None,
    level: str = "info",
) -> None:
    """Sets up this process's logs. Its role, processor and index are on every line. A second call replaces the first.

    ``level`` applies if the environment does not set one.
    """
    stream = stream or sys.stderr
    process = {"role": role, "processor": processor, "index": index}
    known = {name: value for name, value in process.items() if value is not None}
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonLines(known) if _wants_json(stream) else _ReadableLines(known))
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.propagate = False
    requested = os.environ.get("SHUFFLE_LOG_LEVEL", level).upper()
    root.setLevel(requested if requested in ("DEBUG", "INFO", "WARNING", "ERROR") else "INFO")


@contextmanager
def logged_as_worker(index: int | str) -> Iterator[None]:
    """Gives the log lines of the block, and of the vital threads that are started in it, the worker ``index``."""
    before = _stamp.set(index)
    try:
        yield
    finally:
        _stamp.reset(before)


def _wants_json(stream: TextIO) -> bool:
    requested = os.environ.get("SHUFFLE_LOG", "").lower()
    return requested == "json" or (requested != "text" and not stream.isatty())


class _JsonLines(logging.Formatter):
    def __init__(self, known: dict[str, Any]) -> None:
        super().__init__()
        self._known = known

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": at, "level": record.levelname.lower(), **self._known}
        if (index := _stamp.get()) is not None:
            line["index"] = index
        line["event"] = record.getMessage()
        line |= {name: _plain(value) for name, value in _fields_of(record).items() if name not in line}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)[-VALUE_CHARS_MAX:]
        return json.dumps(line, default=str, ensure_ascii=False)


class _ReadableLines(logging.Formatter):
    def __init__(self, known: dict[str, Any]) -> None:
        super().__init__()
        self._role = known["role"]
        self._index = known.get("index")

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        fields = " ".join(f"{name}={_text(value)}" for name, value in _fields_of(record).items())
        stamp = _stamp.get()
        index = self._index if stamp is None else stamp
        who = self._role + (f"[{index}]" if index is not None else "")
        line = f"{at} {who:<12} {level}{record.getMessage()}" + (f"  {fields}" if fields else "")
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "event_fields", {})
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value[:VALUE_CHARS_MAX]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"[:VALUE_CHARS_MAX]
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in list(value.items())[:_ERROR_FIELDS_MAX]}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value[:100]]
    return str(value)[:VALUE_CHARS_MAX]


def _text(value: Any) -> str:
    text = str(_plain(value))
    return json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() or c == '"' for c in text) else text
