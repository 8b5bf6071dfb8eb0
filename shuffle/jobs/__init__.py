"""Base classes for common jobs, which are then declared in a few lines.

A class may also declare the configuration it takes: ``config_schema = {"cluster": str, "limit": (int, 100)}``.
"""
