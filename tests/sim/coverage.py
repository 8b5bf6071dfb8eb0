"""The marks that a run of many seeds must reach: rare branches that must have run at least once, or the run has tested
less than it seems to. ``probes`` sets most of them."""

from __future__ import annotations

SEEDS_MIN = 1_000
"""The number of seeds from which on all marks are required. With fewer seeds a mark may be missing by chance."""

EXPECTED: tuple[str, ...] = (
    # the network
    "call timed out",
    "answer found nobody",
    "request arrived after its caller gave up",
    "a message reached another life of its target",
    # the mapper
    "a false claim was found at the trim",
    "a gap without rows",
    "a lease ran out",
    "a mapper noticed another instance",
    "a mapper refused a claim",
    "a mapper refused a request for another instance",
    "a mapper refused a request of another generation",
    "a mapper refused a request of another processor",
    "a mapper set rows aside",
    "a poison row stopped its partition",
    "a trim whose answer was lost had happened",
    "a window entry that was held did serve",
    "a window entry that was held did commit",
    "a window entry that was held did spill",
    "a window entry that was served did serve",
    "a window entry that was served did commit",
    "a window entry that was served did spill",
    "a window entry that was committed did retire",
    "a window entry that was spilled did retire",
    "a window entry that was retired did persist",
    "a window was full",
    "mapper paused beyond its lease",
    "rows were gone",
    "rows were mapped again that were committed already",
    "the store confirmed a claim",
    "three instances of a mapper",
    # the reducer
    "a commit was settled: committed",
    "a commit was settled: rerun",
    "a commit was settled: split brain",
    "a reducer learned from a mapper that another instance is alive",
    "a reducer set rows aside",
    "a reducer was told that what comes next is not for it",
    "an answer of an abandoned epoch had rows",
    "reducer paused beyond its lease",
    "three instances of a reducer",
    # the store
    "a group failed before anything of it was written",
    "a group failed, and nobody knows whether it is durable",
    "commit refused, its session was over",
    "commit unknown",
    "session expired",
    "several commits in one group",
    "store restarted itself after a failed write",
    "the store refused a commit for want of room",
    "the store refused a commit that had read what changed",
    # around them
    "a snapshot was read",
    "the producer repeated an append",
)
