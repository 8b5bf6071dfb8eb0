"""The messages between clients and the daemon: operations, fields, frames, and their codecs."""
