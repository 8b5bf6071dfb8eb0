"""The daemon: the server's end of each protocol, its metrics, and the bounds on what clients may use."""
