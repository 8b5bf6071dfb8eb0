"""The rules of the store as plain classes: commits, conflicts, queues, leases, sessions. No threads, no clocks."""
