"""The store behind a daemon: the client's end of each protocol."""
