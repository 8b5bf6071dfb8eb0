"""The names of everything that a processor keeps in the store: its tables, its queues, and its groups of leases.

    PROCESSOR/mappers                   one row for each mapper: its persisted positions (``mapper_state``)
    PROCESSOR/reducers                  one row for each reducer: what it has committed (``reducer_state``)
    PROCESSOR/spills                    where the spilled rows of a mapper and a reducer end
    PROCESSOR/reads                     the order in which mappers of several partitions read them (``read_order``)
    PROCESSOR/meta                      the fingerprint, and which Spark query reads the processor (``query_lease``)
    PROCESSOR/emitted                   where the rows of a batch begin that reducers under Spark hand over to Spark
    PROCESSOR/exports                   one row for each exporter: what is outside already (``export_state``)
    PROCESSOR/outbox                    a queue: rows on their way to an output outside of the store
    QUEUE/exports                       the same as PROCESSOR/exports for a dead-letter queue that is carried outside
    PROCESSOR/spill/MAPPER              a queue: the spilled rows themselves, with a partition for each reducer
    PROCESSOR/ROLE_dead_letters         a queue: rows that ``map`` or ``reduce`` refused, unless the spec names another

Groups of leases are named like the tables of the workers that hold them.
"""

from __future__ import annotations

from typing import Literal

Role = Literal["mapper", "reducer"]
"""The role of a worker."""


def mappers_table(processor: str) -> str:
    return f"{processor}/mappers"


def reducers_table(processor: str) -> str:
    return f"{processor}/reducers"


def spills_table(processor: str) -> str:
    return f"{processor}/spills"


def reads_table(processor: str) -> str:
    return f"{processor}/reads"


def meta_table(processor: str) -> str:
    return f"{processor}{_META}"


def processor_of_meta_table(table: str) -> str | None:
    """The processor whose meta table this is; None for any other table."""
    return table.removesuffix(_META) if table.endswith(_META) else None


def emitted_table(processor: str) -> str:
    return f"{processor}/emitted"


def exports_table(processor: str) -> str:
    return f"{processor}/exports"


def dead_letter_exports_table(queue: str) -> str:
    """Named by the queue, and not by the processor: positions are of this queue, whoever uses it."""
    return f"{queue}/exports"


def outbox_queue(processor: str) -> str:
    return f"{processor}/outbox"


def spill_queue(processor: str, mapper_index: int) -> str:
    return f"{processor}/spill/{mapper_index}"


def dead_letter_queue(processor: str, role: Role) -> str:
    return f"{processor}/{role}_dead_letters"


def mappers_group(processor: str) -> str:
    return f"{processor}/mappers"


def reducers_group(processor: str) -> str:
    return f"{processor}/reducers"


def exporters_group(processor: str) -> str:
    return f"{processor}/exporters"


def dead_letter_exporters_group(processor: str, queue: str) -> str:
    return f"{processor}/exporters of {queue}"


def query_group(processor: str) -> str:
    return f"{processor}/query"


_META = "/meta"
