"""Helpers that every package may use and that depend on none of them: logs, threads, sockets, units, retries."""
