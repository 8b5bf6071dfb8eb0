"""What clients and the daemon say to each other: operations, fields, frames, and their codecs."""
