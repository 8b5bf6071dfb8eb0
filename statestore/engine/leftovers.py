"""The segment files in a store that is being opened: which belong to it, and what is done with the others.

A file is removed only if it is certain that this store made it and that nothing needs it any more. Any other file may
be the only copy of its data, and is set aside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shuffle.statestore.engine.catalogue import Catalogue
from shuffle.statestore.engine.commit_group import GROUP_COMMITS_MAX
from shuffle.statestore.engine.ordered_table import Partition
from shuffle.statestore.engine.staged import StagedFiles
from shuffle.statestore.engine.storage import Segments

_SEGMENT = re.compile(r"q(\d+)-p(\d+)-(\d+)-(\d+)\.seg")
_STAGED = re.compile(r"staged-(\d+)-[0-9a-f]+-\d+\.seg")


def segment_name(queue_id: int, partition: int, row: int, version: int) -> str:
    """The name of the file that begins with ``row``, created by a group whose first commit is ``version``."""
    return f"q{queue_id}-p{partition}-{row}-{version}.seg"


def clean_files(
    segments: Segments,
    staged: StagedFiles,
    version: int,
    catalogue: Catalogue,
    partitions: Mapping[tuple[int, int], Partition],
    now_ms: int,
) -> list[str]:
    """Cut torn tails, keep staged files, remove obsolete ones; returns the names of the files that were set aside."""
    committed = {
        segment.name: segment.size_bytes for partition in partitions.values() for segment in partition.segments
    }
    unknown = []
    for name in list(segments.names()):
        if name in committed:
            if segments.size(name) > committed[name]:
                segments.truncate(name, committed[name])
            segments.close_file(name)
        elif staged.recover(name, now_ms):
            continue
        elif is_obsolete(name, version, catalogue, partitions):
            segments.remove(name)
        else:
            segments.set_aside(name)
            unknown.append(name)
    return unknown


def is_obsolete(name: str, version: int, catalogue: Catalogue, partitions: Mapping[tuple[int, int], Partition]) -> bool:
    """Says whether an unused file may be removed, in a store that was opened at ``version``."""
    staged = _STAGED.fullmatch(name)
    if staged is not None:
        # It has expired, or was cut off while it was written. If its queue is not of this store, neither is the file.
        return int(staged.group(1)) < catalogue.next_id
    segment = _SEGMENT.fullmatch(name)
    if segment is None:
        return False
    queue_id, index, row, begun = map(int, segment.groups())
    if queue_id not in catalogue.queues and queue_id not in catalogue.tables:
        return queue_id < catalogue.next_id  # The queue was dropped, or the table whose changelog it was.
    partition = partitions.get((queue_id, index))
    if partition is None:
        return False
    if begun <= version:
        return row < partition.begin  # Its rows were trimmed.
    # Its group was not finished. Only the last group can have been left like that, and it appends at the end.
    return row >= partition.end and begun <= version + GROUP_COMMITS_MAX
