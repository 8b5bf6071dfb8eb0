"""Mappers: read a partition, map it, hold the result in a window, serve it to reducers, trim."""
