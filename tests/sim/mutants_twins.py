"""Planted bugs that need a second instance at the right moment. Every function here is one; see ``mutants``.

They are searched for with the profile ``twins``, in which every seed has second instances.
"""

from __future__ import annotations

from typing import Any

from shuffle.mapper.ingest import Ingestion as _Ingestion


def reducers_not_asked_at_a_restart(patch: Any) -> None:
    """What was trimmed before is then unknown to the new instance, as in the bug that seed 800 found."""
    patch(_Ingestion, "_committed", lambda self: {})
