"""The daemon: the server's end of each protocol, and what keeps it alive and bounded."""
