"""Base classes for the usual jobs, so that such a job is a few declarative lines.

A class may also declare the configuration it takes: ``config_schema = {"cluster": str, "limit": (int, 100)}``.
"""
