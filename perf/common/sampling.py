"""Samples every worker of a processor twice a second, each from a thread of its own.

A call to a worker that is paused blocks, and must not delay the samples of the others. Mappers are sampled by their
``status`` over Flight; reducers by their Prometheus metrics, as a monitoring system would. Discovery has the addresses.
"""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from shuffle.durable.tables import mappers_group, reducers_group
from shuffle.errors import ShuffleError
from shuffle.statestore import Member, StateClient
from shuffle.support import flight

PERIOD_S = 0.5
CALL_TIMEOUT_S = 1.0
_METRIC = re.compile(r"^shuffle_(reduced_rows|reduced_bytes)_total\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass
class Series:
    """The samples of one worker, as columns of the same length. Times are those of the monotonic clock."""

    times_s: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, time_s: float, found: dict[str, float]) -> None:
        for name, value in found.items():
            self.values.setdefault(name, []).append(value)
        self.times_s.append(time_s)

    def last(self, name: str) -> float:
        values = self.values.get(name)
        return values[-1] if values else 0.0

    def at(self, name: str, times_s: Any) -> Any:
        """The values at any times, interpolated between samples."""
        count = len(self.times_s)
        return np.interp(times_s, self.times_s[:count], self.values[name][:count])

    def rate(self, name: str, begin_s: float, end_s: float) -> float:
        """The rate of a counter per second between two times."""
        first, last = self.at(name, [begin_s, end_s])
        return float(last - first) / (end_s - begin_s)

    def between(self, name: str, begin_s: float, end_s: float) -> list[float]:
        """The samples that were taken between two times."""
        pairs = zip(list(self.times_s), self.values[name], strict=False)
        return [value for time_s, value in pairs if begin_s <= time_s <= end_s]


class Sampler:
    """``mappers[i]`` has read_rows, done_rows and window_bytes; ``reducers[i]`` has reduced_rows and reduced_bytes.

    The counters of a mapper that does not respond stay as they were, and the size of its window is unknown (NaN). The
    counters of a reducer go on from those of its last instance.
    """

    def __init__(self, state: StateClient, processor: str, mapper_count: int, reducer_count: int) -> None:
        self._state = state
        self._groups = {"mapper": mappers_group(processor), "reducer": reducers_group(processor)}
        self.mappers = [Series() for _ in range(mapper_count)]
        self.reducers = [Series() for _ in range(reducer_count)]
        self._youngest: dict[tuple[str, int], Member] = {}
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._discover, name="discover", daemon=True)]
        for role, series in (("mapper", self.mappers), ("reducer", self.reducers)):
            for index, one in enumerate(series):
                target = _Mapper(one) if role == "mapper" else _Reducer(one)
                self._threads.append(
                    threading.Thread(target=self._look, args=(role, index, target), name=f"{role}-{index}", daemon=True)
                )

    def __enter__(self) -> Sampler:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def seen(self, role: str) -> int:
        """The number of registered workers of that role."""
        return sum(1 for found, _ in self._youngest if found == role)

    def _discover(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            youngest: dict[tuple[str, int], Member] = {}
            try:
                for role, group in self._groups.items():
                    members = self._state.leases.members(group)
                    for member in sorted(members, key=lambda member: int(member.attributes["since_ns"])):
                        youngest[role, int(member.attributes["index"])] = member
            except ShuffleError:
                continue
            self._youngest = youngest

    def _look(self, role: str, index: int, worker: _Mapper | _Reducer) -> None:
        next_s = time.monotonic()
        while not self._stopping.wait(max(0.0, next_s - time.monotonic())):
            next_s = max(next_s + PERIOD_S, time.monotonic())
            worker.look(self._youngest.get((role, index)))
        worker.close()


class _Mapper:
    def __init__(self, series: Series) -> None:
        self._series = series
        self._address = ""
        self._connection: Any = None

    def look(self, member: Member | None) -> None:
        status = None if member is None else self._ask(member.attributes["address"], member.name)
        if status is None:
            last = {name: self._series.last(name) for name in ("read_rows", "done_rows")}
            self._series.add(time.monotonic(), {**last, "window_bytes": float("nan")})
            return
        found = {
            "read_rows": float(status["next_input_index"]),
            "done_rows": float(status["local_input_row_index"]),
            "window_bytes": float(status["window_bytes"]),
        }
        self._series.add(time.monotonic(), found)

    def _ask(self, address: str, guid: str) -> dict[str, Any] | None:
        if address != self._address:
            self.close()
            self._address, self._connection = address, flight.connect(address)
        try:
            connection = self._connection
            body = flight.do_action(connection, "status", guid.encode(), who=address, timeout_s=CALL_TIMEOUT_S)
            found: dict[str, Any] = json.loads(body)
            return found
        except ShuffleError:
            return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


class _Reducer:
    def __init__(self, series: Series) -> None:
        self._series = series
        self._instance = ""
        self._before: dict[str, float] = {}
        """The counters of all earlier instances together."""

    def look(self, member: Member | None) -> None:
        totals = {name: self._series.last(name) for name in ("reduced_rows", "reduced_bytes")}
        if member is not None:
            if member.name != self._instance:
                self._instance, self._before = member.name, totals
            found = self._ask(member.attributes["metrics"])
            totals = {name: self._before[name] + found[name] for name in totals} if found else totals
        self._series.add(time.monotonic(), totals)

    def _ask(self, address: str) -> dict[str, float] | None:
        try:
            with urllib.request.urlopen(address, timeout=CALL_TIMEOUT_S) as answer:
                text = answer.read().decode()
        except (OSError, urllib.error.URLError):
            return None
        found = {name: float(value) for name, value in _METRIC.findall(text)}
        return found if len(found) == 2 else None

    def close(self) -> None:
        pass
