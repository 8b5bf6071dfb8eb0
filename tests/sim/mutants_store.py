"""Planted bugs of the state store. Every function here is one; see ``mutants``."""

from __future__ import annotations

import contextlib
from typing import Any

from shuffle.errors import ShuffleError as _ShuffleError
from shuffle.statestore.engine import engine as _engine
from shuffle.statestore.engine.conflicts import ConflictHistory as _History
from shuffle.statestore.engine.engine import Engine as _Engine
from shuffle.statestore.engine.ordered_table import Partition as _Partition
from shuffle.statestore.engine.ordered_table import PartitionPlan as _Plan
from shuffle.statestore.engine.sessions import Sessions as _Sessions
from shuffle.statestore.local.local import LocalStore as _LocalStore


class _Lazy:
    """Keys that sync whenever they are written the next time, and not when they are told to."""

    def __init__(self, keys: Any) -> None:
        self._keys = keys

    def __getattr__(self, name: str) -> Any:
        return getattr(self._keys, name)

    def sync(self) -> None: ...


def acknowledge_before_sync(patch: Any) -> None:
    original = _Engine.persist

    def persist(self: Any, group: Any) -> None:
        keys, self._keys = self._keys, _Lazy(self._keys)
        try:
            original(self, group)
        finally:
            self._keys = keys

    patch(_Engine, "persist", persist)


def marker_written_before_the_sync(patch: Any) -> None:
    """The marker then names commits that a crash takes back, and the store refuses itself."""
    original = _LocalStore._write_group

    def write_group(self: Any, waiting: Any) -> None:
        persist = self._engine.persist

        def early(group: Any) -> None:
            if group.changed:
                self._marker.acknowledge(self._engine.version)
            persist(group)

        self._engine.persist = early
        try:
            original(self, waiting)
        finally:
            del self._engine.persist

    patch(_LocalStore, "_write_group", write_group)


def segments_not_synced(patch: Any) -> None:
    def write_files(self: Any, writes: Any, queue_id: int) -> None:
        for write in writes:
            if write.create:
                self._segments.create(write.name, self.catalogue.queue(queue_id).header)
            self._segments.append(write.name, write.offset, write.parts)

    patch(_Engine, "_write_files", write_files)


def positions_written_before_the_rows(patch: Any) -> None:
    original = _Engine._write_files

    def write_files(self: Any, writes: Any, queue_id: int) -> None:
        for plan in list(self._group.partitions.values()):
            rows = plan.rows()
            self._keys.write([([key for key, _ in rows], [value for _, value in rows])])
        self._keys.sync()
        original(self, writes, queue_id)

    original_persist = _Engine.persist

    def persist(self: Any, group: Any) -> None:
        self._group = group
        original_persist(self, group)

    patch(_Engine, "_write_files", write_files)
    patch(_Engine, "persist", persist)


def failed_append_acknowledged(patch: Any) -> None:
    original = _Engine._write_files

    def write_files(self: Any, writes: Any, queue_id: int) -> None:
        with contextlib.suppress(_ShuffleError):
            original(self, writes, queue_id)

    patch(_Engine, "_write_files", write_files)


def conflicts_not_checked(patch: Any) -> None:
    patch(_History, "conflict", lambda self, version, keys, ranges: None)


def conflict_with_the_newest_commit_missed(patch: Any) -> None:
    original = _History.conflict

    def conflict(self: Any, version: int, keys: Any, ranges: Any) -> Any:
        return original(self, version + 1, keys, ranges)

    patch(_History, "conflict", conflict)


def history_forgotten_too_soon(patch: Any) -> None:
    def prepare(self: Any, requests: Any, oldest_version: int) -> Any:
        self.history._commits.clear()
        self.history._last_write.clear()
        self.history._keys_count = 0
        return original(self, requests, oldest_version)

    original = _Engine.prepare
    patch(_Engine, "prepare", prepare)


def producers_forgotten(patch: Any) -> None:
    patch(_Plan, "repeated", lambda self, producer, sequence: None)


def producers_forgotten_by_a_restart(patch: Any) -> None:
    original = _Partition.load

    def load(self: Any, rows: Any) -> None:
        original(self, rows)
        self.producers.clear()

    patch(_Partition, "load", load)


def version_not_stored(patch: Any) -> None:
    """After a restart versions are given a second time."""
    original = _Engine.prepare

    def prepare(self: Any, requests: Any, oldest_version: int) -> Any:
        group = original(self, requests, oldest_version)
        if group.changed:
            group.puts.pop()
        return group

    patch(_Engine, "prepare", prepare)


def tail_cut_too_short(patch: Any) -> None:
    original = _engine.clean_files

    def clean_files(segments: Any, staged: Any, version: int, catalogue: Any, partitions: Any, now_ms: int) -> Any:
        set_aside = original(segments, staged, version, catalogue, partitions, now_ms)
        for partition in partitions.values():
            for segment in partition.segments[-1:]:
                segments.truncate(segment.name, segment.size_bytes - 8)
        return set_aside

    patch(_engine, "clean_files", clean_files)


def rolled_back_group_shown(patch: Any) -> None:
    """A group that could not be written is answered as refused, and shown all the same."""
    original = _LocalStore._finish_failed

    def finish_failed(self: Any, waiting: Any, group: Any, error: Any) -> None:
        if not group.reached_rocks:
            self._publish(group)
        original(self, waiting, group, error)

    patch(_LocalStore, "_finish_failed", finish_failed)


def failed_group_kept_in_the_history(patch: Any) -> None:
    """What the store itself did until the simulator found it: every retry of a refused commit was refused."""
    patch(_History, "take_back", lambda self, version: None)
    original = _Engine._undo

    def undo(self: Any, group: Any) -> None:
        version = self.version
        original(self, group)
        self.version = version

    patch(_Engine, "_undo", undo)


def unknown_told_as_refused(patch: Any) -> None:
    """After a failed sync the store says that nothing happened, and goes on."""

    def finish_failed(self: Any, waiting: Any, group: Any, error: Any) -> None:
        for pending, answer in zip(waiting, group.results, strict=True):
            pending.finish(answer if isinstance(answer, _ShuffleError) else error)

    patch(_LocalStore, "_finish_failed", finish_failed)


def moment_outlives_nothing(patch: Any) -> None:
    """A transaction whose session is over may still commit: the moment it reads at is simply taken anew."""
    original = _Sessions.drop

    def drop(self: Any, session_id: int, view_id: int) -> Any:
        from shuffle.statestore.store import ReadView

        return original(self, session_id, view_id) or ReadView(-1, 0)

    patch(_Sessions, "drop", drop)
    patch(_History, "conflict", _without_floor)


def _without_floor(self: Any, version: int, keys: Any, ranges: Any) -> Any:
    last_write = self._last_write
    for key in keys:
        written = last_write.get(key)
        if written is not None and written > version:
            return "a key it read was written"
    return None
